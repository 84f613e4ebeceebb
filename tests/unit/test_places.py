"""Where an interrupted `fit` was in its data, against Keras' own loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import private
from tfdist.trainers.places import Place, place_after


class Loop(keras.Model):
    """Notes Keras' iterators: of each step, which one it was and how many batches were taken from it before."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.begun = []
        self.steps = []

    def call(self, inputs):
        return self.dense(inputs)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        model, dataset = self, iterator._distributed_dataset

        class Counted:
            element_spec = dataset.element_spec

            def __iter__(self):
                model.begun.append(0)
                number, batches = len(model.begun) - 1, iter(dataset)

                class One:
                    def __next__(self):
                        batch = next(batches)
                        model.steps.append((number, model.begun[number]))
                        model.begun[number] += 1
                        return batch

                return One()

        iterator._distributed_dataset = Counted()
        self.length = private.batches_in(iterator)

    def make_train_function(self, force=False):
        self.train_function = lambda iterator: {"loss": float(next(iterator)[0][0, 0])}


@pytest.mark.parametrize("steps", [None, 2, 3, 4, 6])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_iterators_and_batches_before_each_epoch(steps, known, endless):
    if endless and steps is None:
        return
    data = tf.data.Dataset.from_tensor_slices(np.arange(12.0)[:, None]).map(lambda x: (x, x)).batch(3)
    data = data.repeat() if endless else data
    data = data if known else data.filter(lambda x, y: True)
    model = Loop()
    model.compile("sgd", "mse")
    begins = []
    mark = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begins.append(len(model.steps)))
    model.fit(data, epochs=5, steps_per_epoch=steps, verbose=0, callbacks=[mark])
    if not known and not endless and steps is not None:
        return  # the data end where Keras does not expect it, which each run finds out by itself
    for epoch, first in enumerate(begins):
        if first < len(model.steps):
            assert Place(*model.steps[first]) == place_after(epoch, steps, model.length), epoch

