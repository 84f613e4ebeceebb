"""The parity cases that differ by what `fit` is given, and when the model is built and compiled."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L

from tests.multiprocess.parity_cases import BATCH, ROWS, O, case, cross_entropy, data, dense, fit, result


@case()
def tf_data(way):
    x, y = data()
    train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(ROWS, seed=5).batch(BATCH)
    valid = tf.data.Dataset.from_tensor_slices((x[:33], y[:33])).batch(10)
    return fit(way, dense(), O.Adam(0.01), x=train, batch_size=None, validation_data=valid)


class Rows(keras.utils.PyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = data()

    def __len__(self):
        return -(-ROWS // BATCH)

    def __getitem__(self, i):
        cut = slice(i * BATCH, (i + 1) * BATCH)
        return self.x[cut], self.y[cut]


@case()
def py_dataset(way):
    return fit(way, dense(), O.Adam(0.01), x=Rows(workers=2), batch_size=None)


@case()
def generator(way):
    def batches():
        source = Rows()
        while True:
            for i in range(len(source)):
                yield source[i]

    return fit(way, dense(), O.Adam(0.01), x=batches(), batch_size=None, steps_per_epoch=3)


@case()
def validation_of_other_sizes(way):
    x, y = data(100)
    return fit(way, dense(), O.SGD(0.1), validation_data=(x[:10], y[:10]), validation_batch_size=7)


@case()
def built_late(way):
    model = keras.Sequential([L.Dense(16, "tanh"), L.Dense(4)])
    return fit(way, model, O.Adam(0.01))


@case()
def compiled_before(way):
    model = dense()
    model.compile(O.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    x, y = data()
    model = way.distribute(model)
    return result(model, model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0))


@case()
def on_batches(way):
    x, y = data(32)
    with way.scope():
        model = way.distribute(dense())
        model.compile(O.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    logs = [model.train_on_batch(x[:31], y[:31], return_dict=True) for _ in range(3)]
    tested = model.test_on_batch(x, y, return_dict=True)
    told = {k: np.array([log[k] for log in logs] + [tested[k]]) for k in tested}
    return [*model.get_weights(), model.predict_on_batch(x[:5])], told
