"""Models with layers in parts are saved as plain ones, are read and assigned as ever, and say what cannot be."""

from __future__ import annotations

import operator
import subprocess
import sys

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.split_inside import CASES, TABLE, WIDE, table, trained, wide
from tests.multiprocess.split_parts import CPUS, assert_same, make_devices, pair, refused

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)
L = keras.layers
SGD = keras.optimizers.SGD
Adam = keras.optimizers.Adam


@CHECKS
def files_are_plain_both_ways(ring):
    """The same as of the plain model, with the optimizer; and training goes on equally from either."""
    for build in CASES:
        split, plain, x, y = trained(build, lambda: Adam(0.01, use_ema=True))
        paths = {m: ring.path / f"{build.__name__}{i}.keras" for i, m in enumerate((split, plain))}
        for model, path in paths.items():
            model.save(path)
            model.save_weights(path.with_suffix(".weights.h5"))
        listed = []
        for path in paths.values():
            with h5py.File(path.with_suffix(".weights.h5")) as file:
                found = []
                file.visititems(lambda name, item, to=found: to.append((name, getattr(item, "shape", None))))
            listed.append(found)
            assert b"tfdist" not in path.read_bytes()
        assert listed[0] == listed[1], build.__name__

        # A plain model from the distributed one's file, a distributed one from the plain one's.
        loaded = keras.models.load_model(paths[split])
        spread = keras.models.load_model(paths[plain])
        make = tfdist.ModelParallelStrategy
        make(CPUS, balance=CASES[build], microbatches=2).distribute(spread)
        for model in (loaded, spread, split, plain):
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        for model in (loaded, spread, split):
            for kept in ("weights", "optimizer.variables"):  # seeds of layers differ from model to model
                for ours, theirs in zip(*(operator.attrgetter(kept)(m) for m in (model, plain)), strict=True):
                    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-5, err_msg=ours.path)

        # Weights alone, into models whose optimizers have slots.
        for model, path in ((split, paths[plain]), (plain, paths[split])):
            model.load_weights(path.with_suffix(".weights.h5"))
        assert_same(split, plain)
        assert int(split.optimizer.iterations) == int(plain.optimizer.iterations)
        for model in (split, plain):
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        assert_same(split, plain)


@CHECKS
def a_file_needs_no_tfdist(ring):
    split, _, x, _ = trained(wide)
    split.save(ring.path / "model.keras")
    np.save(ring.path / "x.npy", x)
    script = (
        "import sys; sys.modules['tfdist'] = None; import keras, numpy as np\n"
        "here = sys.argv[1]; model = keras.models.load_model(here + '/model.keras')\n"
        "np.save(here + '/y.npy', model.predict(np.load(here + '/x.npy'), verbose=0))"
    )
    subprocess.run([sys.executable, "-c", script, str(ring.path)], check=True, timeout=120)
    np.testing.assert_allclose(np.load(ring.path / "y.npy"), split.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@CHECKS
def weights_read_and_assigned_as_ever(ring):
    split, plain, x, y = trained(wide)
    layer, other = split.get_layer("wide"), plain.get_layer("wide")
    for mine, theirs in zip(split.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
    assert layer.kernel.shape == other.kernel.shape and layer.kernel.path == other.kernel.path
    assert split.count_params() == plain.count_params()
    np.testing.assert_allclose(keras.ops.sum(layer.kernel * 2.0), keras.ops.sum(other.kernel * 2.0), rtol=1e-3)
    np.testing.assert_allclose(tf.convert_to_tensor(layer.kernel)[1:3], np.array(layer.kernel)[1:3])
    value = np.arange(77, dtype="float32").reshape(11, 7)
    layer.kernel.assign(value)
    np.testing.assert_array_equal(layer.kernel.numpy(), value)
    layer.kernel.assign_add(tf.ones((11, 7)))
    np.testing.assert_array_equal(layer.get_weights()[0], value + 1)
    refused(lambda: layer.kernel.assign(value.T), "has shape (11, 7), but was assigned a value of shape (7, 11)")
    split.set_weights(plain.get_weights())
    split.optimizer.set_weights([v.numpy() for v in plain.optimizer.variables])
    assert_same(split, plain, rtol=0, atol=0)
    for model in (split, plain):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert_same(split, plain)
    assert "kernel" in repr(layer.kernel)
    refused(lambda: split.export(str(ring.path / "exported")), "is held in parts on several devices and cannot be")
    checkpoint, before = tf.train.Checkpoint(model=split), split.get_weights()
    path = checkpoint.save(str(ring.path / "checkpoint"))
    split.set_weights([0 * weight for weight in before])
    checkpoint.restore(path)
    for mine, old in zip(split.get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, old)


@CHECKS
def what_was_trained_before_goes_on(ring):
    """Slots of a model that was fitted before it was distributed, its loss scale with it."""
    scaled = keras.optimizers.LossScaleOptimizer
    for rule in (lambda: Adam(0.01, amsgrad=True), lambda: scaled(SGD(0.1, momentum=0.9))):
        models = []
        for distributed in (True, False):
            keras.utils.set_random_seed(3)
            split_models.random = np.random.default_rng(0)
            model, x, y, loss = wide()
            model.compile(rule(), loss, jit_compile=False)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            if distributed:
                tfdist.ModelParallelStrategy(CPUS, balance=WIDE, microbatches=2).distribute(model)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            models.append(model)
        assert_same(*models)
    for model in models:
        model.compile(rule(), loss, run_eagerly=True)
        model.fit(x[:16], y[:16], batch_size=16, verbose=0)
    assert_same(*models)


@CHECKS
def ids_out_of_range_are_errors(ring):
    for bad in (11, -12):
        split, plain, x, y = pair(table, CPUS, balance=TABLE, microbatches=2)
        x[1][3, 3] = bad
        for model in (plain, split):
            with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
                model.fit(x, y, verbose=0)


@CHECKS
def what_cannot_be_is_said(ring):
    def distributed(layer, devices=("CPU:0", "CPU:1"), shape=(12,), calls=1, **options):
        layer.name = "it"
        first = keras.Input(shape, **options)
        x = first
        for _ in range(calls):
            x = layer(x)
        model = keras.Model(first, L.Dense(3)(L.Flatten()(x)))
        strategy = tfdist.ModelParallelStrategy(CPUS, balance={"it": list(devices)}, microbatches=2)
        return strategy.distribute(model)

    class Own(L.Dense):
        pass

    refused(lambda: distributed(L.Conv1D(4, 2), shape=(12, 3)), "it is a Conv1D. Those of class Dense")
    refused(lambda: distributed(Own(4)), "it is a Own.")
    refused(lambda: distributed(L.Dense(2), CPUS[:3]), "has fewer parts")
    refused(lambda: distributed(L.Dense(12), calls=2), "the model calls it 2 times")
    refused(lambda: distributed(L.Dense(4), sparse=True), "its input is sparse")
    refused(lambda: distributed(L.Dense(4, lora_rank=2)), "it has LoRA")
    refused(lambda: distributed(L.Dense(4, kernel_regularizer="orthogonal_regularizer")), "OrthogonalRegularizer")
    refused(lambda: distributed(L.Dense(4, bias_regularizer=lambda w: keras.ops.max(w))), "the regularizer <lambda>")
    refused(lambda: distributed(L.Dense(4, kernel_constraint=keras.constraints.UnitNorm(1))), "constraint UnitNorm")
    refused(lambda: distributed(L.Dense(4, bias_constraint="max_norm")), "constraint MaxNorm")
    same = L.EinsumDense("ab,b->ab", 12)
    refused(lambda: distributed(same), "leaves no axis of its kernel")
    refused(lambda: distributed(L.Dense(4), ["CPU:0", "CPU:9"]), "device 'CPU:9' is unknown")
    refused(lambda: distributed(L.Dense(4), ["CPU:0", "/CPU:0"]), "expected each of its devices once")
    refused(lambda: distributed(L.Dense(4), []), "balance puts 'it' on device []")
    refused(lambda: distributed(L.Dense(4), ["CPU:0"]), "puts all layers on")

    layer = L.Dense(4)
    model = distributed(layer)
    refused(lambda: distributed(layer), "another distributed model holds it")
    for rule in (keras.optimizers.Adafactor(), keras.optimizers.Lamb(), keras.optimizers.Muon()):
        refused(lambda rule=rule: model.compile(rule, "mse"), f"but {type(rule).__name__} may look at a whole weight")
    refused(lambda: model.get_layer("it").enable_lora(2), "LoRA of such a layer is not possible")
    with pytest.raises(NotImplementedError):
        model.get_layer("it").quantize("int8")
    before = keras.Sequential([keras.Input((12,)), L.Dense(4, name="it"), L.Dense(3)])
    before.compile(keras.optimizers.Lamb(), "mse")
    make = tfdist.ModelParallelStrategy(CPUS, balance={"it": ["CPU:0", "CPU:1"]})
    refused(lambda: make.distribute(before), "but Lamb may look at a whole weight")
    assert isinstance(before.layers[0].kernel.value, tf.Variable), "nothing was changed"


test_split_inside_saving = CHECKS.tests()
