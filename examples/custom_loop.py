"""The same digits and model as ring.py, with a training loop of one's own in place of `fit`.

    python examples/custom_loop.py                    # one process
    tfdist run -np 2 examples/custom_loop.py          # two, on this machine

Read it as a diff: `diff examples/ring.py examples/custom_loop.py`. The loop does what `fit` does elsewhere: it starts
from the same weights on every rank, shares the data, divides each loss by the global batch, and sums what it reports.
"""

import zlib

import keras
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist


def load():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(images, labels, test_size=0.2, random_state=1, stratify=labels)
    return (x, y), (xv, yv)


def build_model():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


keras.utils.set_random_seed(1)
(x, y), validation = load()

strategy = tfdist.RingAllReduceStrategy()
with strategy.scope():
    model = strategy.distribute(build_model())
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, 12 * 23)),  # 12 epochs of 23 batches
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

# Batches of the global size; every rank gets its rows of each.
batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000).batch(64))


def step(images, labels):
    """One rank's part of an update; returns its part of the batch's mean loss."""
    rows = tf.distribute.get_replica_context().all_reduce("sum", tf.shape(labels)[0])
    with tf.GradientTape() as tape:
        losses = keras.ops.sparse_categorical_crossentropy(labels, model(images, training=True), from_logits=True)
        loss = tf.nn.compute_average_loss(losses, global_batch_size=rows)  # the last batch is a short one
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply(gradients, model.trainable_variables)  # sums over ranks
    return loss


@tf.function(input_signature=[batches.element_spec])  # one graph for batches of any size
def update(batch):
    return strategy.run(step, args=batch)


for epoch in range(12):
    losses = [update(batch) for batch in batches]
    loss = strategy.reduce("sum", sum(losses) / len(losses), axis=None)
    if tfdist.is_chief():
        print(f"epoch {epoch + 1}: loss {float(loss):.4f}", flush=True)

loss, accuracy = model.evaluate(*validation, verbose=0)
checksum = 0
for weight in model.get_weights():
    checksum = zlib.crc32(weight.tobytes(), checksum)
print(f"rank {tfdist.rank()}: validation accuracy {accuracy:.4f}, weight checksum {checksum:08x}", flush=True)
