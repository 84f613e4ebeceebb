"""The collectives, the public operations and the gradient reducer on real ranks, against numpy."""

from __future__ import annotations

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
        reduced = ["int16", "float32"] if graph else names.split()  # tracing is what takes time here
        moved = ["uint32", "float32"] if graph else [*names.split(), "bool", "uint64", "complex64", "complex128"]
        for dtype in reduced:
            for op, fold in folds.items():
                if op == "mean" and not dtype.startswith("f"):
                    continue
                got = call(lambda x, o=op, d=dtype: group.all_reduce(x, f"r.{o}.{d}", o))(tf.constant(of(rank, dtype)))
                want = fold(np.stack([of(r, dtype) for r in range(size)]), axis=0).astype(dtype)
                check(f"all_reduce {op} {dtype} graph={graph}", got, want, exact=op != "mean")
        for dtype in moved:
            got = call(lambda x, d=dtype: group.all_gather(x, f"g.{d}"))(
                tf.constant(np.repeat(of(rank, dtype), rank + 1, axis=0))
            )
            want = np.concatenate([np.repeat(of(r, dtype), r + 1, axis=0) for r in range(size)])
            check(f"all_gather {dtype} graph={graph}", got, want)
            got = call(lambda x, d=dtype: group.broadcast(x, size - 1, f"b.{d}"))(tf.constant(of(rank, dtype)))
            check(f"broadcast {dtype} graph={graph}", got, of(size - 1, dtype))
        brain = tf.cast(of(rank, "float32"), tf.bfloat16)
        check(
            "bfloat16 sum",
            tf.cast(group.all_reduce(brain, "bf"), tf.float32),
            np.sum([of(r, "float32") for r in range(size)], axis=0),
        )
        check("bfloat16 bits", tf.cast(group.broadcast(brain, 0, "bfb"), tf.float32), of(0, "float32"))
        check("complex", group.all_reduce(tf.constant([1 + 2j]), "cplx"), np.array([size * (1 + 2j)]))
        check("bool min", group.all_reduce(tf.constant([True, rank == 0]), "bm", "min"), [True, size == 1])
        for op in ("sum", "max"):
            rows = np.arange(10.0).reshape(5, 2) + rank
            whole = folds[op]([np.arange(10.0).reshape(5, 2) + r for r in range(size)], axis=0)
            got = call(lambda x, o=op: group.reduce_scatter(x, f"rs.{o}", o))(tf.constant(rows))
            check(f"reduce_scatter {op}", got, np.array_split(whole, size)[rank])
        check("nothing", group.all_gather(tf.zeros([0, 2]), "none"), np.zeros([0, 2], "f4"))
        check("scalar", group.all_reduce(tf.constant(1.0 + rank), "scalar"), np.float32(size * (size + 1) / 2))

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
            return [tape.gradient(y, x) for y in (loss, part, sent, mine)]

        found = (tf.function(gradients) if graph else gradients)(x)
        ones = size * (size + 1) / 2
        sums = np.array([1.0, 2.0]) * ones
        check("gradient sum", found[0], (2 * sums * ones).astype("f4"))
        check("gradient gather", found[1], (2 * x.numpy() * size).astype("f4"))
        check("gradient broadcast", found[2], (2 * size * np.array([1.0, 2.0]) * (rank == 0)).astype("f4"))
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


def _operations():
    """The public operations on every kind of value; returns what went wrong."""
    import numpy as np
    import tensorflow as tf

    import tfdist

    rank, size = tfdist.rank(), tfdist.size()
    everyone = range(size)
    wrong = []

    def check(label, got, want):
        if type(got) is not type(want) and not tf.is_tensor(got):
            wrong.append(f"{label}: got a {type(got)}, want a {type(want)}")
        elif np.asarray(got).dtype != np.asarray(want).dtype or not np.array_equal(got, want):
            wrong.append(f"{label}: got {got!r}, want {want!r}")

    # Kinds of values: what goes in comes out.
    check("number", tfdist.all_reduce(rank + 1), np.int64(sum(r + 1 for r in everyone)))
    check("float", tfdist.all_reduce(0.5, op="mean"), np.float64(0.5))
    check("bool any", tfdist.all_reduce(rank == 1, op="any"), np.bool_(True))
    check("bool all", tfdist.all_reduce(rank == 1, op="all"), np.bool_(size == 1))
    check("int mean", tfdist.all_reduce(np.array([rank, 1]), op="mean"), np.array([(size - 1) / 2, 1.0]))
    check("array", tfdist.all_reduce(np.float32([rank, 2])), np.float32([sum(everyone), 2 * size]))
    tensor = tfdist.all_reduce(tf.constant([rank, 2]), op="max")
    assert tf.is_tensor(tensor)
    check("tensor", tensor, np.int32([size - 1, 2]))
    check("variable", tfdist.all_reduce(tf.Variable([1.0])), np.float32([size]))
    nested = {"a": [np.int64(rank), (np.ones((2, 2)), tf.fill([3], rank))], "b": 2.0, "c": np.zeros((0,))}
    got = tfdist.all_reduce(nested)
    check("nested a0", got["a"][0], np.int64(sum(everyone)))
    check("nested a10", got["a"][1][0], np.full((2, 2), float(size)))
    check("nested a11", got["a"][1][1], np.full(3, sum(everyone), np.int32))
    check("nested b", got["b"], np.float64(2.0 * size))
    check("nested c", got["c"], np.zeros((0,)))
    check("gather scalars", tfdist.all_gather(rank * 2), np.array([2 * r for r in everyone]))
    rows = np.full((rank + 1, 2), rank)
    check("gather rows", tfdist.all_gather(rows), np.concatenate([np.full((r + 1, 2), r) for r in everyone]))
    to_one = [tfdist.reduce(1, root=1), tfdist.gather(rank, root=1)]
    if rank == 1:
        check("reduce", to_one[0], np.int64(size))
        check("gather", to_one[1], np.arange(size))
    elif to_one != [None, None]:
        wrong.append(f"rank {rank} got {to_one}")
    got = tfdist.broadcast({"x": np.array([rank, 7]), "y": [True, rank * 1.5]}, root=1)
    check("broadcast x", got["x"], np.array([1, 7]))
    check("broadcast y1", got["y"][1], np.float64(1.5))
    check("scatter", tfdist.reduce_scatter(np.arange(7)), np.array_split(np.arange(7) * size, size)[rank])
    check("scatter mean", tfdist.reduce_scatter(np.arange(7), op="mean"), np.array_split(np.arange(7.0), size)[rank])
    tfdist.barrier()

    # Inside a tf.function, a retrace on one rank only included.
    @tf.function
    def step(x, extra):
        total = tfdist.all_reduce({"x": x, "n": tf.constant(1)})
        tfdist.barrier()
        parts = tfdist.all_gather(x[:1])
        for _ in tf.range(2):
            x = tfdist.all_reduce(x, op="max")
        return total["x"] + extra, total["n"], parts, x

    for extra in (1.0, 1.0 if rank else 2.0):
        got = step(tf.constant([1.0 + rank, 2.0]), extra)
        check("graph x", got[0], np.float32([sum(everyone) + size, 2.0 * size]) + np.float32(extra))
        check("graph n", got[1], np.int32(size))
        check("graph parts", got[2], np.float32([1.0 + r for r in everyone]))
        check("graph loop", got[3], np.float32([size, 2.0]))

    # Differences between ranks: an error on every rank that shows what each gave; then all goes on.
    def fails(label, kind, texts, fn):
        try:
            fn()
            wrong.append(f"{label}: no error")
        except kind as error:
            wrong.extend(f"{label}: {error}" for text in texts if text not in str(error))

    first = rank == 0
    fails(
        "shape",
        ValueError,
        ["'tensor 0' float64[3]", "'tensor 0' float64[4]", "rank 0 ("],
        lambda: tfdist.all_reduce(np.zeros(3 if first else 4)),
    )
    fails(
        "type",
        ValueError,
        ["float32[any]", "int64[any]"],
        lambda: tfdist.all_gather(np.zeros(2, "f4" if first else "i8")),
    )
    fails(
        "op",
        ValueError,
        ["all_reduce sum of", "all_reduce max of"],
        lambda: tfdist.all_reduce(1.0, op="sum" if first else "max"),
    )
    fails(
        "kind",
        ValueError,
        ["all_reduce sum of", "barrier of"],
        lambda: tfdist.all_reduce(1.0) if first else tfdist.barrier(),
    )
    fails("unknown", ValueError, ["known are 'sum', 'mean'"], lambda: tfdist.all_reduce(1.0, op="avg"))
    fails("root", ValueError, [f"ranks are 0 to {size - 1}"], lambda: tfdist.broadcast(1.0, root=size))
    fails("text", ValueError, ["takes tensors, arrays, numbers"], lambda: tfdist.all_reduce("a"))
    fails("any", ValueError, ["needs booleans"], lambda: tfdist.all_reduce(1.0, op="any"))
    check("afterwards", tfdist.all_reduce(1), np.int64(size))
    return wrong


def _reducer():
    """Gradients through the reducer in a graph; returns what went wrong, and the order of starts."""
    import numpy as np
    import tensorflow as tf

    from tfdist.comm import collective
    from tfdist.comm.link import choose_bucket_bytes, measure
    from tfdist.comm.reducer import GradientReducer, _row

    group = collective.get()
    rank, size = group.rank, group.size
    names = [f"v{i}" for i in range(12)]

    def values(r):
        random = np.random.default_rng(r)
        return [random.integers(-9, 9, (i + 1, 3)).astype("f4") for i in range(12)]

    want = [sum(values(r)[i] for r in range(size)) for i in range(12)]
    table = np.zeros((50, 2), "f4")
    for r in range(size):
        np.add.at(table, [7, 7, r], 1.0 + r)
    wrong = []
    for limit, compression in ((1, None), (200, None), (10**6, None), (200, "fp16")):
        reducer = GradientReducer(group, limit, compression)

        @tf.function
        def step(grads, facts, reducer=reducer, key=f"k{limit}{compression}"):
            sparse = tf.IndexedSlices(tf.fill([3, 2], 1.0 + rank), tf.constant([7, 7, rank]), tf.constant([50, 2]))
            got, total = reducer.reduce([*grads, sparse, None], [*names, "table", "none"], key, facts)
            return got[:12], got[12], total

        for _ in range(3):
            got, sparse, total = step([tf.constant(v) for v in values(rank)], tf.constant([1.0, rank]))
        if not all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)):
            wrong.append(f"limit {limit} {compression}: wrong sums")
        if not np.array_equal(sparse.values, table[sparse.indices.numpy()]):
            wrong.append(f"limit {limit} {compression}: wrong rows")
        if not np.array_equal(total, np.float32([size, sum(range(size))])):
            wrong.append(f"limit {limit} {compression}: facts {total}")
        if reducer.sparse_bytes != 2 * (2 * 4 + 4):  # two rows of two float32, and their indices
            wrong.append(f"sparse bytes {reducer.sparse_bytes}")

    # Inf and NaN of one rank reach every rank, through fp16 as well: the finite check relies on it.
    for compression in (None, "fp16"):
        bad = tf.constant([np.inf, np.nan, 1.0] if rank == 1 else [1.0, 1.0, 1.0])
        got = GradientReducer(group, 100, compression).reduce([bad], ["v"], f"bad{compression}")[0][0].numpy()
        if not (got[0] == np.inf and np.isnan(got[1]) and got[2] == size):
            wrong.append(f"{compression}: {got}")
    try:
        GradientReducer(group, 100).reduce([tf.zeros([4 + rank])], ["dense/kernel"], "differ")
        wrong.append("no error for different shapes")
    except ValueError as error:
        if not all(t in str(error) for t in ("'dense/kernel' float32[4]", "'dense/kernel' float32[5]")):
            wrong.append(str(error))
    link = measure(group)
    choice = choose_bucket_bytes([_row(tf.constant(v), "v") for v in want], link)
    return wrong, link, choice


def _stopped(how):
    """Rank 1 never comes, or ends; what rank 0 is told, after how long, and what rank 1 is told."""
    import time

    import tensorflow as tf

    import tfdist
    from tfdist.comm import collective, watch

    tfdist.barrier()
    group = collective.get()
    start = time.monotonic()
    messages = []

    @tf.function
    def step(x):
        return group.all_reduce(x, "step")

    def told(call):
        try:
            call()
        except RuntimeError as error:
            messages.append((str(error), time.monotonic() - start))

    def guarded():
        with watch.waiting("evaluate of 'm'"):
            step(tf.ones([4]))

    if how == "missing":
        if group.rank == 0:
            told(guarded)
        else:
            verdict = watch._board
            with verdict.news:  # in user code, until the others gave up
                assert verdict.news.wait_for(lambda: verdict.verdict, 60)
            told(tfdist.barrier)
    elif how == "different":
        told(guarded if group.rank == 0 else tfdist.barrier)
    return messages


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_operations_and_reducer(ranks):
    """In one job: starting processes takes longer than all these checks."""
    results = cluster.run(lambda: (_collectives(), _operations(), _reducer()), ranks=ranks)
    for (collectives, hosts), operations, (reducer, link, choice) in results:
        assert collectives == []
        assert operations == []
        assert reducer == []
        assert len(hosts) == ranks
        assert 0 < link.latency_s < 5
        assert 1e6 < link.bandwidth_Bps < 1e12
        assert choice[1].startswith("buckets of 1 MB (1 a step)")


@pytest.mark.parametrize("how", ["missing", "different"])
def test_a_missing_rank_is_named(how):
    first, second = cluster.run(lambda: _stopped(how), env={"TFDIST_DEADLINE": "2"})
    [(message, seconds)] = first
    assert message == second[0][0]
    assert "within 2 s" in message
    assert seconds < 12
    if how == "missing":
        assert message.startswith("evaluate of 'm' was joined by rank 0 (")
        assert "rank 1 is in user code" in message
    else:
        assert "evaluate of 'm'" in message
        assert "barrier" in message
