"""What strategies have in common whose `fit` is one process' and whose models are built as without a strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist.data.arrays import quiet


class OneProcessStrategy(tf.distribute.OneDeviceStrategy):
    """One process reads the data and runs `fit`."""

    _tuned = True  # whether TensorFlow is to tune the pipelines that are made now

    @contextlib.contextmanager
    def scope(self) -> Iterator[Any]:
        """Where models are built, as with every strategy. Nothing special happens: the model is a plain one.

        A scope of TensorFlow's would draw to this strategy's device what belongs on others.
        """
        yield self

    def experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """The dataset itself: this process reads all of it."""
        return dataset if self._tuned else quiet(dataset)

    @contextlib.contextmanager
    def reading(self, *given: Any) -> Iterator[None]:
        """Surrounds what makes pipelines of what was given to `fit` and the like.

        Keras' pipelines over arrays have nothing to tune; `quiet` says what tuning costs them.
        """
        before, self._tuned = self._tuned, any(isinstance(data, tf.data.Dataset) for data in given)
        try:
            yield
        finally:
            self._tuned = before
