"""The collective operations for users: `tfdist.all_reduce` and its siblings.

They take tensors, numpy arrays, Python numbers and nested structures of them, eagerly and inside a `tf.function`.
What comes back is of the kind that went in: numpy for numpy and Python numbers, tensors for tensors.

Every rank has to make the same calls in the same order. Outside a `tf.function` the ranks first compare what they
were called with (one small gather more), so that a difference is an error that shows what each rank gave. A rank
that never comes is named after a deadline, see `set_deadline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.comm import collective, fusion, watch
from tfdist.comm.agreement import Described, agree
from tfdist.comm.watch import set_deadline

__all__ = [
    "all_gather", "all_reduce", "barrier", "broadcast", "gather", "is_chief", "local_rank", "rank",
    "reduce", "reduce_scatter", "set_deadline", "size",
]  # fmt: skip

REDUCTIONS = ("sum", "mean", "min", "max", "product", "any", "all")
_plain = tf.autograph.experimental.do_not_convert  # nothing in here depends on tensors' values


def rank() -> int:
    """This process's number among the ranks, from 0."""
    return collective.get().rank


def size() -> int:
    """The number of ranks."""
    return collective.get().size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0."""
    return collective.get().local_rank


def is_chief() -> bool:
    """True on rank 0, which prints and writes files."""
    return rank() == 0


@_plain
def all_reduce(value: Any, op: str = "sum", name: str | None = None) -> Any:
    """Reduces every tensor of `value`, element by element, over ranks; all ranks get the result.

    Args:
      value: a tensor, array or number, or a nested structure; the same shapes and types on every rank.
      op: "sum", "mean", "min", "max", "product", or for booleans "any", "all". The mean of integers is float64.
      name: for messages.

    Raises:
      ValueError: unknown `op`, a type that cannot be reduced, or ranks that gave different things (on every rank).
      RuntimeError: a rank did not come, or ended.
    """
    return _Call("all_reduce", op, name).run(value, _reduced)


@_plain
def reduce(value: Any, op: str = "sum", root: int = 0, name: str | None = None) -> Any:
    """`all_reduce` whose result only rank `root` gets; the others get None."""
    call = _Call("reduce", op, name, root)
    result = call.run(value, _reduced)
    return result if call.group.rank == root else None


@_plain
def all_gather(value: Any, name: str | None = None) -> Any:
    """Joins the ranks' tensors along axis 0, in rank order; scalars become a vector of one entry a rank.

    The first dimensions may differ between ranks, the others may not. Raises as `all_reduce` does.
    """
    return _Call("all_gather", None, name).run(value, _gathered)


@_plain
def gather(value: Any, root: int = 0, name: str | None = None) -> Any:
    """`all_gather` whose result only rank `root` gets; the others get None."""
    call = _Call("gather", None, name, root)
    result = call.run(value, _gathered)
    return result if call.group.rank == root else None


@_plain
def broadcast(value: Any, root: int = 0, name: str | None = None) -> Any:
    """Every rank gets the value of rank `root`; shapes and types are the same on every rank.

    Raises as `all_reduce` does.
    """
    return _Call("broadcast", None, name, root).run(value, _sent)


@_plain
def reduce_scatter(value: Any, op: str = "sum", name: str | None = None) -> Any:
    """Reduces over ranks and gives each rank its part of the rows (axis 0), the longer parts first.

    Shapes and types are the same on every rank. Raises as `all_reduce` does.
    """
    return _Call("reduce_scatter", op, name).run(value, _scattered)


@_plain
def barrier(name: str | None = None) -> None:
    """Returns when every rank has come here.

    Raises:
      RuntimeError: a rank did not come within the deadline, or ended.
    """
    _Call("barrier", None, name).run(np.zeros(1, np.uint8), _sent)


class _Call:
    """One call of a public operation: its name, checks, and the way from values to tensors and back."""

    def __init__(self, kind: str, op: str | None, name: str | None, root: int = 0) -> None:
        self.group = collective.get()
        if op is not None and op not in REDUCTIONS:
            known = ", ".join(map(repr, REDUCTIONS))
            raise ValueError(f"{kind}: unknown op {op!r}; known are {known}")
        if not 0 <= root < self.group.size:
            raise ValueError(f"{kind}: root is {root}; ranks are 0 to {self.group.size - 1}")
        self.kind, self.op, self.root = kind, op, root
        self.eager = tf.executing_eagerly()
        self.what = f"{kind}" + (f" {name!r}" if name else "")
        if self.eager:
            self.name = f"{kind}.{name}" if name else kind
        else:
            # Counted inside the graph being traced, so that a rank that traces once more stays in step.
            self.name = _graph_name(kind, name)

    def run(self, value: Any, work: Callable[[_Call, list[tf.Tensor]], list[tf.Tensor]]) -> Any:
        leaves = tf.nest.flatten(value)
        tensors = [_tensor(leaf, self.kind) for leaf in leaves]
        if self.group.size > 1:
            if self.eager:
                with watch.waiting(self.what):
                    self._compare(tensors)
                    results = work(self, tensors)
            else:
                results = _watched(self.what, lambda inputs: work(self, inputs), tensors)
        else:
            results = work(self, tensors)
        return tf.nest.pack_sequence_as(
            value, [_like(leaf, result) for leaf, result in zip(leaves, results, strict=True)]
        )

    def _compare(self, tensors: Sequence[tf.Tensor]) -> None:
        loose = self.kind in ("all_gather", "gather")
        head = [self.kind, self.op, f"to or from rank {self.root}" if self.root else None]
        text = " ".join(part for part in head if part)
        rows: list[Described] = [("the call", None, f"{text} of {len(tensors)} tensors")]
        for number, tensor in enumerate(tensors):
            shape = list(tensor.shape)
            if loose and shape:
                shape[0] = None
            rows.append((f"tensor {number}", tuple(shape), tensor.dtype.name))
        hint = "Every rank has to make the same calls in the same order"
        agree(self.group, rows, self.what, hint, name="tfdist call")  # different calls meet too, and are told so


def _reduced(call: _Call, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    op = call.op or "sum"
    dressed = [_dress(t, op, call.kind) for t in tensors]
    inner = {"any": "max", "all": "min"}.get(op, op)
    return _fused(dressed, call.name, lambda flat, name: call.group.all_reduce(flat, name, inner))


def _sent(call: _Call, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    return _fused(tensors, call.name, lambda flat, name: call.group.broadcast(flat, call.root, name))


def _gathered(call: _Call, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    rows = [t[None] if t.shape.rank == 0 else t for t in tensors]
    return [call.group.all_gather(t, f"{call.name}.{i}") for i, t in enumerate(rows)]


def _scattered(call: _Call, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    op = call.op or "sum"
    inner = {"any": "max", "all": "min"}.get(op, op)
    return [
        call.group.reduce_scatter(_dress(t, op, call.kind), f"{call.name}.{i}", inner) for i, t in enumerate(tensors)
    ]


def _dress(tensor: tf.Tensor, op: str, kind: str) -> tf.Tensor:
    """The tensor as the reduction needs it: booleans for "any" and "all", floats for a mean."""
    if op in ("any", "all") and tensor.dtype != tf.bool:
        raise ValueError(f"{kind}: {op!r} needs booleans, got {tensor.dtype.name}")
    if op == "mean" and tensor.dtype.is_integer:
        return tf.cast(tensor, tf.float64)
    return tensor


def _fused(tensors: Sequence[tf.Tensor], name: str, work: Callable[[tf.Tensor, str], tf.Tensor]) -> list[tf.Tensor]:
    """`work` on tensors of one type as one vector. Tensors without a static shape go one by one."""
    results: list[Any] = [None] * len(tensors)
    groups: dict[str, list[int]] = {}
    for i, tensor in enumerate(tensors):
        static = tensor.shape.is_fully_defined()
        groups.setdefault(tensor.dtype.name if static else f"{i}", []).append(i)
    for label, members in groups.items():
        if len(members) == 1:
            results[members[0]] = work(tensors[members[0]], f"{name}.{label}")
            continue
        flat = work(fusion.pack([tensors[i] for i in members]), f"{name}.{label}")
        parts = fusion.unpack(flat, [tensors[i].shape for i in members])
        for i, part in zip(members, parts, strict=True):
            results[i] = part
    return results


def _tensor(leaf: Any, kind: str) -> tf.Tensor:
    if tf.is_tensor(leaf) or hasattr(leaf, "__tf_tensor__") or isinstance(leaf, tf.Variable):
        return tf.convert_to_tensor(leaf)
    array = np.asarray(leaf)  # as numpy: Python numbers are 64 bits wide
    if array.dtype.kind not in "biufcV":
        raise ValueError(f"{kind}: got {leaf!r}; it takes tensors, arrays, numbers and nested structures of them")
    return tf.convert_to_tensor(array)


def _like(leaf: Any, result: tf.Tensor) -> Any:
    given = isinstance(leaf, (np.ndarray, np.generic, bool, int, float, complex))
    return result.numpy() if given and tf.executing_eagerly() else result


def _graph_name(kind: str, name: str | None) -> str:
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "outer_graph", None) is not None:
        graph = graph.outer_graph  # loop bodies and inner functions count with the function the user calls
    if name is None:
        name = str(getattr(graph, "_tfdist_calls", 0))
        graph._tfdist_calls = int(name) + 1
    return f"{getattr(graph, 'name', 'graph')}.{kind}.{name}"


def _watched(
    what: str, work: Callable[[list[tf.Tensor]], list[tf.Tensor]], tensors: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Runs `work` in a graph so that the roll call sees it wait, and so that it runs even if unused."""
    region = watch.in_graph(what)
    enter = tf.numpy_function(region.enter, [], [], name="tfdist_enter")
    with tf.control_dependencies([enter]):
        inputs = [tf.identity(t) for t in tensors]
    results = work(inputs)
    # The optimizer of graphs drops a collective that only control edges leave: hand on a bit of each result.
    bits = [tf.reshape(r, [-1])[:1] for r in results]
    leave = tf.numpy_function(lambda *_: region.leave(), bits, [], name="tfdist_leave")
    with tf.control_dependencies([leave]):
        return [tf.identity(r) for r in results]
