"""Embedding tables in a worker's step: only the rows of the batch come, and only their gradients go.

A table's value is not there. What stands in for it, an anchor, can do one thing: be the variable that a gradient is
taken of. A looked-up row depends on the anchor by a gradient of its own, which is the rows' gradients as
`tf.IndexedSlices`; so `tape.gradient` of a train_step finds what it would find in one process::

    ids ---> rows from the ps tasks ---> layer's output ... loss
    anchor -----------^   d loss / d anchor = (ids, d loss / d rows)
"""

from __future__ import annotations

from typing import Any, NoReturn

import tensorflow as tf

from tfdist import private
from tfdist.ps.store import Store


class NeededWholeError(Exception):
    """The model used a table otherwise than by looking up rows."""


class Anchor:
    """Stands in for a table's value."""

    def __init__(self, tables: Tables, index: int, variable: Any) -> None:
        self._tables, self._index, self._variable = tables, index, variable

    @property
    def handle(self) -> tf.Tensor:
        """By which a tape knows it."""
        return self._variable.handle

    def read(self) -> tf.Tensor:
        """A number of which a tape takes note."""
        return self._variable.read_value()

    def _needed(self) -> NoReturn:
        self._tables.needed.add(self._index)
        raise NeededWholeError(f"table {self._index} is needed whole")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._needed()

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> Any:
        self._needed()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._needed()


class Tables:
    """The tables of a store, for one trace of a step.

    Attributes:
      needed: indices of those that the step used as a whole.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.needed: set[int] = set()
        self._store = store
        self._graph = tf.compat.v1.get_default_graph()
        self._anchors = {
            index: Anchor(self, index, private.local_variable(f"{name}.anchor{index}", tf.zeros([])))
            for index in sorted(store.tables)
        }
        self._index = {id(store.variables[index]): index for index in self._anchors}

    def anchors(self) -> list[tuple[Any, Anchor]]:
        """(variable, what stands in for it)."""
        return [(self._store.variables[index], anchor) for index, anchor in self._anchors.items()]

    def holds(self, variable: Any) -> bool:
        """Whether rows of this variable can be looked up."""
        return id(variable) in self._index

    def look_up(self, variable: Any, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a table, of which gradients can be taken: `ids.shape` + (width,)."""
        index = self._index[id(variable)]
        if tf.compat.v1.get_default_graph() is not self._graph:
            self._anchors[index]._needed()  # in a loop or a branch of the model, whose gradient is a graph of its own
        shape = tuple(variable.shape)

        @tf.custom_gradient
        def tied(anchor: tf.Tensor, rows: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> Any:
                values = tf.reshape(upstream, [-1, *shape[1:]])
                return tf.IndexedSlices(values, tf.reshape(ids, [-1]), tf.constant(shape, tf.int64)), None

            return tf.identity(rows), gradient

        return tied(self._anchors[index].read(), self._store.look_up(index, ids))
