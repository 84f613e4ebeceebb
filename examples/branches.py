"""Model parallel by branches: the digits of ring.py, an Inception-like model, its wide branches on a second device.

    python examples/branches.py          # two GPUs, or two logical CPUs

The data are scikit-learn's 1,797 digits of 8 x 8 pixels; nothing is downloaded.
"""

import zlib

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tfdist


def load():
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    x, xv, y, yv = train_test_split(images, labels, test_size=0.2, random_state=1, stratify=labels)
    return (x, y), (xv, yv)


def build_model():
    images = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="stem")(images)
    for block in range(2):
        fine = keras.layers.Conv2D(32, 1, activation="relu", name=f"fine{block}")(x)
        fine = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(fine)
        wide = keras.layers.Conv2D(16, 1, activation="relu", name=f"wide{block}")(x)
        wide = keras.layers.Conv2D(32, 5, padding="same", activation="relu")(wide)
        x = keras.layers.Concatenate(name=f"both{block}")([fine, wide])
    x = keras.layers.Dropout(0.3)(keras.layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, keras.layers.Dense(10)(x))


keras.utils.set_random_seed(1)
(x, y), validation = load()

# A layer that is not named is where the last one is that it takes from: naming a branch's first layer moves the branch.
strategy = tfdist.ModelParallelStrategy(2, balance={"wide0": 1, "both0": 0, "wide1": 1, "both1": 0}, microbatches=2)
with strategy.scope():
    model = strategy.distribute(build_model())
    print(strategy.plan(model))
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x, y, batch_size=64, epochs=12, validation_data=validation, verbose=2)

loss, accuracy = model.evaluate(*validation, verbose=0)
checksum = 0
for weight in model.get_weights():
    checksum = zlib.crc32(weight.tobytes(), checksum)
print(f"validation accuracy {accuracy:.4f}, weight checksum {checksum:08x}", flush=True)
