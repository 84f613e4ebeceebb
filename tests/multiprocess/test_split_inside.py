"""Layers in parts on several devices train as whole ones do, and all of a part is on its device."""

from __future__ import annotations

import collections

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.helpers.checks import Checks
from tests.multiprocess import split_models
from tests.multiprocess.split_inside import CASES, WIDE, operations, table, traced, trained, wide
from tests.multiprocess.split_parts import CPUS, assert_same, make_devices, pair

CHECKS = Checks(__name__, ranks=1, prepare=make_devices)
L = keras.layers
SGD = keras.optimizers.SGD
Adam = keras.optimizers.Adam


@CHECKS
def parity(ring):
    """Weights, slots, logs, evaluate and predict, with a last batch shorter than the others."""
    for build in CASES:
        for schedule, optimizer in (("gpipe", lambda: SGD(0.1, momentum=0.9)), ("1f1b", lambda: Adam(0.01))):
            split, plain, x, y = trained(build, optimizer, schedule=schedule)
        scores = [m.evaluate(x, y, verbose=0) for m in (split, plain)]
        np.testing.assert_allclose(*scores, rtol=2e-4)
        np.testing.assert_allclose(*(m.predict(x, verbose=0) for m in (split, plain)), rtol=2e-4, atol=2e-5)


@CHECKS
def one_stage_alone(ring):
    """Nothing but the layer is on another device."""
    split, _, _, _ = trained(wide, balance={"wide": [1, "CPU:3"]})
    assert {v.value.device[-1] for v in split.get_layer("last").variables} == {"1"}


@CHECKS
def activations_computed_again(ring):
    for build in (wide, table):
        trained(build, recompute=True)


@CHECKS
def parity_of_optimizers(ring):
    """What looks at whole weights, and what is kept beside slots."""
    rules = keras.optimizers
    for optimizer in (
        lambda: SGD(0.1, momentum=0.9, clipnorm=0.05),
        lambda: Adam(0.01, clipvalue=0.001, amsgrad=True),
        lambda: Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
        lambda: SGD(0.1, use_ema=True, ema_overwrite_frequency=2),
        lambda: rules.AdamW(0.01, use_ema=True),
        lambda: SGD(0.1, loss_scale_factor=64.0, weight_decay=0.1),
        lambda: rules.LossScaleOptimizer(Adam(0.01, clipnorm=0.05), dynamic_growth_steps=2),
        lambda: rules.Ftrl(0.1, l1_regularization_strength=0.01),
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
        where = {(23, 15): "2", (23, 16): "3", (15,): "2", (16,): "3", (18, 23): "1", (19, 23): "2"}
        where[31, 3] = "2"  # the layer after, whole, which is not on the strategy's first device either
        wholes = [(23, 31), (31,), (37, 23)]
        found, kinds = collections.Counter(), collections.Counter()
        for op in operations(traced(split, split.test_step, specs)):
            assert not [t.shape for t in op.outputs if tuple(t.shape or ()) in wholes], (op.type, op.name)
        for op in operations(traced(split, split.train_step, specs)):
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


test_split_inside = CHECKS.tests()
