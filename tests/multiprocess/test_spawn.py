"""`tfdist.spawn`, and with it the tests' own helper. Most cases load no TensorFlow."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.helpers import cluster
from tfdist.cluster import World
from tfdist.launch.spawn import SpawnError, SpawnTimeoutError, spawn
from tfdist.launch.supervise import Supervisor


def place():
    world = World.from_env()
    return (world.rank, world.size, world.local_rank, world.local_size)


def test_results_come_in_rank_order_from_a_closure(capsys):
    base = {"a": [1, 2]}

    def fn(extra, big):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        return (*place(), base, extra, len(big), os.environ["MINE"])

    results = spawn(fn, ranks=3, args=("x", b"y" * 300_000), env={"MINE": "z"}, deadline=60)
    assert results == [(r, 3, r, 3, base, "x", 300_000, "z") for r in range(3)]
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[1] to stdout", "[2] to stdout", "to stdout"]
    assert sorted(err.splitlines()) == ["[1] to stderr", "[2] to stderr", "to stderr"]


def test_the_end_is_seen_however_late_the_waiting_thread_ends(monkeypatch):
    """The thread that waits for the processes may be slow to end after its last word."""
    wake = Supervisor._wake

    def slow_to_return(self, reason):
        wake(self, reason)
        if reason == b"e":
            threading.Event().wait(2)

    monkeypatch.setattr(Supervisor, "_wake", slow_to_return)
    # Missed, the end would be found at the deadline, which stops the ranks.
    stopped = []
    monkeypatch.setattr(Supervisor, "_stop", lambda self, child, signum: stopped.append(signum))
    assert spawn(place, ranks=1, deadline=10) == [(0, 1, 0, 1)]
    assert stopped == []


def test_one_rank_needs_no_horovod():
    def fn():
        return (*place(), "horovod" in sys.modules, os.getpid())

    *rest, pid = spawn(fn, ranks=1, deadline=60)[0]
    assert rest == [0, 1, 0, 1, False]
    assert pid != os.getpid()


def test_a_run_finds_its_own_port_while_another_has_one(tmp_path):  # L2
    started, done = tmp_path / "started", tmp_path / "done"
    os.mkfifo(started)
    os.mkfifo(done)

    def port():
        return os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]

    def first():
        if World.from_env().rank == 0:
            started.write_text(port())
            done.read_text()
        return port()

    results = []
    thread = threading.Thread(target=lambda: results.append(spawn(first, deadline=60)))
    thread.start()
    taken = started.read_text()
    second = spawn(port, deadline=60)
    done.write_text("")
    thread.join()
    assert results == [[taken, taken]]
    assert second[0] == second[1] != taken


def test_the_ranks_traceback_is_raised():
    def inner():
        raise KeyError("no such thing")

    def fn():
        if World.from_env().rank == 1:
            inner()

    with pytest.raises(SpawnError, match="rank 1 on .* failed: KeyError: 'no such thing'") as error:
        spawn(fn, deadline=60)
    assert error.value.rank == 1
    assert error.value.exit_code == 1
    assert "in inner" in error.value.traceback
    assert "tfdist/launch" not in error.value.traceback
    assert str(error.value).endswith(error.value.traceback.rstrip())


def test_a_rank_that_waits_is_ended_when_the_other_fails():
    def fn():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if World.from_env().rank == 1:
            sys.exit(3)
        threading.Event().wait()

    start = time.monotonic()
    with pytest.raises(SpawnError, match="rank 1 on .* left with exit code 3") as error:
        spawn(fn, deadline=60)
    assert time.monotonic() - start < 11  # a second to start, ten to end
    assert error.value.exit_code == 3


def test_a_killed_rank_is_named():
    def fn():
        if World.from_env().rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()

    words = r"rank 0 on .* was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(SpawnError, match=words) as error:
        spawn(fn, deadline=60)
    assert (error.value.rank, error.value.exit_code) == (0, 137)


def test_a_killed_watcher_is_named_too():
    def fn():
        if World.from_env().rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        threading.Event().wait()

    with pytest.raises(SpawnError, match="rank 1 on .* was killed by signal 9") as error:
        spawn(fn, deadline=60)
    assert error.value.rank == 1


def test_the_deadline_shows_stacks():
    def waits_here():
        threading.Event().wait()

    def fn():
        if World.from_env().rank == 1:
            waits_here()

    words = "rank 1 had not ended after the deadline of 4 s"
    with pytest.raises(SpawnTimeoutError, match=words) as error:
        spawn(fn, deadline=4)
    assert "in waits_here" in str(error.value)
    assert error.value.rank == 1


def test_leaving_without_a_result_is_an_error():
    def fn():
        if World.from_env().rank == 1:
            os._exit(0)

    words = "rank 1 ended with exit code 0 before the function returned"
    with pytest.raises(SpawnError, match=words):
        spawn(fn, deadline=60)


def test_an_unpicklable_result_is_an_error():
    with pytest.raises(SpawnError, match="rank 0 on .* TypeError: cannot pickle"):
        spawn(lambda: threading.Lock(), ranks=1, deadline=60)


def test_inside_a_rank_it_is_refused():
    def fn():
        with pytest.raises(RuntimeError, match=r"inside rank \d of 2"):
            spawn(place)
        return True

    assert spawn(fn, deadline=60) == [True, True]


def test_zero_ranks():
    with pytest.raises(ValueError, match="ranks is 0, expected 1"):
        spawn(place, ranks=0)


def test_the_helper_fails_on_a_process_left_behind():
    def fn():
        sleeper = [sys.executable, "-c", "import threading; threading.Event().wait()"]
        return subprocess.Popen(sleeper, start_new_session=True).pid

    with pytest.raises(AssertionError, match="left behind: .*threading.Event"):
        cluster.run(fn, ranks=1)
    # and conftest's guard confirms that it was ended
