"""Promise 1: the ranks of a ring end with the weights of one process on the joined batch, and report its numbers."""

from __future__ import annotations

import pytest

from tests.helpers import cluster


def compare_all(names=None):
    """Runs every case plainly (shared out among the ranks) and on the ring; returns the differences by name."""
    import traceback

    import keras
    import numpy as np

    import tests.multiprocess.parity_inputs  # noqa: F401 - registers its cases
    import tfdist
    from tests.multiprocess.parity_cases import CASES, TOLERANCE, Way

    strategy = tfdist.RingAllReduceStrategy(bucket_mb=0.0005)
    chosen = [n for n in CASES if not names or n in names]
    plain = {}
    for index, name in enumerate(chosen):
        if index % tfdist.size() == tfdist.rank():
            keras.utils.set_random_seed(7)
            plain[name] = CASES[name](Way())
    differences = {}
    for index, name in enumerate(chosen):
        keras.utils.set_random_seed(7)
        try:
            weights, logs = CASES[name](Way(strategy))
        except Exception:
            return {**differences, name: (traceback.format_exc(), 0.0)}
        owner = index % tfdist.size()
        sums = tfdist.all_gather(np.array([[float(np.abs(w).sum()) for w in weights]]))
        worst = float(np.abs(sums - sums[0]).max()) * 1e6  # ranks must agree to the last bit
        if owner == tfdist.rank():
            expected, told = plain[name]
            pairs = [*zip(weights, expected, strict=True), *((logs[k], told[k]) for k in told)]
            worst = max([worst, *(float((np.abs(np.asarray(a, "f8") - b) / (1 + np.abs(b))).max()) for a, b in pairs)])
            if set(logs) != set(told):
                worst = float("inf")
        differences[name] = (worst, TOLERANCE[name])
    return differences


@pytest.mark.parametrize("ranks", [2, 3])
def test_parity(ranks):
    wrong = {}
    for differences in cluster.run(compare_all, ranks=ranks, deadline=600):
        wrong |= {n: d for n, (d, allowed) in differences.items() if isinstance(d, str) or not d <= allowed}
    assert not wrong, "\n".join(f"{name}: {value}" for name, value in wrong.items())
