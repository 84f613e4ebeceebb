"""A training that hosts join and that a rank leaves: run by test_elastic.py, alone or as an elastic job.

Arguments: the directory for checkpoints, and the file with the hosts that a script prints.
"""

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfdist

ROUND = os.environ.get("TFDIST_ROUND")
EPOCHS, JOIN, DIE = 60, 1, 40

keras.utils.set_random_seed(3)
x = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
y = x.sum(1, keepdims=True)
strategy = tfdist.RingAllReduceStrategy()
with strategy.scope():
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = strategy.distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.Adam(0.01), "mse")


class Events(keras.callbacks.Callback):
    """In round 0 a host is added, and steps take their time until it joins; in round 1 rank 1 dies, once."""

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if ROUND == "0" and epoch == JOIN:
            Path(sys.argv[2]).write_text("alpha:1\nbeta:1\n")

    def on_train_batch_end(self, batch, logs=None):
        if ROUND == "0" and self.epoch >= JOIN:
            time.sleep(0.1)  # not to wait for something: to be slow
        if ROUND == "1" and tfdist.rank() == 1 and self.epoch >= DIE:
            os.kill(os.getpid(), signal.SIGKILL)


callbacks = [] if ROUND is None else [Events(), tfdist.Checkpoint(sys.argv[1], seconds=0.2)]
history = model.fit(x, y, batch_size=16, epochs=EPOCHS, verbose=0, callbacks=callbacks)
total = float(sum(np.abs(w).sum() for w in model.get_weights()))
print(f"{tfdist.size()} ranks, iterations {int(model.optimizer.iterations)}, total {total:.4f}", flush=True)
