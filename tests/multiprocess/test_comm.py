"""The collectives, the public operations and the gradient reducer on real ranks, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers import cluster


def _collectives():
    """Every collective, element type and error, in one spawn; returns what went wrong."""
    import numpy as np
    import tensorflow as tf

    from tfdist.comm import collective

    group = collective.get()
    rank, size = group.rank, group.size
    wrong = []

    def check(label, got, want, exact=True):
        got, want = np.asarray(got), np.asarray(want)
        same = np.array_equal(got, want) if exact else np.allclose(got, want, rtol=1e-6)
        if got.dtype != want.dtype or not same:
            wrong.append(f"{label}: got {got.dtype} {got.tolist()}, want {want.dtype} {want.tolist()}")

    def of(r, dtype):
        return np.array([[1, 2, 3], [r + 1, 2 * r, 7 - r]]).astype(dtype)

    folds = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod, "mean": np.mean}
    names = "uint8 int8 int16 uint16 int32 int64 uint32 float16 float32 float64"
    for graph in (False, True):
        call = tf.function if graph else (lambda f: f)
        for dtype in names.split():
            for op, fold in folds.items():
                if op == "mean" and not dtype.startswith("f"):
                    continue
                got = call(lambda x, o=op, d=dtype: group.all_reduce(x, f"r.{o}.{d}", o))(
                    tf.constant(of(rank, dtype))
                )
                want = fold(np.stack([of(r, dtype) for r in range(size)]), axis=0).astype(dtype)
                check(f"all_reduce {op} {dtype} graph={graph}", got, want, exact=op != "mean")
        for dtype in names.split() + ["bool", "uint64", "complex64", "complex128"]:
            got = call(lambda x, d=dtype: group.all_gather(x, f"g.{d}"))(
                tf.constant(np.repeat(of(rank, dtype), rank + 1, axis=0))
            )
            want = np.concatenate([np.repeat(of(r, dtype), r + 1, axis=0) for r in range(size)])
            check(f"all_gather {dtype} graph={graph}", got, want)
            got = call(lambda x, d=dtype: group.broadcast(x, size - 1, f"b.{d}"))(
                tf.constant(of(rank, dtype))
            )
            check(f"broadcast {dtype} graph={graph}", got, of(size - 1, dtype))
        brain = tf.cast(of(rank, "float32"), tf.bfloat16)
        check("bfloat16 sum", tf.cast(group.all_reduce(brain, "bf"), tf.float32),
              np.sum([of(r, "float32") for r in range(size)], axis=0))
        check("bfloat16 bits", tf.cast(group.broadcast(brain, 0, "bfb"), tf.float32), of(0, "float32"))
        check("complex", group.all_reduce(tf.constant([1 + 2j]), "cplx"), np.array([size * (1 + 2j)]))
        check("bool min", group.all_reduce(tf.constant([True, rank == 0]), "bm", "min"), [True, size == 1])
        for op in ("sum", "max"):
            rows = np.arange(10.0).reshape(5, 2) + rank
            whole = folds[op]([np.arange(10.0).reshape(5, 2) + r for r in range(size)], axis=0)
            got = call(lambda x, o=op: group.reduce_scatter(x, f"rs.{o}", o))(tf.constant(rows))
            check(f"reduce_scatter {op}", got, np.array_split(whole, size)[rank])
        check("nothing", group.all_gather(tf.zeros([0, 2]), "none"), np.zeros([0, 2], "f4"))
        check("scalar", group.all_reduce(tf.constant(1.0 + rank), "scalar"),
              np.float32(size * (size + 1) / 2))

    # The sum's gradient is the sum of the gradients, of the ranks' own losses.
    x = tf.constant([1.0, 2.0]) * (rank + 1)
    for graph in (False, True):
        def gradients(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                total = group.all_reduce(x, "d")
                loss = tf.reduce_sum(total**2) * (rank + 1)
                part = tf.reduce_sum(group.all_gather(x[None], "dg") ** 2)
                sent = tf.reduce_sum(group.broadcast(x, 0, "db") ** 2)
                mine = tf.reduce_sum(group.reduce_scatter(x, "ds") ** 2) if size <= 2 else loss
            found = [tape.gradient(y, x) for y in (loss, part, sent, mine)]
            return found
        found = (tf.function(gradients) if graph else gradients)(x)
        ones = size * (size + 1) / 2
        sums = np.array([1.0, 2.0]) * ones
        check("gradient sum", found[0], (2 * sums * ones).astype("f4"))
        check("gradient gather", found[1], (2 * x.numpy() * size).astype("f4"))
        check("gradient broadcast", found[2],
              (2 * size * np.array([1.0, 2.0]) * (rank == 0)).astype("f4"))
        if size <= 2:
            check("gradient scatter", found[3], (2 * sums).astype("f4"))

    def fails(label, kind, text, fn):
        try:
            fn()
            wrong.append(f"{label}: no error")
        except kind as error:
            if text not in str(error):
                wrong.append(f"{label}: {error}")

    fails("op", ValueError, "known are 'sum'", lambda: group.all_reduce(x, "x", "median"))
    fails("text", ValueError, "string", lambda: group.all_reduce(tf.constant("a"), "x"))
    fails("text", ValueError, "string", lambda: group.broadcast(tf.constant("a"), 0, "x"))
    fails("int mean", ValueError, "floating", lambda: group.all_reduce(tf.constant([1]), "x", "mean"))
    fails("root", ValueError, "ranks are 0 to", lambda: group.broadcast(x, size, "x"))
    fails("adasum", RuntimeError, "Adasum needs MPI", lambda: group.all_reduce(x, "x", "adasum"))
    with tf.GradientTape() as tape:
        tape.watch(x)
        least = group.all_reduce(x, "least", "min")
    fails("min gradient", ValueError, "no gradient", lambda: tape.gradient(least, x))
    return wrong, group.hosts


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives(ranks):
    for wrong, hosts in cluster.run(_collectives, ranks=ranks):
        assert wrong == []
        assert len(hosts) == ranks
