"""The strategy's arguments, the callbacks, and how buckets leave: one spawn of two ranks for all of it."""

from __future__ import annotations

import pytest

from tests.helpers import cluster


def _train(strategy, optimizer, *, epochs=2, callbacks=(), batch=32, rows=96, **kwargs):
    import keras

    from tests.multiprocess.parity_cases import Way, data, dense

    keras.utils.set_random_seed(7)
    x, y = data(rows)
    way = Way(strategy)
    with way.scope():
        model = way.distribute(dense())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], **kwargs)
    history = model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, history.history


def _difference(a, b):
    import numpy as np

    return max(float(np.abs(p - q).max()) for p, q in zip(a.get_weights(), b.get_weights(), strict=True))


def _reduce_ops(found):
    import keras

    import tfdist

    plain, _ = _train(None, keras.optimizers.SGD(0.2))
    ring, _ = _train(tfdist.RingAllReduceStrategy(reduce_op="sum"), keras.optimizers.SGD(0.1))
    found["sum of two means is twice the mean"] = _difference(plain, ring) < 1e-5
    try:
        _train(tfdist.RingAllReduceStrategy(reduce_op="adasum"), keras.optimizers.SGD(0.1))
    except Exception as error:
        found["adasum on Gloo is refused"] = "Adasum needs MPI" in str(error)


def _compression(found):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    class Halves:
        """A compression of the user's own: every value halved on the way."""

        def compress(self, flat, n_ranks, agree_max):
            return flat / 2, None

        def decompress(self, wire, context):
            return wire * 2

    exact, _ = _train(tfdist.RingAllReduceStrategy(), keras.optimizers.SGD(0.1))
    half, _ = _train(tfdist.RingAllReduceStrategy(compression="fp16"), keras.optimizers.SGD(0.1))
    own, _ = _train(tfdist.RingAllReduceStrategy(compression=Halves()), keras.optimizers.SGD(0.1))
    found["fp16 is close"] = 0 < _difference(exact, half) < 2e-3
    found["a compression of one's own is exact where it is"] = _difference(exact, own) == 0
    flat = np.concatenate([w.ravel() for w in half.get_weights()])
    both = tfdist.all_gather(tf.constant(flat[None])).numpy()
    found["fp16 leaves the ranks equal"] = bool((both[0] == both[1]).all())


def _scaling(found):
    import keras
    import numpy as np

    import tfdist

    class Rates(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_begin(self, batch, logs=None):
            self.seen.append(float(self.model.optimizer.learning_rate))

    def rates(optimizer, **kwargs):
        spy = Rates()
        scaling = tfdist.LinearScaling(base_batch=16, warmup_epochs=2)
        _train(tfdist.RingAllReduceStrategy(), optimizer, epochs=3, callbacks=[scaling, spy], **kwargs)
        return np.array(spy.seen)

    # 96 rows in batches of 32: 3 updates an epoch, warm-up over 6, from 0.1 to 0.2 (32 / 16).
    ramp = np.array([1 + min(t, 6) / 6 for t in range(9)])
    found["linear scaling"] = np.allclose(rates(keras.optimizers.SGD(0.1)), 0.1 * ramp)
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    expected = 0.1 * 0.9 ** np.arange(9) * ramp
    found["linear scaling of a schedule (R17)"] = np.allclose(rates(keras.optimizers.SGD(decay)), expected)


def _resume(found):
    import contextlib
    import os
    import shutil
    import tempfile

    import keras
    import numpy as np

    import tfdist

    rates = []

    class Spy(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1 and not self.model.resumed:
                raise KeyboardInterrupt

    where = os.path.join(tempfile.gettempdir(), f"tfdist-resume-{os.environ['HOROVOD_RANK']}-{os.getpid()}")
    for resumed in (False, True):
        keras.utils.set_random_seed(7)
        from tests.multiprocess.parity_cases import cross_entropy, data, dense

        strategy = tfdist.RingAllReduceStrategy()
        with strategy.scope():
            model = strategy.distribute(dense())
            model.compile(keras.optimizers.SGD(0.1), cross_entropy())
        model.resumed = resumed
        x, y = data(96)
        callbacks = [
            keras.callbacks.BackupAndRestore(where, delete_checkpoint=False),
            tfdist.LinearScaling(base_batch=16, warmup_epochs=4),
            Spy(),
        ]
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=callbacks)
    shutil.rmtree(where, ignore_errors=True)
    # Six updates until the interruption, which comes after the backup of that epoch; three more when resumed.
    ramp = [0.1 * (1 + t / 12) for t in range(9)]
    resumed = len(rates) == 9 and bool(np.allclose(rates, ramp))
    found["resume in the middle of the warm-up (R17)"] = resumed or str(rates)


def _report(found):
    import keras

    import tfdist

    report = tfdist.RunReport()
    _train(tfdist.RingAllReduceStrategy(bucket_mb=0.0003), keras.optimizers.SGD(0.1), callbacks=[report])
    result = report.result
    found["report"] = (
        result["steps"] == 6
        and result["buckets"] >= 2
        and result["bytes"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
        and result["samples_per_s"] > 0
        and 0 < result["communicating"] < 1
        and 0 <= result["hidden"] <= 1
    ) or str(result)


def _overlap(found):
    """In the step's graph the first bucket's reduction waits for its own gradients only, not for the last."""
    import keras
    import tensorflow as tf

    import tfdist

    strategy = tfdist.RingAllReduceStrategy(bucket_mb=0.0003)
    model, _ = _train(strategy, keras.optimizers.SGD(0.1), epochs=1)
    share = next(iter(strategy.experimental_distribute_dataset(_one_batch())))

    @tf.function(autograph=False)
    def step(batch):
        return strategy.run(model.train_step, args=(batch,))

    graph = step.get_concrete_function(share).graph
    sends = [op for op in graph.get_operations() if op.type == "HorovodAllreduce" and "bucket" in op.name]
    sends.sort(key=lambda op: op.name)
    first_kernel = [op for op in _before(sends[0]) if op.type == "MatMul" and "gradient_tape" in op.name]
    all_kernels = [op for op in graph.get_operations() if op.type == "MatMul" and "gradient_tape" in op.name]
    found["several buckets"] = len(sends) >= 2
    found["the first bucket leaves before the backward pass ends"] = len(first_kernel) < len(all_kernels)
    found["later buckets do not wait for earlier reductions"] = sends[0] not in _before(sends[-1])


def _one_batch():
    import tensorflow as tf

    from tests.multiprocess.parity_cases import data

    return tf.data.Dataset.from_tensor_slices(data(32)).batch(32)


def _before(op):
    """All operations that must run before `op`."""
    seen, todo = set(), [op]
    while todo:
        current = todo.pop()
        for earlier in [*(t.op for t in current.inputs), *current.control_inputs]:
            if earlier not in seen:
                seen.add(earlier)
                todo.append(earlier)
    return seen


def _custom_loop(found):
    """A loop of the user's own: clipping sees the sum over ranks, and weights start from rank 0's."""
    import keras
    import tensorflow as tf

    import tfdist
    from tests.multiprocess.parity_cases import Way, data, dense

    x, y = data(90)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def loop(way, model, optimizer):
        with way.scope():
            model = way.distribute(model)
            model.compile(optimizer)
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
        totals = [32, 32, 26]
        if way.strategy:
            batches = way.strategy.experimental_distribute_dataset(batches)

        def step(features, labels, total):
            with tf.GradientTape() as tape:
                each = loss(labels, model(features, training=True))
                value = tf.reduce_sum(each) / tf.cast(total, tf.float32)
            model.optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

        run = tf.function(lambda *args: way.strategy.run(step, args=args) if way.strategy else step(*args))
        for (features, labels), total in zip(batches, totals, strict=True):
            run(features, labels, tf.constant(total))
        return model

    strategy = tfdist.RingAllReduceStrategy()
    keras.utils.set_random_seed(20 + tfdist.rank())  # other weights on every rank
    start = dense()
    weights = tfdist.broadcast(start.get_weights())
    ring = loop(Way(strategy), start, keras.optimizers.SGD(0.5, global_clipnorm=0.1))
    plain = dense()
    plain.set_weights(weights)
    plain = loop(Way(), plain, keras.optimizers.SGD(0.5, global_clipnorm=0.1))
    found["custom loop with clipping"] = _difference(ring, plain) < 1e-6 or _difference(ring, plain)


def _everything():
    import traceback

    found = {}
    for part in (_reduce_ops, _compression, _scaling, _resume, _report, _overlap, _custom_loop):
        try:
            part(found)
        except Exception:
            found[part.__name__] = traceback.format_exc()
    return found


def test_options():
    for rank, found in enumerate(cluster.run(_everything, ranks=2, deadline=200)):
        wrong = {what: value for what, value in found.items() if value is not True}
        assert not wrong, f"rank {rank}: {wrong}"


@pytest.mark.parametrize(
    "kwargs", [{"bucket_mb": 0}, {"bucket_mb": "big"}, {"reduce_op": "max"}, {"compression": "bf16"}]
)
def test_bad_options_are_named(kwargs):
    import tfdist

    (value,) = kwargs.values()
    with pytest.raises(ValueError, match=repr(value) if isinstance(value, str) else str(value)):
        tfdist.RingAllReduceStrategy(**kwargs)
