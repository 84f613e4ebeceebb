"""The strategy that the environment asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from tfdist import tf_config
from tfdist.cluster import World


def choose(env: Mapping[str, str]) -> tuple[str, str]:
    """Tells ("ring", "parameter server" or "one process", why).

    The first that applies:

    1. A launcher's rank variables (`tfdist run -np`, `horovodrun`, `mpirun`) for more than one rank: the ring. They are
       set for this very process, where TF_CONFIG may be inherited.
    2. TF_CONFIG with a cluster: the parameter server.
    3. Neither: one process.

    Raises:
      ValueError: the variables are wrong, or TF_CONFIG names a cluster without chief, workers or ps.
    """
    world = World.from_env(env)
    if world.size > 1:
        return "ring", f"a launcher started {world.size} ranks"
    found = tf_config.from_env(env)
    if found is not None:
        cluster, task = found
        tf_config.need_chief(cluster)
        return "parameter server", f"TF_CONFIG names {len(cluster.workers)} workers and {len(cluster.ps)} ps"
    return "one process", "neither a launcher's ranks nor TF_CONFIG are set"


def auto_strategy() -> Any:
    """The strategy for how this script was started, see `choose`; the chief or rank 0 prints which, and why.

    One process gets a `RingAllReduceStrategy` of one rank, which trains as plain Keras does.

    Raises:
      SystemExit: in a worker or ps task, when the job is over.
      ValueError: as `choose`.
    """
    kind, why = choose(os.environ)
    found = tf_config.from_env() if kind == "parameter server" else None
    if found[1].is_chief if found else World.from_env().is_chief:
        print(f"tfdist: {kind}, because {why}", flush=True)
    if kind == "parameter server":
        from tfdist.strategies.parameter_server import ParameterServerStrategy

        return ParameterServerStrategy()
    from tfdist.strategies.ring import RingAllReduceStrategy

    return RingAllReduceStrategy()
