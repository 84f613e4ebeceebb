"""A small training that gives the same weights however many ranks share it: run by the tests of this folder.

Arguments: epochs, and "stay" or a directory for checkpoints.
"""

import sys
import threading
import time

import keras
import numpy as np

import tfdist

epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
y = x.sum(1, keepdims=True)
strategy = tfdist.auto_strategy()
with strategy.scope():
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = strategy.distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.SGD(0.1), "mse")


class Told(keras.callbacks.Callback):
    """Says where the training is; it may stay in its second epoch until it is ended, or take its time."""

    def on_epoch_begin(self, epoch, logs=None):
        print(f"epoch {epoch}", flush=True)
        if how == "stay" and epoch == 1:
            threading.Event().wait()
        if how:
            time.sleep(0.3)  # not to wait for something: to be slow


how = sys.argv[2] if len(sys.argv) > 2 else ""
keep = [tfdist.Checkpoint(how, seconds=100)] if how not in ("", "stay") else []
model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[Told(), *keep])
total = float(sum(np.abs(w).sum() for w in model.get_weights()))
print(f"total {total:.5f}", flush=True)
