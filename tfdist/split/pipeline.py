"""A step of training over stages and micro-batches, as a graph: walks the order that `planner.schedule` made.

Each stage does its steps one after the other (control dependencies say so, else TensorFlow would run what is ready and
keep everything alive); stages run side by side. A forward of stage s on micro-batch i leaves a gradient tape behind,
which its backward takes up on the same device::

    forward     x_i --> | stage 0 | --copy--> | stage 1, loss | --> loss_i
    backward            | stage 0 | <--copy-- | stage 1, loss | <-- w_i          summed on each device: the gradients

The gradient is that of one step on the whole batch. Under "gpipe" the loss is one call on all outputs, joined. Under
"1f1b" a micro-batch's backward comes before the last forward, so each has a loss of its own, which counts by its part
of the samples, or of what Keras divides the loss by (`Parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm import sparse
from tfdist.data.share import cut_rows, rows, with_ghost
from tfdist.data.shares import bounds
from tfdist.planner.schedule import Order, simulate
from tfdist.split.network import Network
from tfdist.split.stages import Stage, Tensors, copied, packed

# (x, y, y_pred, sample_weight, share) -> a scalar loss of the model's `compile`, without the losses of layers, and what
# it was divided by where that is not the number of samples, else None. `share` is None for the whole batch.
Loss = Callable[[Any, Any, Any, Any, Any], tuple[tf.Tensor, Any]]


@dataclass(frozen=True)
class Taped:
    """What a forward leaves for its backward."""

    tape: tf.GradientTape
    below: Tensors  # what it took from other stages
    targets: list[tuple[int | None, tf.Tensor]]  # symbol (None: a loss), and the tensor to differentiate


@dataclass
class Micro:
    """A micro-batch under way.

    Attributes:
      share: its part of the batch's samples, a float32 scalar.
      count: its samples; None where it has one at least. One of none computes on a row that counts for nothing, since
        not every kernel takes no rows.
      tensors: on its way forwards, by symbol.
      taped: what forwards have left for their backwards, by stage.
      gradients: on their way back, by symbol.
    """

    batch: tuple[Any, Any, Any]  # x, y, sample_weight
    share: tf.Tensor
    count: Any
    tensors: Tensors
    taped: dict[int, Taped] = field(default_factory=dict)
    gradients: dict[int, list[tf.Tensor]] = field(default_factory=dict)


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
      order: what each stage does when.
      loss: of the model; called on the last stage's device.
      joined: whether the loss is called once, on all micro-batches' outputs together.
      scale: what gradients are multiplied by, a scalar: the optimizer's loss scale.
      agreed: makes of what this batch's loss is divided by what that of the ranks' batches together is.

    Raises:
      ValueError: the losses of the micro-batches do not add up to that of the batch.
    """

    def __init__(
        self,
        network: Network,
        stages: Sequence[Stage],
        order: Order,
        loss: Loss,
        joined: bool,
        scale: tf.Tensor,
        agreed: Callable[[tf.Tensor], tf.Tensor] = tf.identity,
    ) -> None:
        self.network, self.stages, self.order = network, stages, order
        self.micros = sum(not step.backward for step in order[0])
        self._loss, self._joined, self._scale, self._agreed = loss, joined, scale, agreed
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
        micros = self._cut(batch)
        unit = [1.0] * len(self.stages)
        after: list[list[tf.Tensor]] = [[] for _ in self.stages]  # what each stage's next step has to wait for
        for timed in simulate(self.order, unit, unit).steps:
            stage, micro = self.stages[timed.stage], micros[timed.step.micro]
            with tf.device(stage.device), tf.control_dependencies(after[stage.index]):
                if timed.step.backward:
                    if self._joined and not self._losses:
                        self._join(batch, micros)
                    made = self._backward(stage, micro)
                else:
                    made = self._forward(stage, micro)
            after[stage.index] = made or after[stage.index]
        self._divide()
        self._regularize()
        with tf.device(self.stages[-1].device):
            loss = tf.add_n([*self._losses, *self._added])
            return Done(self._gradients, loss, self._outputs(micros), self._written())

    def _cut(self, batch: tuple[Any, Any, Any]) -> list[Micro]:
        flat = private.standard_inputs(self.network.functional, batch[0])
        first = next(t for t in flat if t is not None)
        total = first.shape[0] or rows(first)
        full = first.shape[0] is not None and total >= self.micros
        micros = []
        for i in range(self.micros):
            low, high = bounds(total, i, self.micros)
            share = tf.cast(high - low, tf.float32) / tf.cast(total, tf.float32)
            count = None if full else high - low
            if not full:
                low, high = with_ghost(low, high, total)
            tensors = dict(zip(self.network.inputs, cut_rows(flat, low, high), strict=True))
            micros.append(Micro(cut_rows(batch, low, high), share, count, tensors))
        return micros

    def _forward(self, stage: Stage, micro: Micro) -> list[tf.Tensor]:
        starts = [(v, (self._start if _averages(v) else self._now)[id(v)]) for v in stage.state]
        scope = keras.StatelessScope(state_mapping=starts, collect_losses=True)
        with tf.GradientTape() as tape:
            arrived = stage.brought(micro.tensors)
            # Not the model's inputs: nobody asks for their gradient.
            below = {t: v for t, v in arrived.items() if _differentiable(v) and t not in self.network.inputs}
            tape.watch(list(below.values()))
            with scope:
                leaving, added = stage.run(arrived, training=True)
            targets: list[tuple[int | None, tf.Tensor]] = [(t, v) for t, v in leaving.items() if _differentiable(v)]
            if stage is self.stages[-1] and not self._joined:
                targets = [(None, self._loss_of(micro, {**arrived, **leaving}))]
            if added:
                self._added.append(tf.add_n([tf.cast(a, tf.float32) for a in added]) * micro.share)
                targets.append((None, self._added[-1]))
        strange = scope.state_mapping.keys() - {id(v) for v in stage.state}
        if strange:
            layers = ", ".join(dict.fromkeys(o.name for o in stage.operations))
            raise ValueError(
                f"one of the layers {layers} writes, while it is trained, to {len(strange)} variables that are not "
                "among its non-trainable ones, as stateful RNNs, SpectralNormalization and metrics inside layers do. "
                "Micro-batches cannot keep that in order: leave the layer out, or train without this strategy."
            )
        micro.tensors.update(leaving)
        micro.taped[stage.index] = Taped(tape, below, targets)
        for variable, start in starts:
            value = tf.convert_to_tensor(scope.get_current_value(variable))
            if value is not start:
                self._now[id(variable)] = value
                self._wrote.setdefault(id(variable), []).append((variable, value, micro.share))
        return [v for _, v in targets] or [v for v in leaving.values() if isinstance(v, tf.Tensor)]

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
            outputs = [_joined(each, micros) for each in parts]
            loss, _ = self._loss(x, y, packed(self.network, outputs), weight, None)
        self._losses.append(tf.cast(loss, tf.float32))
        found = tape.gradient(loss, parts, output_gradients=tf.ones_like(loss) * tf.cast(self._scale, loss.dtype))
        for symbol, each in zip(self.network.outputs, found, strict=True):
            for micro, gradient in zip(micros, each, strict=True):
                if gradient is not None:
                    micro.gradients.setdefault(symbol, []).append(gradient)

    def _backward(self, stage: Stage, micro: Micro) -> list[tf.Tensor]:
        taped = micro.taped.pop(stage.index)
        targets, seeds = [], []
        for symbol, value in taped.targets:
            if symbol is None:
                targets.append(value)
                seeds.append(tf.cast(self._scale, value.dtype))
            elif symbol in micro.gradients:
                targets.append(value)
                seeds.append(tf.add_n([tf.identity(g) for g in micro.gradients.pop(symbol)]))
        if not targets:
            return []
        sources = [list(taped.below.values()), [v.value for v in stage.trainable]]
        found = taped.tape.gradient(targets, sources, output_gradients=seeds)
        for symbol, gradient in zip(taped.below, found[0], strict=True):
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
        whole = self._agreed(tf.add_n(self._divisors))
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
        return packed(self.network, [_joined([m.tensors[t] for m in micros], micros) for t in self.network.outputs])

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


def _averages(variable: Any) -> bool:
    """Whether a state is a moving average, and not a count or a seed."""
    return keras.backend.is_float_dtype(variable.dtype)


def _joined(parts: list[tf.Tensor], micros: list[Micro]) -> tf.Tensor:
    """Micro-batches' tensors as the batch's, masks with them."""

    def together(each: list[tf.Tensor]) -> tf.Tensor:
        return tf.concat([t if m.count is None else t[: m.count] for t, m in zip(each, micros, strict=True)], axis=0)

    whole = together(parts)
    masks = [private.mask_of(part) for part in parts]
    if masks[0] is not None:
        private.set_mask(whole, together(masks))
    return whole


def _differentiable(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and (value.dtype.is_floating or value.dtype.is_complex)


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, tf.IndexedSlices) and isinstance(other, tf.IndexedSlices):
        values, indices = (tf.concat([getattr(g, n) for g in (one, other)], 0) for n in ("values", "indices"))
        return tf.IndexedSlices(values, indices, one.dense_shape)
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)

