"""The queues between chief and evaluator as lists, for tests without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Queues:
    """Stands in for `Queues` and `Exchange` of `tfdist.ps.snapshots`.

    Attributes:
      asked_numbers: what the evaluator asked for, not heard by the chief yet.
      weights: (header, piece) that the evaluator has not received.
      ends: how full the chief's queues "done" and "failed" are.
      when_idle: what the chief does, one after the other, each time the evaluator finds nothing.
      on_asked: what happens, one after the other, when the chief listens.
    """

    whom = "the chief"

    def __init__(self) -> None:
        self.asked_numbers: list[int] = []
        self.weights: list[tuple] = []
        self.ends = {"done": 0, "failed": 0}
        self.when_idle: list[Callable] = []
        self.on_asked: list[Callable] = []
        self._threads: list[threading.Thread] = []

    def ask(self, number):
        self.asked_numbers.append(number)

    def asked(self):
        if self.on_asked:
            self.on_asked.pop(0)()
        numbers, self.asked_numbers = self.asked_numbers, []
        return numbers

    def send(self, header, piece):
        self.weights.append((header, piece))

    def receive(self):
        return self.weights.pop(0)

    def sizes(self):
        if not self.weights and self.when_idle:
            self.when_idle.pop(0)()
        return {**self.ends, "asked": len(self.asked_numbers), "weights": len(self.weights)}

    def in_thread(self, function):
        """A function that starts `function` in a thread; `join` waits for it."""

        def start():
            self._threads.append(threading.Thread(target=function))
            self._threads[-1].start()

        return start

    def join(self):
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
