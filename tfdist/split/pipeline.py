"""A step of training over stages and micro-batches, as a graph: walks the order that `planner.schedule` made.

Each device does its steps one after the other (control dependencies say so, else TensorFlow would run what is ready and
keep everything alive); devices run side by side. A forward of stage s on micro-batch i leaves a gradient tape behind,
which its backward takes up on the same device::

    forward     x_i --> | stage 0 | --copy--> | stage 1, loss | --> loss_i
    backward            | stage 0 | <--copy-- | stage 1, loss | <-- w_i          summed on each device: the gradients

The gradient is that of one step on the whole batch. Under "gpipe" the loss is one call on all outputs, joined. Under
"1f1b" a micro-batch's backward comes before the last forward, so each has a loss of its own, which counts by its part
of the samples, or of what Keras divides the loss by (`Parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.comm import sparse
from tfdist.planner.layout import Layout
from tfdist.planner.schedule import Order, live
from tfdist.planner.timeline import simulate
from tfdist.split.micro import Micro, Recorded, Taken, cut, joined
from tfdist.split.network import Network
from tfdist.split.ordering import operations, weights_last
from tfdist.split.stages import Stage, Tensors, copied, packed

# (x, y, y_pred, sample_weight, share) -> a scalar loss of the model's `compile`, without the losses of layers, and what
# it was divided by where that is not the number of samples, else None. `share` is None for the whole batch.
Loss = Callable[[Any, Any, Any, Any, Any], tuple[tf.Tensor, Any]]


@dataclass(frozen=True)
class Done:
    """A step of training but for the optimizer.

    Attributes:
      gradients: by variable's id; of the batch's loss.
      loss: the batch's.
      outputs: the model's, of the whole batch, in their structure.
      state: (variable, value after the step) of what layers have written.
    """

    gradients: dict[int, Any]
    loss: tf.Tensor
    outputs: Any
    state: list[tuple[Any, tf.Tensor]]


class Pipeline:
    """Builds the graph of one step; for one trace.

    Args:
      network: the model.
      stages: all of its operations, in order.
      layout: how the stages hang together.
      order: what each device does when.
      loss: of the model; called on the last stage's device.
      joined: whether the loss is called once, on all micro-batches' outputs together.
      scale: what gradients are multiplied by, a scalar: the optimizer's loss scale.
      recompute: whether stages that would keep the activations of several micro-batches keep only what they took, and
        compute a forward again before its backward (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016).

    Raises:
      ValueError: the losses of the micro-batches do not add up to that of the batch.
    """

    def __init__(
        self,
        network: Network,
        stages: Sequence[Stage],
        layout: Layout,
        order: Order,
        loss: Loss,
        joined: bool,
        scale: tf.Tensor,
        recompute: bool = False,
    ) -> None:
        self.network, self.stages, self.layout, self.order = network, stages, layout, order
        self.micros = 1 + max(step.micro for lane in order for step in lane)
        self._again = [recompute and kept > 1 for kept in live(order)]
        self._loss, self._joined, self._scale = loss, joined, scale
        self._trainable = list({id(v): v for stage in stages for v in stage.trainable}.values())  # shared ones once
        self._gradients: dict[int, Any] = {}
        self._losses: list[tf.Tensor] = []
        self._added: list[tf.Tensor] = []  # losses of layers
        self._divisors: list[tf.Tensor] = []
        # State before the step. What counts (seeds of random layers) goes on from micro-batch to micro-batch; averages
        # start each as they were, and what each makes of them is averaged.
        self._start = {}
        for variable in (v for stage in stages for v in stage.state):
            with tf.device(variable.value.device):
                self._start[id(variable)] = tf.convert_to_tensor(variable.value)
        self._now = dict(self._start)
        self._wrote: dict[int, list[tuple[Any, tf.Tensor, tf.Tensor]]] = {}  # variable, its value, the share

    def run(self, batch: tuple[Any, Any, Any]) -> Done:
        """The step on a batch (x, y, sample_weight) of any length."""
        micros = cut(self.network, batch, self.micros)
        unit = [1.0] * len(self.stages)
        after: list[list[tf.Tensor]] = [[] for _ in self.order]  # what each device's next step has to wait for
        for timed in simulate(self.layout, self.order, unit, unit).steps:
            stage, micro = self.stages[timed.step.stage], micros[timed.step.micro]
            with tf.device(stage.device), tf.control_dependencies(after[stage.lane]):
                if timed.step.backward:
                    if self._joined and not self._losses:
                        self._join(batch, micros)
                    made = self._backward(stage, micro)
                else:
                    made = self._forward(stage, micro)
            after[stage.lane] = made or after[stage.lane]
        self._divide()
        self._regularize()
        with tf.device(self.stages[-1].device):
            loss = tf.add_n([*self._losses, *self._added])
            return Done(self._gradients, loss, self._outputs(micros), self._written())

    def _forward(self, stage: Stage, micro: Micro) -> list[tf.Tensor]:
        starts = [(v, (self._start if _averages(v) else self._now)[id(v)]) for v in stage.state]
        scope = _scope(starts)
        if self._again[stage.index]:
            arrived = stage.brought(micro.tensors)
            with scope:
                leaving, added = stage.run(arrived, training=True)
            losses, made = _weighted(added, micro), list(leaving.values())
            micro.taken[stage.index] = Taken(arrived, starts)
        else:
            recorded, leaving, losses = self._record(stage, micro, micro.tensors, scope)
            made = [v for _, v in recorded.targets] or list(leaving.values())
            micro.recorded[stage.index] = recorded
        self._added += losses
        strange = scope.state_mapping.keys() - {id(v) for v in stage.state}
        if strange:
            layers = ", ".join(dict.fromkeys(o.name for o in stage.operations))
            raise ValueError(
                f"one of the layers {layers} writes, while it is trained, to {len(strange)} variables that are not "
                "among its non-trainable ones, as stateful RNNs, SpectralNormalization and metrics inside layers do. "
                "Micro-batches cannot keep that in order: leave the layer out, or train without this strategy."
            )
        micro.tensors.update(leaving)
        for variable, start in starts:
            value = tf.convert_to_tensor(scope.get_current_value(variable))
            if value is not start:
                self._now[id(variable)] = value
                self._wrote.setdefault(id(variable), []).append((variable, value, micro.share))
        return [v for v in made if isinstance(v, tf.Tensor)]

    def _record(
        self, stage: Stage, micro: Micro, tensors: Tensors, scope: Any
    ) -> tuple[Recorded, Tensors, list[tf.Tensor]]:
        """A forward that can be differentiated, what leaves, and the losses that layers added."""
        with tf.GradientTape() as tape:
            arrived = stage.brought(tensors)
            # Not the model's inputs: nobody asks for their gradient.
            below = {t: v for t, v in arrived.items() if _differentiable(v) and t not in self.network.inputs}
            tape.watch(list(below.values()))
            with scope:
                leaving, added = stage.run(arrived, training=True)
            targets: list[tuple[int | None, tf.Tensor]] = [(t, v) for t, v in leaving.items() if _differentiable(v)]
            if stage is self.stages[-1] and not self._joined:
                targets = [(None, self._loss_of(micro, {**arrived, **leaving}))]
            losses = _weighted(added, micro)
            targets += [(None, loss) for loss in losses]
        return Recorded(tape, below, targets), leaving, losses

    def _loss_of(self, micro: Micro, tensors: Tensors) -> tf.Tensor:
        """The part of the loss that a micro-batch has; before `_divide` where it is divided by something else."""
        x, y, weight = micro.batch
        outputs = packed(self.network, [tensors[t] for t in self.network.outputs])
        loss, divisor = self._loss(x, y, outputs, weight, micro.share)
        if divisor is not None:
            divisor *= tf.cast(micro.share > 0, divisor.dtype)
            self._divisors.append(divisor)
        self._losses.append(tf.cast(loss, tf.float32) * (micro.share if divisor is None else divisor))
        return self._losses[-1]

    def _join(self, batch: tuple[Any, Any, Any], micros: list[Micro]) -> None:
        """The loss of all micro-batches together, and its gradient for each of them."""
        x, y, weight = batch
        with tf.GradientTape() as tape:
            parts = [[copied(m.tensors[t]) for m in micros] for t in self.network.outputs]
            tape.watch([p for each in parts for p in each])
            outputs = [joined(each, micros) for each in parts]
            loss, _ = self._loss(x, y, packed(self.network, outputs), weight, None)
        self._losses.append(tf.cast(loss, tf.float32))
        found = tape.gradient(loss, parts, output_gradients=tf.ones_like(loss) * tf.cast(self._scale, loss.dtype))
        for symbol, each in zip(self.network.outputs, found, strict=True):
            for micro, gradient in zip(micros, each, strict=True):
                if gradient is not None:
                    micro.gradients.setdefault(symbol, []).append(gradient)

    def _backward(self, stage: Stage, micro: Micro) -> list[tf.Tensor]:
        if stage.index in micro.taken:
            taken = micro.taken.pop(stage.index)
            recorded, _, _ = self._record(stage, micro, taken.arrived, _scope(taken.starts))
        else:
            recorded = micro.recorded.pop(stage.index)
        targets, seeds = [], []
        for symbol, value in recorded.targets:
            if symbol is None:
                targets.append(value)
                seeds.append(tf.cast(self._scale, value.dtype))
            elif symbol in micro.gradients:
                targets.append(value)
                seeds.append(tf.add_n([tf.identity(g) for g in micro.gradients.pop(symbol)]))
        if not targets:
            return []
        sources = [list(recorded.below.values()), [v.value for v in stage.trainable]]
        mark = operations()
        found = recorded.tape.gradient(targets, sources, output_gradients=seeds)
        weights_last(mark, [g for g in found[0] if g is not None])
        for symbol, gradient in zip(recorded.below, found[0], strict=True):
            if gradient is not None:
                micro.gradients.setdefault(symbol, []).append(tf.convert_to_tensor(gradient))
        for variable, gradient in zip(stage.trainable, found[1], strict=True):
            self._add(variable, gradient)
        mine = [self._gradients[id(v)] for v in stage.trainable if id(v) in self._gradients]
        return [g.values if isinstance(g, tf.IndexedSlices) else g for g in (*mine, *found[0]) if g is not None]

    def _divide(self) -> None:
        """Where each micro-batch's loss was divided by something else than its samples: by the sum of that."""
        if not self._divisors:
            return
        if self._added or len(self._divisors) < self.micros:
            raise ValueError(
                "a loss of this model is divided by its valid or weighted positions, and its layers add losses of "
                "their own, which are not: micro-batches cannot be added up before all are there. Use "
                "schedule='gpipe', which takes one loss of the whole batch."
            )
        whole = tf.add_n(self._divisors)
        self._losses = [tf.math.divide_no_nan(loss, whole) for loss in self._losses]
        part = tf.math.reciprocal_no_nan(whole)
        for variable in self._trainable:
            if id(variable) in self._gradients:
                with tf.device(variable.value.device):
                    self._gradients[id(variable)] = sparse.on_values(
                        self._gradients[id(variable)], lambda values: values * tf.cast(part, values.dtype)
                    )

    def _regularize(self) -> None:
        """The losses of weights themselves: once a step, each where its variable is."""
        for variable in self._trainable:
            if variable.regularizer is None:
                continue
            with tf.device(variable.value.device):
                with tf.GradientTape() as tape:
                    loss = variable.regularizer(variable)
                self._added.append(tf.cast(loss, tf.float32))
                self._add(variable, tape.gradient(loss, variable.value, tf.cast(self._scale, loss.dtype)))

    def _add(self, variable: Any, gradient: Any) -> None:
        """Adds to a variable's gradient, where the variable is."""
        if gradient is None:
            return
        known = self._gradients.get(id(variable))
        with tf.device(variable.value.device):
            self._gradients[id(variable)] = gradient if known is None else _sum(known, gradient)

    def _outputs(self, micros: list[Micro]) -> Any:
        return packed(self.network, [joined([m.tensors[t] for m in micros], micros) for t in self.network.outputs])

    def _written(self) -> list[tuple[Any, tf.Tensor]]:
        """State after the step, by variable."""
        written = []
        for entries in self._wrote.values():
            variable = entries[0][0]
            with tf.device(variable.value.device):
                if not _averages(variable):
                    written.append((variable, entries[-1][1]))
                    continue
                start = self._start[id(variable)]
                moves = [(value - start) * tf.cast(share, value.dtype) for _, value, share in entries]
                written.append((variable, start + tf.add_n(moves)))
        return written


def _scope(starts: list[tuple[Any, Any]]) -> Any:
    """Where layers read their state from `starts`, and leave what they write."""
    return keras.StatelessScope(state_mapping=starts, collect_losses=True)


def _weighted(added: list[Any], micro: Micro) -> list[tf.Tensor]:
    """The losses that layers added on a micro-batch, as one that counts by its part."""
    return [tf.add_n([tf.cast(a, tf.float32) for a in added]) * micro.share] if added else []


def _averages(variable: Any) -> bool:
    """Whether a state is a moving average, and not a count or a seed."""
    return keras.backend.is_float_dtype(variable.dtype)


def _differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values, indices = (tf.concat([getattr(g, n) for g in (one, other)], 0) for n in ("values", "indices"))
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)

