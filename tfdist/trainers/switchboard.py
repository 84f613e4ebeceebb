"""What a distributed model knows about its ring: group, traffic settings, and the small facts that travel along."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf

from tfdist import private
from tfdist.comm.buckets import Row
from tfdist.comm.clock import Clock
from tfdist.comm.collective import Collective
from tfdist.comm.link import choose_bucket_bytes, measure
from tfdist.comm.reducer import NOWHERE, GradientReducer, Place
from tfdist.trainers.accord import COUNT, Accord, RankAccord
from tfdist.trainers.step import Step

DIFFERENT_BATCHES = "tfdist: the ranks cut their shares from different global batches"


def unnumbered(path: str) -> str:
    """A variable's path without the numbers that Keras adds to automatic names.

    They count the objects a process has built, which may differ between ranks of one job.
    """
    return re.sub(r"_\d+(?=_|/|$)", "", path)


class Switchboard:
    """One per distributed model.

    Attributes:
        key: prefix of the names of all its collectives.
        wishes: what this rank wants of all, such as to stop training; travels with the next reduction.
        global_batch: samples per update of the running `fit`, None while unknown.
        rows: samples in the first batch of the arrays that the running call got, None for datasets.
    """

    def __init__(self, model: keras.Model, strategy: Any, key: str) -> None:
        self.model_name = unnumbered(model.name)
        self.strategy = strategy
        self.key = key
        self.comm: Collective = strategy.extended.comm
        self.reduce_op: str = strategy.extended.reduce_op
        self.reducers: list[GradientReducer] = []
        self.bucket_bytes = 0
        self.global_batch: int | None = None
        self.rows: int | None = None
        self.synchronized_norm = False
        self.moving_statistics: list[Any] = []
        self.training = False
        self.told: set[str] = set()
        self.synchronized = False
        self.clocked = False
        self.probed = False
        self.unprobed = False
        self.accord = RankAccord(self.comm, key) if self.comm.size > 1 else Accord()

    # -- traffic -------------------------------------------------------------------------------------------

    def choose_buckets(self, variables: list[Any]) -> None:
        """Settles the bucket size before the step is traced; measures the link the first time."""
        setting = self.strategy.extended.bucket_mb
        if setting != "auto":
            self.bucket_bytes = int(setting * 2**20)
            return
        stages = [stage for stage, _ in self.places(variables)]
        rows = [
            Row(v.path, tuple(v.shape), str(v.dtype), _nbytes(v), stage)
            for v, stage in zip(variables, stages, strict=True)
        ]
        link = self.strategy.extended.link
        if link is None:
            link = self.strategy.extended.link = measure(self.comm)
        self.bucket_bytes, why = choose_bucket_bytes(rows, link)
        self.tell(why)

    def places(self, variables: list[Any]) -> list[Place]:
        """Where the gradients of variables are made: a model that is whole has one place."""
        return [NOWHERE] * len(variables)

    def make_reducer(self) -> GradientReducer:
        if not self.bucket_bytes:
            self.bucket_bytes = DEFAULT_BUCKET
        extended = self.strategy.extended
        reducer = GradientReducer(self.comm, self.bucket_bytes, extended.compression, self.reduce_op)
        reducer.clock = Clock() if self.clocked else None
        self.reducers.append(reducer)
        return reducer

    def clock_steps(self, model: keras.Model) -> None:
        """From the next trace on, steps note when their buckets were ready and reduced."""
        if not self.clocked:
            self.clocked = True
            for reducer in self.reducers:
                reducer.clock = Clock()
            model.train_function = None

    def batch(self) -> int | None:
        """Samples per update of the running `fit`, None where that cannot be told before it ends."""
        return self.global_batch or self.strategy.extended.dataset_batch

    def tell(self, line: str) -> None:
        """Prints a line once, on rank 0."""
        if line not in self.told and self.comm.rank == 0 and not self.strategy.extended.silent:
            print(f"tfdist: {line}", flush=True)
        self.told.add(line)

    def leave_to_root(self, what: str, path: Any) -> None:
        """Says once for each path that a file is rank 0's to write."""
        line = f"rank {self.comm.rank}: {what}({str(path)!r}) is left to rank 0, which writes each file once"
        if line not in self.told:
            print(f"tfdist: {line}", flush=True)
        self.told.add(line)

    # -- facts ---------------------------------------------------------------------------------------------

    def facts(self, step: Step) -> tf.Tensor:
        """What rides with the first reduction of a step, float32 vector summed over ranks."""
        wishes = self.accord.mine.value()
        if step.label is None:
            return wishes
        return tf.concat([wishes, [step.label, step.label * step.label]], 0)

    def learn(self, total: tf.Tensor, step: Step) -> None:
        """Takes in the summed facts."""
        self.accord.learn(total[:COUNT])
        if step.label is None:
            return
        size = float(self.comm.size)
        spread = size * total[COUNT + 1] - total[COUNT] * total[COUNT]  # n sum x^2 - (sum x)^2: zero when all are equal
        tf.debugging.Assert(spread < 1e-6 * size * size, [DIFFERENT_BATCHES])

    def check_late_weight(self, step: Step) -> None:
        """A custom step that never calls `optimizer.scale_loss` weights its gradients instead of its loss.

        That is exact, unless synchronized BatchNormalization mixes the ranks' samples inside the model and the
        ranks have different numbers of them.
        """
        if not self.synchronized_norm or step.reduce_op != "mean":
            return
        even = tf.equal(step.count * self.comm.size, step.total)
        message = (
            f"tfdist: the model {self.model_name!r} has a custom train_step that computes gradients of an unscaled "
            "loss, and BatchNormalization(synchronized=True): with ranks that have different numbers of samples this "
            "is not exact. Put `loss = self.optimizer.scale_loss(loss)` before the gradients are computed (inside the "
            "tape), or use batches that the number of ranks divides."
        )
        tf.debugging.Assert(even, [message])

    # -- the model -----------------------------------------------------------------------------------------

    def study(self, model: keras.Model) -> None:
        """Notes which BatchNormalization layers keep statistics of their own rank."""
        norms = [layer for layer in private.layers_of(model) if isinstance(layer, keras.layers.BatchNormalization)]
        self.synchronized_norm = any(layer.synchronized for layer in norms)
        self.moving_statistics = [
            v for layer in norms if not layer.synchronized for v in layer.non_trainable_variables if _floating(v)
        ]


DEFAULT_BUCKET = 8 * 2**20


def _nbytes(variable: Any) -> int:
    size = 1
    for n in variable.shape:
        size *= int(n)
    return size * tf.as_dtype(variable.dtype).size


def _floating(variable: Any) -> bool:
    return tf.as_dtype(variable.dtype).is_floating


def of(model: Any) -> Switchboard:
    """The switchboard of a distributed model."""
    return model.__dict__["_tfdist"]
