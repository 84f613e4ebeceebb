"""Signals that a checkpoint waits for, and the states that it keeps; in one process."""

import os
import random
import signal
import subprocess
import sys

import numpy as np
import pytest

from tfdist import patience
from tfdist.trainers import stored
from tfdist.trainers.notice import SECONDS, Notice


@pytest.fixture
def notice():
    one = Notice()
    yield one
    one.told = 0
    one.forget()


def test_a_signal_is_noted_while_it_listens(notice, tmp_path, monkeypatch):
    file = tmp_path / "patience-0"
    monkeypatch.setenv(patience.VARIABLE, str(file))
    notice.listen()
    assert patience.asked(file) == SECONDS
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
        assert notice.told == number and notice.name == number.name
    notice.forget()
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert patience.asked(file) == 0


def test_a_handler_of_the_programs_own_stays(notice):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        notice.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] and notice.told == 0
        notice.tell()
        assert notice.told and notice.name == "a call of leave()"
        notice.forget()
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_child_ends_by_it_and_a_late_signal_takes_its_way(tmp_path):
    script = """
import os, signal
from tfdist.trainers.notice import Notice
notice = Notice()
notice.listen()
if (child := os.fork()) == 0:
    signal.pause()
os.kill(child, signal.SIGTERM)
assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
assert notice.told == signal.SIGTERM
notice.forget()
notice.repeat()
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True)
    assert done.returncode == -signal.SIGTERM, done.stderr


def test_random_states_come_back(tmp_path):
    random.seed(3)
    np.random.seed(4)  # noqa: NPY002
    random.gauss(0, 1), np.random.normal()  # noqa: NPY002 - each keeps a second number for later
    np.savez(tmp_path / "state.npz", **stored.random_states())

    def draw():
        return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]  # noqa: NPY002

    wanted = draw()
    with np.load(tmp_path / "state.npz") as arrays:
        stored.set_random_states(dict(arrays))
    assert draw() == wanted


def test_only_whole_checkpoints_are_found(tmp_path):
    for name in ("000001-000000002", "000000-000000009", ".tfdist-7-000002-000000000", "000003-000000000", "mine"):
        (tmp_path / name).mkdir()
        if name != "000003-000000000":
            (tmp_path / name / stored.STATE).write_text("{}")
    assert stored.latest(tmp_path).name == "000001-000000002"
    assert len(stored.found(tmp_path)) == 4
    assert stored.latest(tmp_path / "nothing") is None
