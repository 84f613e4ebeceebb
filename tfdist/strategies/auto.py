"""The strategy that the environment asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tfdist import meeting, tf_config
from tfdist.cluster import World


def choose(env: Mapping[str, str]) -> tuple[str, str]:
    """Tells ("ring", "parameter server" or "one process", why).

    The first that applies:

    1. A launcher's rank variables (`tfdist run -np`, `horovodrun`, `mpirun`) for more than one rank: the ring. They are
       set for this very process, where TF_CONFIG may be inherited.
    2. TF_CONFIG with ps: the parameter server. With several workers (and perhaps a chief) and no ps: the ring.
    3. Several tasks of a Slurm step: the ring.
    4. None of these: one process.

    Raises:
      ValueError: the variables are wrong, or TF_CONFIG names ps without a chief or workers.
    """
    world = World.from_env(env)
    if world.size > 1:
        return "ring", f"a launcher started {world.size} ranks"
    found = tf_config.from_env(env)
    if found is not None and found[0].ps:
        cluster, task = found
        tf_config.need_chief(cluster)
        return "parameter server", f"TF_CONFIG names {len(cluster.workers)} workers and {len(cluster.ps)} ps"
    met = meeting.from_env(env)
    if met is not None:
        return "ring", f"{met.origin} names {met.size} {'tasks' if met.origin == 'Slurm' else 'workers'}"
    if meeting.watches(env):
        return "ring", "TF_CONFIG names workers without ps"
    return "one process", "neither a launcher's ranks, several tasks of TF_CONFIG nor those of Slurm are set"


def _first(kind: str) -> bool:
    """Whether this process is the one that prints."""
    if kind == "parameter server":
        return tf_config.from_env()[1].is_chief
    met = meeting.from_env()
    return met.rank == 0 if met is not None else World.from_env().is_chief and not meeting.watches()


def auto_strategy() -> Any:
    """The strategy for how this script was started, see `choose`; the chief or rank 0 prints which, and why.

    One process gets a `RingAllReduceStrategy` of one rank, which trains as plain Keras does.

    Raises:
      SystemExit: in a worker or ps task, when the job is over.
      ValueError: as `choose`.
    """
    kind, why = choose(os.environ)
    if _first(kind):
        print(f"tfdist: {kind}, because {why}", flush=True)
    if kind == "parameter server":
        from tfdist.strategies.parameter_server import ParameterServerStrategy

        return ParameterServerStrategy()
    from tfdist.strategies.ring import RingAllReduceStrategy

    return RingAllReduceStrategy()
