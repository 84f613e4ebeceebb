"""Run in a process of its own, with a cluster on this machine: `python ps_checks.py WORKERS RESULTS`, see test_ps.py.

TensorFlow joins one cluster in a process, so all checks of a cluster run in one, one after the other.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback

import tfdist
from tests.multiprocess import (  # noqa: F401  # they register their checks
    ps_consistency_one,
    ps_consistency_two,
    ps_one_worker,
    ps_saving,
    ps_two_workers,  # whose last check ends a ps
)
from tests.multiprocess.ps_parts import CHECKS, CLUSTER


def main() -> None:
    workers, results = int(sys.argv[1]), sys.argv[2]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born deaf to it
    CLUSTER["cluster"] = tfdist.LocalCluster(workers=workers, ps=2)
    strategy = tfdist.ParameterServerStrategy(cluster=CLUSTER["cluster"])
    found = {}
    with strategy.scope():
        for check in CHECKS[workers]:
            try:
                check(strategy)
                found[check.__name__] = ""
            except BaseException:
                found[check.__name__] = traceback.format_exc()
    with open(results, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
