"""A model with one large gradient, trained for epochs of a few steps; rank 0 or the chief says when each begins."""

import sys

import keras
import numpy as np

import tfdist

WIDTH, STEPS, BATCH = 2048, 8, 8

keras.utils.set_random_seed(3)
strategy = tfdist.auto_strategy()
with strategy.scope():
    layers = [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, use_bias=False)]
    model = strategy.distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.SGD(0.0), "mse")


class Told(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if tfdist.is_chief():
            print(f"epoch {epoch}", flush=True)


x = np.ones((STEPS * BATCH, WIDTH), "float32")
model.fit(x, x[:, :WIDTH], batch_size=BATCH, epochs=int(sys.argv[1]), verbose=0, callbacks=[Told()])
