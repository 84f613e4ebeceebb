"""The chief's side of a cluster: wait for the tasks, hand calls to workers, collect results, dismiss the tasks."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from typing import Any

import tensorflow as tf

from tfdist import private
from tfdist.ps.offers import Offers
from tfdist.tasks import keepalive
from tfdist.tasks.board import Board, dismiss, listens
from tfdist.tasks.waiting import await_tasks, named, servers, silent, started, within
from tfdist.tf_config import Cluster, Task

START = 300.0  # seconds for all tasks to come up
RECOVER = 60.0  # seconds for a ps that ended to come back
PROBE = 5.0  # seconds after which a silent cluster is looked at
PATIENCE = 20.0  # seconds for calls to end that are not wanted any more; a call to a ps that died may never do so
SILENT = 60.0  # seconds without the end of a call after which the user hears of it
ALONE = 60.0  # seconds without any worker, after which training ends
LAST = 50  # calls of a worker that say how fast it is
AHEAD = 2  # calls of a worker: the one it runs, and the next


class Life:
    """What is known of a worker by the calls that it has done."""

    def __init__(self) -> None:
        self._steps = 0
        self._last: deque[tuple[float, int]] = deque(maxlen=LAST)

    def hear(self, now: float, steps: int) -> None:
        self._steps += steps
        self._last.append((now, steps))

    def status(self) -> dict[str, Any]:
        last = list(self._last)
        seconds = last[-1][0] - last[0][0] if last else 0.0
        return {
            "steps": self._steps,
            "steps_per_s": sum(steps for _, steps in last[1:]) / seconds if seconds else 0.0,
            "silent_s": time.monotonic() - last[-1][0] if last else None,
        }


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's, but at the process' end it stops no threads: one that waits for a dead worker has its lock."""

    def __del__(self) -> None:
        pass


class Chief:
    """Connected to all tasks of `cluster`. One in a process: TensorFlow joins a cluster once.

    Attributes:
      workers: number of worker tasks.
      ps_devices: of the ps tasks.
      offers: of weights, to an evaluator.

    Raises:
      RuntimeError: tasks did not come up in `start` seconds.
    """

    _connected: Chief | None = None

    def __init__(self, cluster: Cluster, start: float = START) -> None:
        if Chief._connected is not None:
            raise RuntimeError(
                "This process has a parameter server's cluster already, and TensorFlow joins one only. Use the "
                "strategy that is there, or a process for each."
            )
        self.cluster, self.workers = cluster, len(cluster.workers)
        await_tasks(cluster, start)
        keepalive.start(cluster)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.spec()), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        self._strategy = tf.distribute.ParameterServerStrategy(resolver)
        self._coordinator = Coordinator(self._strategy)
        self.ps_devices = [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(len(cluster.ps))]
        self._board = Board(cluster)
        self.offers = Offers(bool(cluster.evaluators))
        self._running: dict[Future[Any], int] = {}
        self._lives = {task.name: Life() for task in self._tasks("worker")}
        self._left = False
        self._fitting = threading.Lock()
        self._at_leave: list[weakref.ref[Any]] = []
        Chief._connected = self
        atexit.register(self.leave)

    @contextlib.contextmanager
    def one_fit(self, name: str) -> Iterator[None]:
        """While a model trains.

        Raises:
          RuntimeError: another one does, in another thread or around this.
        """
        if not self._fitting.acquire(blocking=False):
            raise RuntimeError(
                f"fit() of {name!r} was called while another fit() of this strategy is under way: the workers train "
                "one model at a time. Call one after the other."
            )
        try:
            yield
        finally:
            self._fitting.release()

    def tell_at_the_end(self, session: Any) -> None:
        """`session.release()` will be called while the tasks are still there."""
        self._at_leave.append(weakref.ref(session))

    @property
    def limit(self) -> int:
        """Calls that keep all workers busy: each runs one and finds the next at hand."""
        return self.workers * AHEAD

    @property
    def idle(self) -> bool:
        """Whether no call is under way."""
        return not self._running

    def schedule(self, call: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Hands a call, of this number, to the next free worker."""
        value = self._coordinator.schedule(function, args=args)
        self._running[started(lambda: self._fetch(value))] = call

    def _fetch(self, value: Any) -> dict[str, Any]:
        """Waits for a call, which may never end, and brings its result, tensors by name, here."""
        found: dict[str, Any] = value.fetch()
        worker = tf.DeviceSpec.from_string(private.ran_on(value))
        self._lives[f"{worker.job}/{worker.task}"].hear(time.monotonic(), len(found["facts"]))
        return found

    def results(self, everything: bool = False) -> list[tuple[int, Any]]:
        """(number, what it returned) of calls that have ended since; waits for one, or for `everything`.

        Raises:
          whatever a call raised on its worker.
          RuntimeError: no worker has been there for a minute.
        """
        if not self._running:
            return []
        when = ALL_COMPLETED if everything else FIRST_COMPLETED
        heard = told = time.monotonic()
        done: dict[Future[Any], int] = {}
        while not done or (everything and self._running):
            ended, _ = wait(self._running, timeout=PROBE, return_when=when)
            done |= {future: self._running.pop(future) for future in ended}
            if ended or self._any_worker():
                heard = time.monotonic()
                told = heard if ended else self._tell_of_silence(told)
            elif time.monotonic() - heard > ALONE:
                workers = named(self.cluster, self._tasks("worker"))
                raise RuntimeError(f"For {ALONE:.0f} s no worker has answered: {workers}. See why they ended.")
        failed = [error for future in done if (error := future.exception()) is not None]
        if failed:  # by one call, for which TensorFlow cancels the others
            raise min(failed, key=lambda error: isinstance(error, tf.errors.CancelledError))
        return sorted(((call, future.result()) for future, call in done.items()), key=lambda one: one[0])

    def _tell_of_silence(self, since: float) -> float:
        """Says which workers have not answered, when no call has ended for a while; since when to count now."""
        now = time.monotonic()
        if now - since < SILENT:
            return since
        found = [
            f"{task.name} ({'it listens' if listens(self.cluster.address(task)) else 'it is gone'})"
            for task in self._tasks("worker")
        ]
        print(
            f"tfdist: for {SILENT:.0f} s no worker has ended a call: {', '.join(found)}. One that listens and is stuck "
            "has to be ended for others to take its calls over.",
            flush=True,
        )
        return now

    def _try_paths(self) -> None:
        """Lets every worker call every ps, whose failed connection it may still remember.

        Raises:
          tf.errors.OpError: one could not.
        """

        def ask() -> tf.Tensor:
            answers = []
            for device in self.ps_devices:
                with tf.device(device):
                    answers.append(tf.timestamp())
            return tf.add_n(answers)

        for worker in range(self.workers):
            with tf.device(f"/job:worker/replica:0/task:{worker}/device:CPU:0"):
                tf.function(ask, autograph=False)()

    def _tasks(self, job: str) -> list[Task]:
        return [task for task in self.cluster.tasks() if task.job == job]

    def status(self) -> list[dict[str, Any]]:
        """Each worker and ps: `task`, `address`, whether it `listens` now.

        Of workers also `steps`, how many it has done; `steps_per_s` over its last calls; and `silent_s`, the seconds
        since a call of it has ended (None before the first).
        """
        found = []
        for task in servers(self.cluster):
            address = self.cluster.address(task)
            row = {"task": task.name, "address": address, "listens": listens(address)}
            found.append(row | (self._lives[task.name].status() if task.job == "worker" else {}))
        return found

    def _any_worker(self) -> bool:
        return any(listens(address) for address in self.cluster.workers)

    def recover(self, error: BaseException, lost: Callable[[str], bool], seconds: float) -> None:
        """Waits until ps tasks that were started again are there, and connects to them.

        Args:
          error: what a call, or the chief itself, met.
          lost: whether what the ps on a device held is gone.
          seconds: to wait for the tasks.

        Raises:
          RuntimeError: a ps did not come back; it is named.
          error: no ps has lost what it held.
        """
        self.abandon()
        gone = [
            task
            for task, device in zip(self._tasks("ps"), self.ps_devices, strict=True)
            if not listens(self.cluster.address(task)) or _lost(lost, device)
        ]
        if not gone:
            raise error
        print(
            f"tfdist: {named(self.cluster, gone)} ended; waiting {seconds:.0f} s for it to be started again",
            flush=True,
        )
        try:
            self._reconnect(time.monotonic() + seconds)
        except RuntimeError:
            still = named(self.cluster, silent(self.cluster, servers(self.cluster)))
            raise RuntimeError(
                f"{named(self.cluster, gone)} ended while the chief was training, and after {seconds:.0f} s "
                f"{f'{still} is not there' if still else 'calls still hang'}. See why it ended, and start the job "
                "again from its last checkpoint."
            ) from error

    def _reconnect(self, ends: float) -> None:
        """Raises RuntimeError where the tasks are not there, or do not answer, at `ends`."""
        while True:
            await_tasks(self.cluster, max(ends - time.monotonic(), 0.0))
            try:
                within(PATIENCE, lambda: private.reconnect(self._coordinator))
                within(PATIENCE, self._try_paths)
                self._renew()
                within(PATIENCE, self._coordinator.schedule(tf.function(tf.timestamp, autograph=False)).fetch)
                return
            except tf.errors.OpError:  # it listens, but not everybody has noticed
                time.sleep(0.5)
            if time.monotonic() > ends:
                raise RuntimeError("calls still hang")

    def _renew(self) -> None:
        """Another coordinator, with threads of its own: those of the last one may be stuck, or have ended."""
        private.forget_coordinator(self._strategy)
        self._coordinator = Coordinator(self._strategy)

    def abandon(self) -> bool:
        """Lets running calls end, for a while and as long as there are workers, and forgets what they return.

        Whether all have ended: what has not may still push.
        """
        left, ends = set(self._running), time.monotonic() + PATIENCE
        while left and self._any_worker() and time.monotonic() < ends:
            _, left = wait(left, timeout=PROBE)
        self._running = {}
        return self._settle() and not left

    def _settle(self) -> bool:
        """Lets TensorFlow's coordinator forget an error, which the next call would raise again.

        It waits for calls under way, of which one may never end: then this gives up, and returns False.
        """

        def forget() -> None:
            with contextlib.suppress(Exception):
                self._coordinator.join()

        try:
            within(PATIENCE, forget)
        except tf.errors.DeadlineExceededError:
            return False
        return True

    def leave(self) -> None:
        """Ends the tasks: the job is over. Called when Python ends, too."""
        if not self._left:
            self._left = True
            for reference in self._at_leave:
                if (session := reference()) is not None:
                    session.release()
            gc.collect()  # what is left on the tasks is removed now: later nobody would answer
            failed = getattr(sys, "last_value", None) is not None
            try:
                if not failed:
                    self.offers.finish()
            finally:
                dismiss(self._board, len(self.cluster.ps) + self.workers, failed)


def _lost(lost: Callable[[str], bool], device: str) -> bool:
    try:
        return bool(within(PATIENCE, lambda: lost(device)))
    except tf.errors.DeadlineExceededError:
        return True
