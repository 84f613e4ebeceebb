"""Which rank sees which samples, and what comes back: every sample once, in the right place, whatever the input."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense

CHECKS = Checks(__name__)
OFF = tf.data.experimental.AutoShardPolicy.OFF


class Recording(keras.Sequential):
    """Notes the first column of every batch that it is trained on."""

    def __init__(self):
        super().__init__([keras.Input((1,)), L.Dense(1)])
        self.seen = []

    def train_step(self, batch):
        x = batch[0] if isinstance(batch, tuple) else batch

        def note(rows):
            if rows.min() >= 1:  # below: made-up rows, on which tfdist tries a custom train_step
                self.seen.append((rows[:, 0].astype(int) - 1).tolist())
            return np.int32(0)

        with tf.control_dependencies([tf.numpy_function(note, [x], tf.int32)]):
            x = tf.identity(x)
        return super().train_step((x, x))


def recording(ring, strategy=None):
    strategy = strategy or ring.strategy
    with strategy.scope():
        model = strategy.distribute(Recording())
        model.compile(keras.optimizers.SGD(0.0), "mse")
    return model


def with_policy(dataset, policy):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def once_an_epoch(ring, seen, samples, epochs=2):
    """Every rank's samples, epoch by epoch: each of `samples` exactly once, and something for every rank."""
    everybody = ring.everywhere([list(batch) for batch in seen])
    for epoch in range(epochs):
        ids = []
        for mine in everybody:
            steps = len(mine) // epochs
            part = [i for batch in mine[epoch * steps : (epoch + 1) * steps] for i in batch]
            assert part
            ids += part
        assert sorted(ids) == list(range(samples)), ids
    return everybody


def numbered(samples):
    """Samples that `Recording` notes as 0, 1, ..."""
    return np.arange(1, samples + 1, dtype="float32")[:, None]


@CHECKS
def r24_without_a_seed_each_sample_once(ring):
    """R24: nobody set a seed; arrays and an unseeded `Dataset.shuffle`."""
    import random

    import tfdist

    tf.random.set_seed(None)
    random.seed(100 + ring.rank)
    np.random.seed(100 + ring.rank)
    strategy = tfdist.RingAllReduceStrategy(bucket_mb=0.001)
    model = recording(ring, strategy)
    model.fit(numbered(66), numbered(66), batch_size=16, epochs=2, verbose=0)
    everybody = once_an_epoch(ring, model.seen, 66)
    assert everybody[0][0] != list(range(8))  # it was shuffled
    model = recording(ring, strategy)
    model.fit(tf.data.Dataset.from_tensor_slices(numbered(66)).shuffle(66).batch(16), epochs=2, verbose=0)
    once_an_epoch(ring, model.seen, 66)


@CHECKS
def r24_one_seed_or_different_ones(ring):
    """R24, R25: arrays are partitioned whatever each rank's seed; the first epoch's order is that of one process."""
    keras.utils.set_random_seed(11)
    plain = Recording()
    plain.compile(keras.optimizers.SGD(0.0), "mse")
    plain.fit(numbered(64), numbered(64), batch_size=16, verbose=0)
    for seed in (11, 11 + ring.rank):
        keras.utils.set_random_seed(seed)
        model = recording(ring)
        model.fit(numbered(64), numbered(64), batch_size=16, epochs=2, verbose=0)
        first, second = once_an_epoch(ring, model.seen, 64)
        assert [a + b for a, b in zip(first[:4], second[:4], strict=True)] == plain.seen


@CHECKS
def r2_ten_batches_and_nine(ring):
    """R2: the ranks bring their own batches, not equally many: no hang, and the weights of plain Keras."""
    rng = np.random.default_rng(4)
    batches = [
        [(rng.normal(size=(5 + r, 8)).astype("float32"), rng.integers(0, 4, 5 + r)) for _ in range(10 - r)]
        for r in range(2)
    ]
    plain = dense()
    plain.compile(keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    joined = []
    for step in range(10):
        parts = [b[step] for b in batches if step < len(b)]
        joined.append(tuple(np.concatenate(column) for column in zip(*parts, strict=True)))
    start = plain.get_weights()
    spec = (tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int64))
    # Of unknown length, plain Keras would count one update too many an epoch.
    whole = tf.data.Dataset.from_generator(lambda: iter(joined), output_signature=spec)
    told = plain.fit(whole.apply(tf.data.experimental.assert_cardinality(10)), epochs=2, verbose=0)

    own = tf.data.Dataset.from_generator(lambda: iter(batches[ring.rank]), output_signature=spec)
    with ring.strategy.scope():
        model = ring.strategy.distribute(dense())
        model.compile(keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    model.set_weights(start)
    history = model.fit(with_policy(own, OFF), epochs=2, verbose=0)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6)
    for key in told.history:
        np.testing.assert_allclose(history.history[key], told.history[key], rtol=1e-5)
    assert int(model.optimizer.iterations.numpy()) == 20
    # Evaluation and prediction of the ranks' own batches.
    tested = model.evaluate(with_policy(own, OFF), verbose=0, return_dict=True)
    everything = [np.concatenate(column) for column in zip(*batches[0], *batches[1], strict=True)]
    plain.set_weights(model.get_weights())
    expected = plain.evaluate(*everything, verbose=0, return_dict=True)
    np.testing.assert_allclose(tested["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(tested["accuracy"], expected["accuracy"], rtol=1e-6)
    predicted = model.predict(with_policy(own.map(lambda x, y: x), OFF), verbose=0)
    np.testing.assert_allclose(predicted, plain.predict(everything[0], verbose=0), atol=1e-5)


@CHECKS
def r2_a_rank_without_any_batch(ring):
    """R2: a rank whose dataset is empty cannot stand in; the error says so everywhere."""
    own = tf.data.Dataset.from_tensor_slices(numbered(8)).batch(2).take(0 if ring.rank == 1 else 4)
    model = recording(ring)
    with pytest.raises(ValueError, match="brought no batch at all"):
        model.fit(with_policy(own, OFF), verbose=0)


def write_files(ring, counts):
    """Text files of numbered lines, `counts[i]` in the i-th, written by rank 0."""
    if ring.rank == 0:
        number = 0
        for i, n in enumerate(counts):
            lines = [str(1 + number + k) for k in range(n)]
            (ring.path / f"part-{i}.txt").write_text("\n".join(lines) + "\n")
            with tf.io.TFRecordWriter(str(ring.path / f"part-{i}.records")) as writer:
                for line in lines:
                    writer.write(line.encode())
            number += n
    ring.everywhere(None)


@CHECKS
def files_are_shared_by_file(ring):
    """Each sample once an epoch, and no rank reads the files of another; unequal files too."""
    write_files(ring, [8, 8, 8, 8, 6])
    reads = []

    def parse(line):
        number = tf.strings.to_number(line)
        counted = tf.numpy_function(lambda n: reads.append(int(n)) or n, [number], tf.float32)
        return tf.reshape(counted, [1])

    pattern = str(ring.path / "part-*")
    sources = {
        "records": tf.data.TFRecordDataset(sorted(tf.io.gfile.glob(pattern + ".records"))),
        "interleaved": tf.data.Dataset.list_files(pattern + ".txt").interleave(tf.data.TextLineDataset),
    }
    for name, source in sources.items():
        reads.clear()
        model = recording(ring)
        model.fit(source.map(parse).batch(8), epochs=2, verbose=0)
        counted = list(reads)
        assert len(counted) < 2 * 38 * 0.75, (name, len(counted))
        everybody = ring.everywhere(counted)
        for epoch in (0, 1):
            ids = sum((mine[len(mine) // 2 * epoch :][: len(mine) // 2] for mine in everybody), [])
            assert sorted(ids) == list(range(1, 39)), (name, ids)


@CHECKS
def files_fewer_than_ranks(ring):
    """One file: the batches are cut instead; FILE asked for by name is an error."""
    write_files(ring, [12])
    lines = tf.data.TextLineDataset(str(ring.path / "part-0.txt"))
    dataset = lines.map(lambda t: tf.reshape(tf.strings.to_number(t), [1])).batch(4)
    model = recording(ring)
    model.fit(dataset, epochs=2, verbose=0)
    once_an_epoch(ring, model.seen, 12)
    with pytest.raises(ValueError, match="FILE was set.*at least as many files as ranks"):
        recording(ring).fit(with_policy(dataset, tf.data.experimental.AutoShardPolicy.FILE), verbose=0)


@CHECKS
def differently_ordered_pipelines(ring):
    """A pipeline that each rank shuffles in its own way is noticed at the first step."""
    dataset = tf.data.Dataset.from_tensor_slices((numbered(64), numbered(64))).shuffle(64, seed=ring.rank).batch(16)
    with pytest.raises(ValueError, match="pipelines produce different global batches"):
        recording(ring).fit(dataset, verbose=0)


@CHECKS
def datasets_of_different_lengths(ring):
    dataset = tf.data.Dataset.from_tensor_slices(numbered(64)).batch(8).take(5 + ring.rank)
    with pytest.raises(ValueError, match="5 to 6 batches.*AutoShardPolicy.OFF"):
        recording(ring).fit(dataset, verbose=0)


@CHECKS
def a_batch_smaller_than_the_ranks(ring):
    for source in (
        {"x": numbered(8), "y": numbered(8), "batch_size": 1},
        {"x": tf.data.Dataset.from_tensor_slices(numbered(8)).batch(1)},
    ):
        with pytest.raises(ValueError, match="is 1, but it is the global batch.*2 ranks"):
            recording(ring).fit(**source, verbose=0)


class Counting(np.memmap):
    """Notes which rows are read."""

    def __getitem__(self, key):
        if isinstance(key, np.ndarray):
            self.rows.extend(key.tolist())
        return super().__getitem__(key)


@CHECKS
def mapped_files_are_read_by_rows(ring):
    """`np.memmap`: a rank reads its own rows only, and they are the right ones."""
    if ring.rank == 0:
        numbered(66).tofile(ring.path / "x")
    ring.everywhere(None)
    mapped = np.memmap(ring.path / "x", "float32", "r", shape=(66, 1)).view(Counting)
    mapped.rows = []
    model = recording(ring)
    model.fit(mapped, numbered(66), batch_size=16, epochs=2, verbose=0)
    seen = once_an_epoch(ring, model.seen, 66)[ring.rank]
    assert sorted(mapped.rows) == sorted(i for batch in seen for i in batch)


@CHECKS
def several_arrays(ring):
    """Lists of arrays, and dicts of them, as x; tensors and lists of numbers as y."""
    x, y = data(33)
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    plain = keras.Model([a, b], L.Dense(4)(L.Concatenate()([a, b])))
    start = plain.get_weights()
    wanted = None
    for strategy in (None, ring.strategy):
        for given in ([x, 2 * x], {"a": x, "b": tf.constant(2 * x)}):
            model = keras.models.clone_model(plain)
            model = strategy.distribute(model) if strategy else model
            model.compile(keras.optimizers.SGD(0.1), cross_entropy())
            model.set_weights(start)
            model.fit(given, tf.constant(y), batch_size=16, shuffle=False, verbose=0)
            got = [*model.get_weights(), model.predict(given, verbose=0)]
            wanted = wanted or got
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, atol=2e-6)


test_data = CHECKS.tests()
