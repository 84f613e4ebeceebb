"""Saved files are plain Keras: written once, free of tfdist and Horovod, and training goes on from them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense

# One rank may wait for the other's new process to import TensorFlow.
CHECKS = Checks(__name__, env={"TFDIST_DEADLINE": "90"})

# Loads a file where neither tfdist nor Horovod can be imported, and predicts.
ELSEWHERE = """
import sys
for name in ("tfdist", "horovod"):
    sys.modules[name] = None
import numpy as np
path, kind, out = sys.argv[1:]
x = np.random.default_rng(0).normal(size=(103, 8)).astype("float32")[:5]
if kind == "export":
    import tensorflow as tf
    loaded = tf.saved_model.load(path)
    y = loaded.serve(x).numpy()
else:
    import keras
    model = keras.models.load_model(path)
    assert type(model).__mro__[0].__module__.startswith("keras."), type(model)
    y = model.predict(x, verbose=0)
np.save(out, y)
assert not [m for m in sys.modules if m.startswith(("tfdist.", "horovod."))]
"""


def elsewhere(path, kind, out):
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(path), kind, str(out)], check=True, env=quiet, timeout=100)
    return np.load(out)


@keras.saving.register_keras_serializable("tfdist_tests")
class OwnLayer(L.Dense):
    pass


@keras.saving.register_keras_serializable("tfdist_tests")
class OwnLoss(keras.losses.MeanSquaredError):
    pass


@keras.saving.register_keras_serializable("tfdist_tests")
class OwnOptimizer(keras.optimizers.SGD):
    pass


@keras.saving.register_keras_serializable("tfdist_tests")
class OwnModel(keras.Model):
    def __init__(self, width=4, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.head = OwnLayer(width, name="head")

    def call(self, x):
        return self.head(x)

    def get_config(self):
        return {**super().get_config(), "width": self.width}


def functional():
    i = keras.Input((8,), name="in")
    h = L.BatchNormalization(synchronized=True, name="norm")(OwnLayer(6, name="own")(i))
    return keras.Model(i, {"a": L.Dense(4, name="a")(h), "b": L.Dense(1, name="b")(h)}, name="two")


def cases():
    """(build, compile arguments, targets) of models of each kind."""
    x, y = data(32)
    sequential = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((8,), name="in"), L.Dense(4, name="out")], name="seq"
    )
    yield sequential, {"optimizer": keras.optimizers.Adam, "loss": cross_entropy, "metrics": ["accuracy"]}, y
    yield sequential, {"optimizer": OwnOptimizer, "loss": cross_entropy}, y
    losses = lambda: {"a": cross_entropy(), "b": OwnLoss()}  # noqa: E731
    targets = {"a": y, "b": x[:, :1]}
    yield functional, {"optimizer": keras.optimizers.AdamW, "loss": losses, "metrics": {"a": ["accuracy"]}}, targets
    scaled = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())  # noqa: E731
    yield (lambda: OwnModel(name="mine")), {"optimizer": scaled, "loss": cross_entropy}, y


def config_of(path):
    """config.json without what differs from process to process: numbers of names, addresses."""
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))

    def plain(value):
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k != "shared_object_id"}
        if isinstance(value, str):
            return re.sub(r"_\d+$", "", value)
        return [plain(v) for v in value] if isinstance(value, list) else value

    return plain(config)


def differences(one, other, path=""):
    if type(one) is not type(other):
        return [f"{path}: {one!r}, {other!r}"]
    if isinstance(one, dict):
        return [d for k in sorted({*one, *other}) for d in differences(one.get(k), other.get(k), f"{path}.{k}")]
    if isinstance(one, list) and len(one) == len(other):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differences(a, b, f"{path}.{i}")]
    return [] if one == other else [f"{path}: {one!r}, {other!r}"]


@CHECKS
def r10_config_is_that_of_a_plain_model(ring):
    """R10: config.json equals that of the never-distributed model; registered classes keep their names, and load."""
    for number, (build, how, targets) in enumerate(cases()):
        x, _ = data(32)
        paths = []
        for strategy in (None, ring.strategy):
            model = strategy.distribute(build()) if strategy else build()
            model.compile(how["optimizer"](), loss=how["loss"](), metrics=how.get("metrics"))
            model.fit(x, targets, batch_size=16, verbose=0)
            paths.append(ring.path / f"{number}-{'ring' if strategy else f'plain-{ring.rank}'}.keras")
            model.save(paths[-1])
        ring.everywhere(None)
        plain, ours = map(config_of, paths)
        assert differences(plain, ours) == [], differences(plain, ours)
        assert "tfdist." not in json.dumps(ours) and "Ring" not in json.dumps(ours)
        loaded = keras.models.load_model(paths[1])
        assert type(loaded) is type(build()) and type(loaded.optimizer) is type(how["optimizer"]())
        for one, other in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())


@CHECKS
def r10_loads_without_tfdist_and_horovod(ring):
    """R10: `save` and `export`, loaded by a process in which neither can be imported; no Horovod op in the graph."""
    model = ring.strategy.distribute(
        keras.Sequential([keras.Input((8,)), L.BatchNormalization(synchronized=True), L.Dense(4)])
    )
    model.compile("adam", cross_entropy())
    x, y = data()
    model.fit(x, y, batch_size=32, verbose=0)
    model.save(ring.path / "model.keras")
    model.export(ring.path / "export", verbose=False)
    predicted = model.predict(x[:5], verbose=0)
    names = sorted(p.name for p in ring.path.iterdir())
    ring.everywhere(None)
    assert ring.rank or names == ["export", "model.keras"], names
    kind, name = (("model", "model.keras"), ("export", "export"))[ring.rank]
    there = elsewhere(ring.path / name, kind, ring.path / f"{kind}.npy")
    np.testing.assert_allclose(there, predicted, atol=1e-5)
    if ring.rank == 0:
        from tensorflow.core.protobuf import saved_model_pb2

        graph = saved_model_pb2.SavedModel.FromString((ring.path / "export" / "saved_model.pb").read_bytes())
        (meta,) = graph.meta_graphs
        nodes = [*meta.graph_def.node, *(n for f in meta.graph_def.library.function for n in f.node_def)]
        assert len(nodes) > 10
        assert [n.op for n in nodes if "orovod" in n.op or "PyFunc" in n.op] == []
    ring.everywhere(None)


@CHECKS
def r9_save_load_distribute_fit(ring):
    """R9: optimizer state is kept over save, load, distribute and fit; ranks equal, as one process without a break."""
    x, y = data(64)

    def fit(model, **kwargs):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, **kwargs)
        return model

    plain = dense()
    plain.compile(keras.optimizers.Adam(0.01), cross_entropy())
    start = ring.everywhere(plain.get_weights())[0]
    plain.set_weights(start)
    fit(plain, epochs=2)

    model = ring.strategy.distribute(dense())
    model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    model.set_weights(start)
    fit(model).save(ring.path / "model.keras")
    ring.everywhere(None)
    with ring.strategy.scope():
        model = ring.strategy.distribute(keras.models.load_model(ring.path / "model.keras"))
    fit(model)
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)
    assert int(model.optimizer.iterations.numpy()) == 8
    told = ring.everywhere([v.numpy().tolist() for v in model.optimizer.variables])
    assert told[0] == told[1]
    # Weights that only rank 0 has loaded.
    model.save_weights(ring.path / "only.weights.h5")
    ring.everywhere(None)
    other = ring.strategy.distribute(dense())
    other.compile(keras.optimizers.SGD(0.0), cross_entropy())
    if ring.rank == 0:
        other.load_weights(ring.path / "only.weights.h5")
    fit(other)
    for one, wanted in zip(other.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, wanted)


@CHECKS
def a_file_appears_whole(ring):
    """A save that fails leaves the old file as it was, and nothing beside it."""
    model = ring.strategy.distribute(dense())
    path = ring.path / "model.keras"
    model.save(path)
    ring.everywhere(None)
    before = path.read_bytes()

    class Unsaveable(L.Layer):
        def get_config(self):
            raise RuntimeError("cannot be saved")

    bad = ring.strategy.distribute(keras.Sequential([keras.Input((8,)), Unsaveable()]))
    failed = False
    try:
        bad.save(path)
    except RuntimeError:
        failed = True
    assert ring.everywhere(failed) == [True, False]
    assert path.read_bytes() == before and [p.name for p in ring.path.iterdir()] == ["model.keras"]


@CHECKS
def clone_pickle_and_summary(ring):
    """What else people do with a model: clone, copy, summary, isinstance, get_config."""
    import copy

    model = ring.strategy.distribute(dense())
    model.compile(keras.optimizers.Adam(0.01), cross_entropy())
    x, y = data(32)
    model.fit(x, y, batch_size=16, verbose=0)
    assert type(keras.models.clone_model(model)) is keras.Sequential
    assert isinstance(model, keras.Sequential) and model.__class__ is keras.Sequential
    assert type(keras.Sequential.from_config(model.get_config())) is keras.Sequential
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    assert isinstance(keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model.optimizer)),
                      keras.optimizers.Adam)  # fmt: skip
    model.summary(print_fn=lambda *a, **k: None)
    copied = copy.deepcopy(model)
    np.testing.assert_allclose(copied(x[:3]), model(x[:3]), atol=1e-6)
    assert tf.is_tensor(model(x[:3]))


test_saving = CHECKS.tests()
