"""The peer: Horovod's own operations in a hand-written `tf.function` loop, Horovod's defaults.

On which build of Horovod, the team's PYTHONPATH says: as released (`benchmarks/released.py`), or tfdist's.
"""

from __future__ import annotations

import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from benchmarks import models
from benchmarks.peers.keras_fit import loss


class HorovodLoop:
    def __init__(self) -> None:
        hvd.init()

    def prepare(self, model: str, steps: int) -> dict[str, Any]:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        net, measure = models.build(model), loss()
        optimizer = keras.optimizers.SGD(models.RATE)
        optimizer.build(net.trainable_variables)
        hvd.broadcast_variables([v.value for v in net.variables + optimizer.variables], root_rank=0)

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                value = measure(y, net(x, training=True))
            gradients = hvd.grouped_allreduce(tape.gradient(value, net.trainable_variables))
            optimizer.apply(gradients, net.trainable_variables)
            return value

        self.step = step
        x, y = models.arrays(model, models.BATCH * hvd.size() * steps)
        mine = tf.data.Dataset.from_tensor_slices((x[hvd.rank() :: hvd.size()], y[hvd.rank() :: hvd.size()]))
        self.data = mine.shuffle(1024).batch(models.BATCH).prefetch(2)
        for x, y in self.data.take(5):
            step(x, y)
        return {"horovod": hvd.__file__}

    def run(self) -> list[float]:
        ends = []
        for x, y in self.data:
            self.step(x, y)
            ends.append(time.perf_counter())
        return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def open() -> HorovodLoop:
    return HorovodLoop()
