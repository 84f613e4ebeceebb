"""How workers of a parameter server keep in step: one argument, plain values. Pure.

With n workers, of one step each at the same time (time goes right, | is an update)::

    Async       w0  ---|---|---|---|        applied when it comes
                w1  -------|-------|
    Bounded(2)  w0  ---|---|.......---|     waits, or w1's update would be 3 late
                w1  -------------------|
    Sync        w0  ---....|---....|        one update of both
                w1  -------|-------|
    LocalSGD(2) w0  --- ---..|--- ---..|    each on a copy of its own; the copies are averaged
                w1  ---- ----|---- ----|
"""

from __future__ import annotations

from dataclasses import dataclass

CORRECTIONS = ("scale", "dc")


def _need_integer(what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} is {value!r}, expected an integer >= {least}.")


@dataclass(frozen=True)
class Consistency:
    """What the four have in common."""

    def replicas(self, workers: int) -> int:
        """Into how many parts a batch of `fit` is cut; `num_replicas_in_sync`."""
        return 1

    def check(self, workers: int) -> None:
        """Raises ValueError where it makes no sense with this number of workers."""


@dataclass(frozen=True)
class Async(Consistency):
    """Each worker's gradient is applied when it comes, however many updates others have made since its pull.

    Args:
      correction: of late gradients. With t updates of others between pull and push, g the gradient, w_then the
        parameters it was computed on and w_now those it meets:

        - None: as it is.
        - "scale": the learning rate is divided by max(t, 1) (Zhang, Gupta, Lian, Liu: Staleness-aware Async-SGD for
          Distributed Deep Learning, IJCAI 2016).
        - "dc": g + strength * g * g * (w_now - w_then), element by element, the first terms of a Taylor series
          (Zheng et al.: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017). A worker sends
          the parameters back along with the gradient, so a push is twice as large. Rows of embeddings stay as they are.
      strength: of "dc", the paper's lambda (its constant form).

    Raises:
      ValueError: an unknown correction, or a strength that is not positive.
    """

    correction: str | None = None
    strength: float = 0.04

    def __post_init__(self) -> None:
        if self.correction is not None and self.correction not in CORRECTIONS:
            known = ", ".join(repr(c) for c in CORRECTIONS)
            raise ValueError(f"Async: correction is {self.correction!r}, expected None or one of {known}.")
        if not isinstance(self.strength, int | float) or not self.strength > 0:
            raise ValueError(f"Async: strength is {self.strength!r}, expected a number above 0, such as 0.04.")


@dataclass(frozen=True)
class Bounded(Consistency):
    """As `Async`, but no gradient is applied that was computed on parameters more than `staleness` updates old.

    A worker that would make another one's gradient too late waits; nothing is dropped (Ho et al.: More Effective
    Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013). The chief holds calls back, so that
    at most `staleness` + 1 workers are busy at a time.

    Args:
      staleness: updates of others between a pull and its push, at most; 0 lets one worker in at a time.

    Raises:
      ValueError: it is no integer, or below 0.
    """

    staleness: int = 4

    def __post_init__(self) -> None:
        _need_integer("Bounded: staleness", self.staleness, 0)


@dataclass(frozen=True)
class Sync(Consistency):
    """All workers compute their part of one batch on the same parameters; the average is one update.

    The batch of `fit` is the joined batch: it is cut into as many shares as there are workers. With k backup workers
    the first n - k gradients of a step count, and what comes later is dropped and counted (Chen et al.: Revisiting
    Distributed Synchronous SGD, 2016); a worker that is still at work gets no share of the next step.

    Args:
      backup_workers: k. 0 is the same training as one process on the joined batch.

    Raises:
      ValueError: it is no integer, below 0, or leaves no worker whose gradient counts.
    """

    backup_workers: int = 0

    def __post_init__(self) -> None:
        _need_integer("Sync: backup_workers", self.backup_workers, 0)

    def replicas(self, workers: int) -> int:
        return workers

    def check(self, workers: int) -> None:
        if self.backup_workers >= workers:
            raise ValueError(
                f"Sync: backup_workers is {self.backup_workers}, but the cluster has {workers} "
                f"worker{'s' if workers > 1 else ''}: no gradient would count. Expected at most {workers - 1}."
            )


@dataclass(frozen=True)
class LocalSGD(Consistency):
    """Each worker trains a copy of its own for `steps` batches; then the copies are averaged, optimizer slots too.

    Copies count by their samples (McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized
    Data, AISTATS 2017; Stich: Local SGD Converges Fast and Communicates Little, ICLR 2019). A round's parameters travel
    once each way, whatever `steps` is. `optimizer.iterations` counts the steps of one copy.

    Args:
      steps: of a worker between two averages.

    Raises:
      ValueError: it is no integer, or below 1.
    """

    steps: int = 8

    def __post_init__(self) -> None:
        _need_integer("LocalSGD: steps", self.steps, 1)


NAMES = {"async": Async(), "sync": Sync()}


def parse(value: object) -> Consistency:
    """A consistency from what a user passed: one of the classes, or "async" or "sync".

    Raises:
        ValueError: something else.
    """
    if isinstance(value, Consistency):
        return value
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]
    raise ValueError(
        f"consistency is {value!r}, expected tfdist.Async(), tfdist.Bounded(staleness=4), "
        'tfdist.Sync(backup_workers=0), tfdist.LocalSGD(steps=8), or one of the strings "async" and "sync".'
    )
