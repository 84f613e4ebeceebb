"""Which calls may be under way, and which batches go into which call. Pure.

A call is a few batches for one worker. While it is under way others push updates; how many can come between one of its
pulls and the push after it is known before it is handed out::

    call 0  |---------------------------------|      met: 2 + 2 + 1
    call 1    |------| 2 updates                     met: all of call 0, and what begins before it ends
    call 2             |------| 2 updates
    call 3                       |---...  1 update: admitted if 2 + 2 + 1 <= staleness
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby


class Window:
    """The calls that are under way.

    Args:
      calls: at most that many.
      staleness: at most that many updates of others between a pull and its push; None for no limit.
    """

    def __init__(self, calls: int, staleness: int | None = None) -> None:
        self.calls, self.staleness = calls, staleness
        self._steps: dict[int, int] = {}  # updates of each call under way
        self._met: dict[int, int] = {}  # updates of others that may have come during it

    def __len__(self) -> int:
        return len(self._steps)

    def admits(self, steps: int) -> bool:
        """Whether a call of `steps` updates may begin now."""
        if len(self._steps) >= self.calls:
            return False
        if self.staleness is None or not self._steps:
            return True
        return sum(self._steps.values()) <= self.staleness and all(
            met + steps <= self.staleness for met in self._met.values()
        )

    def begin(self, call: int, steps: int) -> None:
        for other in self._met:
            self._met[other] += steps
        self._met[call] = sum(self._steps.values())
        self._steps[call] = steps

    def end(self, call: int) -> None:
        """A call has ended; one that is not known is no mistake."""
        self._steps.pop(call, None)
        self._met.pop(call, None)

    def clear(self) -> None:
        self._steps.clear()
        self._met.clear()


def most_steps(workers: int, staleness: int | None, most: int) -> int:
    """Updates of one call at most, so that all workers (and a waiting call of each) fit under the bound."""
    return most if staleness is None or workers == 1 else max(1, min(most, staleness // (2 * workers)))


def deal(kinds: Sequence[Hashable], workers: int, steps: int) -> list[list[list[int]]]:
    """Batches to copies: rounds of at most `workers` calls of at most `steps` batches, as even as they can be.

    Args:
        kinds: of each batch; only neighbours of one kind can be in one call.

    Returns:
        for each round, for each of its calls, the numbers of its batches. Every number stands there once, in order.
    """
    each = min(steps, -(-len(kinds) // workers)) if kinds else 1
    calls: list[list[int]] = []
    for _, run in groupby(range(len(kinds)), key=lambda i: kinds[i]):
        numbers = list(run)
        calls += [numbers[i : i + each] for i in range(0, len(numbers), each)]
    return [calls[i : i + workers] for i in range(0, len(calls), workers)]
