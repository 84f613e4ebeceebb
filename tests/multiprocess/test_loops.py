"""Loops and steps of the user's own: custom train_step, GANs, `strategy.run`, `reduce`, `gather`."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import Custom, cross_entropy, data, dense

CHECKS = Checks(__name__)
BATCH = 16


def close(ours, plain, tolerance=3e-6):
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


@CHECKS
def r20_custom_step_run_eagerly(ring):
    """R20: a train_step with its own tape under run_eagerly=True."""
    x, y = data(55)
    ends = []
    for strategy in (None, ring.strategy):
        keras.utils.set_random_seed(3)
        model = Custom([keras.Input((8,)), L.Dense(16, "tanh"), L.Dense(4)])
        model = strategy.distribute(model) if strategy else model
        model.compile(keras.optimizers.Adam(0.01), cross_entropy(), run_eagerly=True)
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        ends.append(model.get_weights())
    close(*ends)


def batches(n=55):
    x, y = data(n)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def plain_loop():
    keras.utils.set_random_seed(3)
    model, optimizer = dense(), keras.optimizers.Adam(0.01)
    loss = cross_entropy()
    losses = []
    for _epoch in range(2):
        for x, y in batches():
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
            losses.append(float(value))
    return model.get_weights(), losses


@CHECKS
def custom_loop_with_strategy_run(ring):
    """R20: TensorFlow's custom training loop, as its guide writes it, ends with the weights of a plain one."""
    strategy = ring.strategy
    wanted, losses = plain_loop()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, optimizer = dense(), keras.optimizers.Adam(0.01)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(batch, total):
        x, y = batch
        with tf.GradientTape() as tape:
            each = loss(y, model(x, training=True))
            value = tf.nn.compute_average_loss(each, global_batch_size=total)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    @tf.function
    def step(batch, total):
        return strategy.reduce("SUM", strategy.run(train_step, args=(batch, total)), axis=None)

    totals = [BATCH, BATCH, BATCH, 7]
    got = []
    for _epoch in range(2):
        for batch, total in zip(strategy.experimental_distribute_dataset(batches()), totals, strict=True):
            got.append(float(step(batch, tf.constant(total))))
    close(model.get_weights(), wanted)
    np.testing.assert_allclose(got, losses, rtol=1e-5)


@CHECKS
def custom_loop_with_a_mean(ring):
    """The same with a Keras loss, which divides by its rows and, inside `run`, by the ranks; on even shares."""
    strategy = ring.strategy
    keras.utils.set_random_seed(3)
    plain, optimizer = dense(), keras.optimizers.SGD(0.1)
    for x, y in batches(64):
        with tf.GradientTape() as tape:
            value = cross_entropy()(y, plain(x))
        optimizer.apply(tape.gradient(value, plain.trainable_variables), plain.trainable_variables)
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, optimizer = dense(), keras.optimizers.SGD(0.1)
        loss = cross_entropy()

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            value = loss(y, model(x))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    for batch in strategy.experimental_distribute_dataset(batches(64)):
        strategy.run(step, args=(batch,))
    close(model.get_weights(), plain.get_weights())


@CHECKS
def reduce_and_gather(ring):
    """`reduce` and `gather` of what `run` returned, eager and in a function; inside `run` the replica context."""
    strategy, rank = ring.strategy, ring.rank
    assert strategy.num_replicas_in_sync == 2

    def value():
        return tf.constant([[1.0, 2.0]]) * (rank + 1)

    mine = strategy.run(value)
    for call in (lambda f: f, tf.function):
        total = call(lambda: strategy.reduce(tf.distribute.ReduceOp.SUM, mine, axis=None))()
        np.testing.assert_array_equal(total, [[3.0, 6.0]])
        mean = call(lambda: strategy.reduce("MEAN", mine, axis=None))()
        np.testing.assert_array_equal(mean, [[1.5, 3.0]])
        rows = call(lambda: strategy.gather(mine, axis=0))()
        np.testing.assert_array_equal(rows, [[1.0, 2.0], [2.0, 4.0]])
        columns = call(lambda: strategy.gather(mine, axis=1))()
        np.testing.assert_array_equal(columns, [[1.0, 2.0, 2.0, 4.0]])
    np.testing.assert_allclose(strategy.reduce("MEAN", tf.range(3.0 + rank), axis=0), (0 + 1 + 2 + 0 + 1 + 2 + 3) / 7)
    assert strategy.experimental_local_results(mine)[0] is mine

    def inside():
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", {"a": tf.constant(1.0 + rank), "b": tf.constant([2.0])})
        return context.replica_id_in_sync_group, context.num_replicas_in_sync, total

    for call in (lambda f: f, tf.function):
        number, count, total = call(lambda: strategy.run(inside))()
        assert (int(number), int(count)) == (rank, 2)
        assert float(total["a"]) == 3.0 and float(total["b"][0]) == 4.0


@CHECKS
def datasets_from_a_function(ring):
    """`distribute_datasets_from_function` with an InputContext, in a loop and in fit (R2: the ranks' own batches)."""

    def make(context):
        size = context.get_per_replica_batch_size(BATCH)
        whole = tf.data.Dataset.from_tensor_slices(data(64))
        return whole.shard(context.num_input_pipelines, context.input_pipeline_id).batch(size)

    dataset = ring.strategy.distribute_datasets_from_function(make)
    x, y = data(64)
    for i, (mine, _) in enumerate(dataset):
        np.testing.assert_array_equal(mine, x[ring.rank :: 2][8 * i :][:8])
    keras.utils.set_random_seed(3)
    plain = dense()
    plain.compile(keras.optimizers.SGD(0.1), cross_entropy())
    start = plain.get_weights()
    plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    model = ring.strategy.distribute(dense())
    model.compile(keras.optimizers.SGD(0.1), cross_entropy())
    model.set_weights(start)
    model.fit(dataset, verbose=0)
    close(model.get_weights(), plain.get_weights())
    values = ring.strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    assert int(values) == ring.rank


@CHECKS
def plain_share_of_a_dataset(ring):
    """A loop's dataset: each rank its rows of every batch, the short last one too; each sample once."""
    dataset = tf.data.Dataset.range(23).batch(5)
    mine = [b.numpy().tolist() for b in ring.strategy.experimental_distribute_dataset(dataset)]
    told = ring.everywhere(mine)
    joined = [a + b for a, b in zip(*told, strict=True)]
    assert joined == [b.numpy().tolist() for b in dataset]


class Gan(keras.Model):
    """Two networks with an optimizer each, never called as a whole."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), L.Dense(8, "tanh"), L.Dense(8)])
        self.critic = keras.Sequential([keras.Input((8,)), L.Dense(8, "tanh"), L.Dense(1)])
        self.loss_tracker = keras.metrics.Mean(name="d_loss")

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def train_step(self, real):
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = real[:, :3]
        with tf.GradientTape() as tape:
            fake, true = self.critic(self.generator(noise)), self.critic(real)
            d_loss = loss(tf.zeros_like(fake), fake) + loss(tf.ones_like(true), true)
        grads = tape.gradient(d_loss, self.critic.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.critic.trainable_weights, strict=True))
        with tf.GradientTape() as tape:
            fake = self.critic(self.generator(noise))
            g_loss = loss(tf.ones_like(fake), fake)
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
        self.loss_tracker.update_state(d_loss)
        return {"d_loss": self.loss_tracker.result()}


@CHECKS
def r20_a_gan(ring):
    """R20: two optimizers, and a model whose call is never defined."""
    x, _ = data(48)
    ends = []
    for strategy in (None, ring.strategy):
        keras.utils.set_random_seed(3)
        model = Gan()
        model = strategy.distribute(model) if strategy else model
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02))
        history = model.fit(x, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        ends.append([*model.get_weights(), np.array(history.history["d_loss"])])
    close(*ends)


@CHECKS
def custom_test_and_predict_step(ring):
    """A test_step and a predict_step of the user's own."""

    class Own(keras.Sequential):
        def test_step(self, batch):
            x, y = batch
            for metric in self.metrics:
                if metric.name != "loss":
                    metric.update_state(y, self(x, training=False))
            return {m.name: m.result() for m in self.metrics if m.name != "loss"}

        def predict_step(self, batch):
            x = batch[0] if isinstance(batch, tuple) else batch
            return tf.argmax(self(x), -1)

    x, y = data(55)
    ends = []
    for strategy in (None, ring.strategy):
        keras.utils.set_random_seed(3)
        model = Own([keras.Input((8,)), L.Dense(4)])
        model = strategy.distribute(model) if strategy else model
        model.compile("sgd", cross_entropy(), metrics=["accuracy"])
        told = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
        ends.append([np.array(told["accuracy"]), model.predict(x, verbose=0)])
    close(*ends)


test_loops = CHECKS.tests()
