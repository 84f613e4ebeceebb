"""Layers in parts on several devices train as whole ones do, are where they should be, and are saved as plain ones."""

from __future__ import annotations

import collections
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
from tests.multiprocess.split_parts import CPUS, assert_logs, assert_same, make_devices, pair, refused

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)
L = keras.layers
SGD = keras.optimizers.SGD
Adam = keras.optimizers.Adam
WIDE = {"before": "CPU:0", "wide": ["CPU:1", "CPU:0", "CPU:2"], "last": ["CPU:3", "CPU:2"]}
TABLE = {"table": ["CPU:2", "CPU:0", "CPU:1"], "after": "CPU:3"}
CASES = {}  # of a builder: its mapping


def case(**balance):
    return lambda build: CASES.setdefault(build, balance) and build


@case(**WIDE)
def wide():
    """Columns that no number of devices divides; an activation for each element, and one over all columns."""
    first = keras.Input((12,))
    a = L.Dense(11, "tanh", name="before")(first)
    b = L.Dense(7, "relu", name="wide", kernel_regularizer="l2", bias_regularizer="l1")(a)
    out = L.Dense(3, "softmax", use_bias=False, name="last")(L.Concatenate()([b, first]))
    return keras.Model(first, out), split_models.rows(), split_models.classes(), split_models.SPARSE()


@case(**TABLE)
def table():
    """A mask, and ids that come again and again, some from the end; one table looked at twice."""
    words, more = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    rows = L.Embedding(11, 8, mask_zero=True, embeddings_regularizer="l2", name="table")
    a = L.Add()([L.LSTM(8, return_sequences=True)(rows(words)), rows(more)])
    out = L.Dense(3)(L.Dense(8, "tanh", name="after")(a))
    x = [split_models.random.integers(0, 11, (split_models.SAMPLES, 5)).astype("int32") for _ in range(2)]
    x[0][:, 0] = 1  # no row is empty
    x[1][::3, 2] = -1
    return keras.Model([words, more], out), x, split_models.classes(5), split_models.SPARSE(from_logits=True)


@case(heads=["CPU:1", "CPU:2"], back=["CPU:0", "CPU:3"])
def einsum():
    """As in attention: axes in the middle, a bias for all axes and for one that is not cut."""
    first = keras.Input((4, 6))
    a = L.EinsumDense("abc,cde->abde", (4, 3, 5), bias_axes="de", activation="tanh", name="heads")(first)
    b = L.EinsumDense("...de,def->...f", (6,), bias_axes="f", name="back")(a)
    out = L.Dense(3)(L.Flatten()(L.EinsumDense("abc,cde->adbe", (3, 4, 2), bias_axes="e", name="heads2")(b)))
    x = np.random.default_rng(1).normal(size=(split_models.SAMPLES, 4, 6)).astype("float32")
    return keras.Model(first, out), x, split_models.classes(), split_models.SPARSE(from_logits=True)


def trained(build, optimizer=None, epochs=2, balance=None, **options):
    """(split, plain) after the same training, which was compared."""
    options.setdefault("microbatches", 3)
    split, plain, x, y = pair(build, CPUS, optimizer, balance=balance or CASES[build], **options)
    logs = [m.fit(x, y, batch_size=16, epochs=epochs, shuffle=False, verbose=0).history for m in (split, plain)]
    try:
        assert_logs(*logs)
        assert_same(split, plain)
    except AssertionError as error:
        raise AssertionError(f"{build.__name__}, {options}, {split.optimizer.get_config()}: {error}") from error
    return split, plain, x, y


@CHECKS
def parity(ring):
    """Weights, slots, logs, evaluate and predict, with a last batch shorter than the others."""
    for build in CASES:
        for schedule in ("1f1b", "gpipe"):
            for optimizer in (lambda: Adam(0.01), lambda: SGD(0.1, momentum=0.9)):
                split, plain, x, y = trained(build, optimizer, schedule=schedule)
        scores = [m.evaluate(x, y, verbose=0) for m in (split, plain)]
        np.testing.assert_allclose(*scores, rtol=2e-4)
        np.testing.assert_allclose(*(m.predict(x, verbose=0) for m in (split, plain)), rtol=2e-4, atol=2e-5)


@CHECKS
def one_stage_alone(ring):
    """Nothing but the layer is on another device."""
    split, _, _, _ = trained(wide, balance={"wide": ["CPU:1", "CPU:3"]})
    assert {v.value.device[-1] for v in split.get_layer("last").variables} == {"1"}


@CHECKS
def parity_of_optimizers(ring):
    """What looks at whole weights, and what is kept beside slots."""
    rules = keras.optimizers
    for optimizer in (
        lambda: SGD(0.1, momentum=0.9, clipnorm=0.05),
        lambda: SGD(0.1, global_clipnorm=0.1),
        lambda: Adam(0.01, clipvalue=0.001, amsgrad=True),
        lambda: Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
        lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
        lambda: rules.AdamW(0.01, use_ema=True),
        lambda: SGD(0.1, loss_scale_factor=64.0, weight_decay=0.1),
        lambda: rules.LossScaleOptimizer(Adam(0.01, clipnorm=0.05), dynamic_growth_steps=2),
        lambda: rules.RMSprop(0.01, momentum=0.5, centered=True),
        lambda: rules.Adagrad(0.1),
        lambda: rules.Lion(0.01),
        lambda: rules.Ftrl(0.1, l1_regularization_strength=0.01),
        lambda: rules.Nadam(0.01),
    ):
        trained(wide, optimizer)
    for optimizer in (
        lambda: SGD(0.1, momentum=0.9, clipnorm=0.05),
        lambda: Adam(0.01, gradient_accumulation_steps=2),
        lambda: rules.LossScaleOptimizer(Adam(0.01)),
    ):
        trained(table, optimizer)


@CHECKS
def weights_that_do_not_decay(ring):
    """By name and by variable, whether the layer is in parts or only moved to another device."""
    for names, layers in ((["wide/kernel", "before"], None), ([], ["wide", "last"])):
        models = []
        for distributed in (True, False):
            keras.utils.set_random_seed(3)
            split_models.random = np.random.default_rng(0)
            model, x, y, loss = wide()
            rule = keras.optimizers.AdamW(0.01, weight_decay=0.5)
            kept = [model.get_layer(name).kernel for name in layers or ()]
            if layers:
                rule.exclude_from_weight_decay(var_list=kept[:1])
            if distributed:
                balance = {**WIDE, "before": "CPU:3", "last": "CPU:1"}
                tfdist.ModelParallelStrategy(CPUS, balance=balance, microbatches=2).distribute(model)
            rule.exclude_from_weight_decay(var_list=kept, var_names=names)
            model.compile(rule, loss, jit_compile=False)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            models.append(model)
        assert_same(*models)
        plain = wide()[0].get_layer("wide").kernel.numpy()
        assert np.abs(models[0].get_layer("wide").kernel.numpy()).sum() > 0.8 * np.abs(plain).sum()


@CHECKS
def constraints_and_layers_frozen_for_a_while(ring):
    def build():
        _, x, y, loss = wide()
        limit = keras.constraints.MaxNorm(0.5)
        inner = keras.Sequential(
            [
                keras.Input((12,)),
                L.Dense(8, "relu", kernel_constraint=limit, bias_constraint="non_neg", name="wide"),
                L.Dense(3, "softmax", name="last"),
            ]
        )
        return inner, x, y, loss

    split, plain, x, y = trained(build, balance={"wide": ["CPU:0", "CPU:1"], "last": "CPU:2"})
    for frozen in (True, False):
        for model in (split, plain):
            model.get_layer("wide").trainable = not frozen
            model.compile(Adam(0.01), split_models.SPARSE(), jit_compile=False)
            before = model.get_layer("wide").get_weights()
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
            assert np.array_equal(before[0], model.get_layer("wide").get_weights()[0]) == frozen
        assert_same(split, plain)


@CHECKS
def mixed_precision(ring):
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        for build in (wide, table):
            # A masked loss under 1f1b is divided last; in float16 its gradients overflow sooner.
            options = {"balance": CASES[build], "microbatches": 2, "schedule": "gpipe"}
            split, plain, x, y = pair(build, CPUS, lambda: SGD(0.1), **options)
            logs = [m.fit(x, y, batch_size=20, shuffle=False, verbose=0).history for m in (split, plain)]
            np.testing.assert_allclose(logs[0]["loss"], logs[1]["loss"], rtol=2e-2)
            layer = split.get_layer("wide" if build is wide else "table")
            assert {v.value.dtype for v in layer.variables} == {tf.float32}
            assert_same(split, plain, rtol=0.05, atol=0.003)


def operations(graph):
    """Those of a graph and of the functions that it calls."""
    yield from graph.get_operations()
    for name in {n for op in graph.get_operations() for n in _functions(op)}:
        inner = graph._get_function(name)
        if inner is not None and getattr(inner, "graph", None) is not None:
            yield from operations(inner.graph)


def traced(model, specs):
    """The graph of a step as `fit` traces it."""
    step = tf.function(model.train_step, autograph=False)
    return model.distribute_strategy.run(lambda: step.get_concrete_function(specs).graph)


def _functions(op):
    return [a.func.name for a in op.node_def.attr.values() if a.HasField("func")]


@CHECKS
def everything_of_a_part_is_on_its_device(ring):
    """From the traced graph: whatever has the shape of a part, of a weight, gradient or slot; nothing has a whole's."""

    def build():
        words, first = keras.Input((5,), dtype="int32"), keras.Input((23,))
        a = L.GlobalAveragePooling1D()(L.Embedding(37, 23, name="table")(words))
        b = L.Dense(31, "relu", kernel_regularizer="l2", name="wide")(L.Add()([a, first]))
        x = [np.zeros((20, 5), "int32"), np.zeros((20, 23), "float32")]
        return keras.Model([words, first], L.Dense(3)(b)), x, np.zeros(20, "int32"), split_models.SPARSE(True)

    def rule():
        return Adam(0.01, weight_decay=0.1, global_clipnorm=1.0, use_ema=True, gradient_accumulation_steps=2)

    for optimizer in (rule, lambda: keras.optimizers.LossScaleOptimizer(Adam(0.01, clipnorm=1.0))):
        balance = {"table": ["CPU:1", "CPU:2"], "wide": ["CPU:2", "CPU:3"]}
        split, _, x, y = pair(build, CPUS, optimizer, balance=balance, microbatches=2)
        split.fit(x, y, batch_size=20, verbose=0)
        for variable in split.optimizer.variables:
            assert tuple(variable.shape) not in [(23, 15), (23, 16)], "the optimizer shows whole slots"
        specs = ([tf.TensorSpec((20, *a.shape[1:]), a.dtype) for a in x], tf.TensorSpec((20,), y.dtype))
        graph = traced(split, specs)
        where = {(23, 15): "2", (23, 16): "3", (15,): "2", (16,): "3", (18, 23): "1", (19, 23): "2"}
        wholes = [(23, 31), (31,), (37, 23)]
        found, kinds = collections.Counter(), collections.Counter()
        for op in operations(graph):
            for tensor in op.outputs:
                shape = tuple(tensor.shape) if tensor.shape.rank is not None else None
                held = op.type in ("ReadVariableOp", "Placeholder") and not op.device  # where the variable is
                unused = op.type == "Const" and not tensor.consumers()
                if not tensor.dtype.is_floating or held or unused:
                    continue
                assert shape not in wholes, (op.type, op.name, op.device)
                if shape in where:
                    assert op.device[-1:] == where[shape], (op.type, op.name, op.device, shape)
                    found[shape] += 1
            if op.type == "MatMul":
                kinds[op.device[-1:], tuple(op.outputs[0].shape)] += 1
        assert min(found[s] for s in where) > 5, found
        for columns, cpu in ((15, "2"), (16, "3")):  # two micro-batches: forward, to the kernel, to the input
            assert kinds[cpu, (10, columns)] == kinds[cpu, (23, columns)] == 2, kinds
            assert kinds[cpu, (10, 23)] == 2, kinds


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
    def distributed(layer, devices=("CPU:0", "CPU:1"), shape=(12,), dtype="float32", calls=1):
        layer.name = "it"
        first = keras.Input(shape, dtype=dtype)
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
    refused(lambda: distributed(L.Dense(4, lora_rank=2)), "it has LoRA")
    refused(lambda: distributed(L.Dense(4, kernel_regularizer="orthogonal_regularizer")), "OrthogonalRegularizer")
    refused(lambda: distributed(L.Dense(4, bias_regularizer=lambda w: keras.ops.max(w))), "the regularizer <lambda>")
    refused(lambda: distributed(L.Dense(4, kernel_constraint=keras.constraints.UnitNorm(1))), "constraint UnitNorm")
    refused(lambda: distributed(L.Dense(4, bias_constraint="max_norm")), "constraint MaxNorm")
    same = L.EinsumDense("ab,b->ab", 12)
    refused(lambda: distributed(same), "leaves no axis of its kernel")
    refused(lambda: distributed(L.Dense(4), ["CPU:0", "CPU:9"]), "device 'CPU:9' is unknown")
    refused(lambda: distributed(L.Dense(4), ["CPU:0", "/CPU:0"]), "expected each of its devices once")
    refused(lambda: distributed(L.Dense(4), []), "balance is ")
    refused(lambda: distributed(L.Dense(4), ["CPU:0"]), "puts all layers on")

    model = distributed(L.Dense(4))
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


test_split_inside = CHECKS.tests()
