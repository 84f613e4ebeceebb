"""Where in its data an interrupted `fit` was: how many iterators it had begun, and how many batches it had taken."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """iterators: begun and done with, before the present one. batches: taken from that before this epoch."""

    iterators: int
    batches: int


def place_after(epochs: int, steps: int | None, length: int | None) -> Place:
    """Where Keras' loop is after so many whole epochs of one `fit`.

    An epoch takes a new iterator, unless `steps_per_epoch` cuts one into epochs. Where Keras knows the length it begins
    one more as soon as it has counted to the end, besides the one with which it begins the next epoch.

    Args:
      steps: `steps_per_epoch`.
      length: batches in the data as they tell it; None where they never end, or do not tell.
    """
    if steps is None:
        return Place(epochs if length is None else 2 * epochs, 0)
    if length is None:
        return Place(0, epochs * steps)
    iterators = batches = 0
    for _ in range(epochs):
        batches = min(batches + steps, length)
        if batches == length:
            iterators, batches = iterators + 1, 0
    return Place(iterators, batches)
