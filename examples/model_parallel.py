"""Model parallel: the same digits and model as ring.py, its layers on two devices.

    python examples/model_parallel.py          # two GPUs, or two logical CPUs

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

strategy = tfdist.ModelParallelStrategy(2)
with strategy.scope():
    model = strategy.distribute(build_model())
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(2e-3, 12 * 23)),  # 12 epochs of 23 batches
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

model.fit(x, y, batch_size=64, epochs=12, validation_data=validation, verbose=2)

loss, accuracy = model.evaluate(*validation, verbose=0)
checksum = 0
for weight in model.get_weights():
    checksum = zlib.crc32(weight.tobytes(), checksum)
print(f"validation accuracy {accuracy:.4f}, weight checksum {checksum:08x}", flush=True)
