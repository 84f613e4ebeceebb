"""tfdist: unchanged Keras 3 models, trained on TensorFlow by many processes.

Names are loaded when they are first used, so that `tfdist --help` does not wait for TensorFlow.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "RingAllReduceStrategy": "tfdist.strategies.ring",
    "ParameterServerStrategy": "tfdist.strategies.parameter_server",
    "ModelParallelStrategy": "tfdist.strategies.model_parallel",
    "HybridStrategy": "tfdist.strategies.hybrid",
    "Plan": "tfdist.planner.plan",
    **dict.fromkeys(("Async", "Bounded", "Sync", "LocalSGD"), "tfdist.ps.consistency"),
    "auto_strategy": "tfdist.strategies.auto",
    "LocalCluster": "tfdist.launch.local_cluster",
    "serve": "tfdist.tasks.serving",
    "Checkpoint": "tfdist.checkpoint",
    "LinearScaling": "tfdist.callbacks",
    "RunReport": "tfdist.report",
    "spawn": "tfdist.launch.spawn",
    "SpawnError": "tfdist.launch.spawn",
    "SpawnTimeoutError": "tfdist.launch.spawn",
    "set_deadline": "tfdist.comm.watch",
    **dict.fromkeys(
        (
            "all_gather",
            "all_reduce",
            "barrier",
            "broadcast",
            "gather",
            "is_chief",
            "local_rank",
            "rank",
            "reduce",
            "reduce_scatter",
            "size",
        ),
        "tfdist.comm.ops",
    ),
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"tfdist has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
