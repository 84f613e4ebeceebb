"""Sums the gradients of a step over ranks: packed into buckets, each sent as soon as its gradients are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfdist.comm import fusion, sparse
from tfdist.comm.agreement import agree
from tfdist.comm.buckets import Bucket, Row, plan
from tfdist.comm.clock import Clock
from tfdist.comm.collective import Collective, check_op
from tfdist.comm.compression import Compression, resolve

Gradient = tf.Tensor | tf.IndexedSlices | None
Place = tuple[int, str]  # the stage of a split model that makes a gradient, and its device
NOWHERE: Place = (0, "")  # TensorFlow chooses the device


@dataclass(frozen=True)
class Traffic:
    """What one call of `reduce` sends, as planned when it was traced.

    Attributes:
      buckets: their rows count in `dense`.
      dense: names of the gradients that travel in buckets.
      dense_bytes: of those gradients, before compression.
      wire_bytes: of the buckets as a rank hands them to the ring, with facts and gaps (see `fusion`).
      sparse: names of the gradients of which only rows travel, see `GradientReducer.sparse_bytes`.
      absent: names of the variables without a gradient.
    """

    buckets: tuple[Bucket, ...]
    dense: tuple[str, ...]
    dense_bytes: int
    wire_bytes: int
    sparse: tuple[str, ...]
    absent: tuple[str, ...]


class GradientReducer:
    """Sums lists of gradients over the ranks of `collective`.

    Args:
      bucket_bytes: the most bytes that travel as one tensor.
      compression: None, "fp16" or an object, see `tfdist.comm.compression`.
      reduce_op: "sum"; "mean" sums as well (the ranks' losses are weighted before); or "adasum".

    Attributes:
      traffic: `Traffic` by the `key` given to `reduce`.
    """

    def __init__(
        self,
        collective: Collective,
        bucket_bytes: int,
        compression: str | Compression | None = None,
        reduce_op: str = "sum",
    ) -> None:
        check_op(reduce_op, ("sum", "mean", "adasum"))
        self.collective, self.bucket_bytes = collective, int(bucket_bytes)
        self.compression = resolve(compression)
        self.op = "adasum" if reduce_op == "adasum" else "sum"
        self.traffic: dict[str, Traffic] = {}
        self.clock: Clock | None = None  # set to note when buckets are ready and done
        self._agreed: set[tuple[object, ...]] = set()
        self._sparse_bytes: tf.Variable | None = None

    def reduce(
        self,
        grads: Sequence[Gradient],
        names: Sequence[str],
        key: str,
        facts: tf.Tensor | None = None,
        places: Sequence[Place] | None = None,
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Reduces gradients, and sums the float32 vector `facts`, over ranks. Eager or in a `tf.function`.

        Args:
          grads: in the order of the variables; dense ones have static shapes; None stays None.
          names: of the variables, for messages.
          key: makes the tensors' names unique: one for each optimizer, the same on every rank.
          facts: shape [k]; rides in the first float32 bucket, never compressed.
          places: of a split model's gradients. Buckets hold those of one stage, and are packed, compressed and taken
            apart on its device; the collective itself takes and gives memory of the host.

        Returns:
          the reduced gradients (sparse ones with each row once) and the summed facts.

        Raises:
          ValueError: a gradient has no static shape, or the ranks' gradients differ (on every rank, at first use).
        """
        if self.collective.size == 1:
            return list(grads), facts
        places = [NOWHERE] * len(grads) if places is None else places
        devices = dict(places)
        rows = [_row(g, n, stage) for g, n, (stage, _) in zip(grads, names, places, strict=True)]
        self._agree(grads, rows, key)
        dense = [i for i, g in enumerate(grads) if isinstance(g, tf.Tensor)]
        buckets = plan([rows[i] for i in dense], self.bucket_bytes)
        rides = facts is not None and self.op == "sum" and self.compression is None
        result: list[Gradient] = list(grads)
        total = None
        wire_bytes = 0
        before: dict[int, list[tf.Tensor]] = {}  # by stage
        for bucket in buckets:
            members = [dense[r] for r in bucket.rows]
            carries = rides and total is None and bucket.dtype == "float32"
            with tf.device(devices[bucket.stage]):
                with tf.control_dependencies(before.get(bucket.stage, [])):  # later buckets of a stage never overtake
                    tensors = [tf.cast(grads[i], bucket.dtype) for i in members]
                    flat = fusion.pack([*tensors, facts] if carries else tensors)
                before[bucket.stage] = [flat]
                if self.clock is not None:
                    flat = self.clock.start(flat)
                flat, sent = self._send(flat, f"{key}.bucket{bucket.index}")
                wire_bytes += sent
                if self.clock is not None:
                    flat = self.clock.stop(flat)
                shapes = [rows[i].shape for i in members]
                if carries:
                    *parts, total = fusion.unpack(flat, [*shapes, facts.shape])
                else:
                    parts = fusion.unpack(flat, shapes)
                for i, part in zip(members, parts, strict=True):
                    result[i] = tf.cast(part, grads[i].dtype)
        rows_bytes = []
        for i, grad in enumerate(grads):
            if isinstance(grad, tf.IndexedSlices):
                with tf.device(places[i][1]):
                    result[i], sent_rows = sparse.all_reduce(self.collective, grad, f"{key}.sparse{i}")
                rows_bytes.append(sent_rows)
        if rows_bytes:
            self._count(tf.add_n(rows_bytes))
        if facts is not None and total is None:
            total = self.collective.all_reduce(facts, f"{key}.facts")
        if self.clock is not None and buckets:
            self.clock.finish()
        self.traffic[key] = Traffic(
            buckets,
            tuple(names[i] for i in dense),
            sum(b.nbytes for b in buckets),
            wire_bytes,
            tuple(n for g, n in zip(grads, names, strict=True) if isinstance(g, tf.IndexedSlices)),
            tuple(n for g, n in zip(grads, names, strict=True) if g is None),
        )
        return result, total

    @property
    def sparse_bytes(self) -> int:
        """Bytes of rows (indices and values) that this rank sent in the latest call of `reduce`."""
        return 0 if self._sparse_bytes is None else int(self._sparse_bytes.numpy())

    def _count(self, nbytes: tf.Tensor) -> None:
        if self._sparse_bytes is None:
            with tf.init_scope():
                self._sparse_bytes = tf.Variable(0, trainable=False, dtype=tf.int64, name="tfdist_sparse_bytes")
        self._sparse_bytes.assign(nbytes)

    def _send(self, flat: tf.Tensor, name: str) -> tuple[tf.Tensor, int]:
        """The reduced vector, and the bytes of it on the wire."""
        if self.compression is None or flat.dtype != tf.float32:
            return self.collective.all_reduce(flat, name, self.op), fusion.nbytes(flat)
        wire, context = self.compression.compress(
            flat, self.collective.size, lambda x: self.collective.all_reduce(x, f"{name}.max", "max")
        )
        reduced = self.collective.all_reduce(wire, name, self.op)
        return self.compression.decompress(reduced, context), fusion.nbytes(wire)

    def _agree(self, grads: Sequence[Gradient], rows: Sequence[Row], key: str) -> None:
        table = tuple((_named(r), r.shape, _kind(g, r)) for g, r in zip(grads, rows, strict=True))
        if (key, table) not in self._agreed:
            agree(self.collective, table, f"gradients of {key!r}")
            self._agreed.add((key, table))


def _row(grad: Gradient, name: str, stage: int = 0) -> Row:
    if grad is None:
        return Row(name, (), "none", 0, stage)
    if isinstance(grad, tf.IndexedSlices):
        return Row(name, tuple(grad.values.shape[1:]), grad.values.dtype.name, 0, stage)
    if not grad.shape.is_fully_defined():
        raise ValueError(
            f"the gradient of {name!r} has the shape {grad.shape}, which is not known before the step runs; "
            "buckets need static shapes: use tf.ensure_shape in the layer that makes it"
        )
    # Horovod reduces no bfloat16: it travels as float32.
    dtype = tf.float32 if grad.dtype == tf.bfloat16 else grad.dtype
    return Row(name, tuple(grad.shape), dtype.name, grad.shape.num_elements() * dtype.size, stage)


def _named(row: Row) -> str:
    return f"{row.name} of stage {row.stage}" if row.stage else row.name


def _kind(grad: Gradient, row: Row) -> str:
    return f"sparse {row.dtype}" if isinstance(grad, tf.IndexedSlices) else row.dtype
