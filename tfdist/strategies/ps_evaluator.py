"""The strategy of an evaluator task: the same script, whose `fit` evaluates what the chief trains."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.ps.consistency import parse
from tfdist.ps.evaluator import Receiver
from tfdist.strategies.parameter_server import ParameterServerStrategy
from tfdist.tf_config import from_env, need_chief
from tfdist.trainers import ps_evaluator as mixing
from tfdist.trainers.models import check_backend


class EvaluatorStrategy(ParameterServerStrategy):
    """What `ParameterServerStrategy()` gives in an evaluator task.

    `distribute` leaves a model Keras' own, but for `fit`: it waits for weights of the chief, evaluates them on the
    validation data with Keras' `evaluate`, prints a line, and so on until the chief is done. Then it raises
    SystemExit(0), so what follows `fit` runs on the chief alone.

    Args:
      options: what the script passes in every task; they are for the chief.

    Raises:
      SystemExit: it is not the first evaluator.
      ValueError: as `ParameterServerStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        check_backend()
        found = from_env()
        if found is None or found[1].job != "evaluator":
            raise ValueError(
                "EvaluatorStrategy() is for a task that TF_CONFIG names an evaluator. Use ParameterServerStrategy(), "
                "which gives one there."
            )
        cluster, task = found
        need_chief(cluster)
        if task.index:
            print(f"{task.name}: evaluator/0 evaluates, so there is nothing to do here", flush=True)
            raise SystemExit(0)
        self._cluster, self._task = cluster, task
        self.consistency = parse(options.get("consistency", "async"))
        device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
        tf.distribute.OneDeviceStrategy.__init__(self, f"/device:{device}")

    @property
    def num_replicas_in_sync(self) -> int:
        """As on the chief, for scripts that compute a batch size or a rate from it."""
        return self.consistency.replicas(len(self._cluster.workers))

    def distribute(self, model: Any) -> Any:
        return mixing.distribute(model, self)

    def receiver(self) -> Receiver:
        """A new end of the line to the chief."""
        return Receiver(self._cluster, self._task)
