"""The roll call over real connections, with threads as ranks."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest

from tfdist.comm import rollcall, watch
from tfdist.comm.rollcall import Line, RollCall
from tfdist.comm.verdict import State
from tfdist.comm.watch import Board, Region


class LostError(Exception):
    """What the fake collective raises when it is broken off."""


class Group:
    """A group whose only collective waits until it is aborted."""

    def __init__(self, rank, size):
        self.rank, self.size, self.local_size = rank, size, size
        self.hosts = tuple("abc"[:size])
        self.aborted = threading.Event()

    def abort(self):
        self.aborted.set()

    def lost(self, error):
        return isinstance(error, LostError)

    def wait(self):
        assert self.aborted.wait(30)
        raise LostError


class Ranks:
    """Boards that are connected to each other."""

    def __init__(self, size, deadline):
        self.boards = [Board(Group(r, size), deadline) for r in range(size)]
        listener = socket.create_server(("127.0.0.1", 0))
        place = listener.getsockname()[:2]
        self.calls = [RollCall(self.boards[0], "token", listener)]
        for board in self.boards[1:]:
            line = Line(socket.create_connection(place))
            line.send(kind="hello", rank=board.group.rank, token="token")
            self.calls.append(RollCall(board, "token", None, line))
        self.place = place

    def close(self):
        for call in reversed(self.calls):
            call.close()


@pytest.fixture
def ranks():
    made = []

    def make(size=2, deadline=0.2):
        made.append(Ranks(size, deadline))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_in(board, what):
    with pytest.raises(RuntimeError) as error, Region(board, what, busy=False):
        board.group.wait()
    return str(error.value)


def together(*calls):
    results = [None] * len(calls)

    def run(i, call):
        results[i] = call()

    threads = [threading.Thread(target=run, args=(i, c)) for i, c in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_a_missing_rank_is_named_everywhere(ranks):
    boards = ranks(3).boards
    messages = together(lambda: wait_in(boards[1], "barrier"), lambda: wait_in(boards[2], "barrier"))
    assert messages[0] == messages[1]
    assert messages[0].startswith("barrier was joined by ranks 1 (b), 2 (c) but not by rank 0 (a) within 0.2 s")
    with pytest.raises(RuntimeError, match="barrier was joined by"):  # the missing rank, where it waits next
        Region(boards[0], "fit", busy=False).__enter__()
    with Region(boards[0], "save", busy=True):  # but it may still save
        pass


def test_ranks_in_different_operations(ranks):
    boards = ranks(2).boards
    messages = together(lambda: wait_in(boards[0], "evaluate"), lambda: wait_in(boards[1], "fit"))
    assert messages[0] == messages[1]
    assert "waits in" in messages[0]


def test_waiting_for_a_busy_rank(ranks):
    boards = ranks(2).boards
    done = threading.Event()

    def busy():
        with Region(boards[1], "save", busy=True):
            assert done.wait(30)

    def patient():
        with Region(boards[0], "barrier", busy=False):
            released = boards[0].group.aborted.wait(1.0)  # five deadlines
            done.set()
            return released

    assert together(busy, patient)[1] is False
    assert boards[0].verdict is None


def test_a_rank_that_ends_with_an_exception(ranks):
    made = ranks(2, deadline=30.0)
    board = made.boards[0]

    def leave():
        made.calls[1].close("ValueError: bad data")
        with board.news:
            assert board.news.wait_for(lambda: board.gone, 10)
        board.group.aborted.set()  # as Horovod does

    message = together(lambda: wait_in(board, "fit"), leave)[0]
    assert message == (
        "rank 1 (b) ended with ValueError: bad data while rank 0 (a) waited in fit; its own traceback tells why"
    )


def test_a_connection_that_breaks(ranks):
    made = ranks(3, deadline=30.0)

    def leave():
        made.calls[1]._chief.sock.shutdown(socket.SHUT_RDWR)  # as when the process is killed
        for board in (made.boards[0], made.boards[2]):
            with board.news:
                assert board.news.wait_for(lambda b=board: b.gone, 10)
            board.group.aborted.set()

    messages = together(leave, lambda: wait_in(made.boards[0], "fit"), lambda: wait_in(made.boards[2], "fit"))
    assert messages[1].startswith("rank 1 (b) ended while rank 0 (a) waited in fit")
    assert messages[2].startswith("rank 1 (b) ended while rank 2 (c) waited in fit")


def test_a_stranger_is_shut_out(ranks):
    made = ranks(2, deadline=30.0)
    for message in (b'{"kind": "hello", "rank": 1, "token": "guess"}\n', b"GET / HTTP/1.1\r\n\r\n", b"[1]\n"):
        with socket.create_connection(made.place, timeout=10) as stranger:
            stranger.sendall(message)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(10) == b""
    assert made.boards[0].gone == {}
    assert made.calls[0]._thread.is_alive()


def test_errors_of_the_user_pass_unchanged(ranks):
    board = ranks(2).boards[0]
    with pytest.raises(KeyError, match="mine"), Region(board, "fit", busy=False):
        raise KeyError("mine")
    assert board.state().path == ()


def test_state():
    board = Board(Group(0, 2), 60.0)
    with Region(board, "fit", busy=False), Region(board, "step", busy=False):
        assert board.state().path == ("fit", "step")
        assert not board.state().busy
        with Region(board, "save", busy=True):
            assert board.state().busy
            assert board.innermost() is None
        assert board.innermost().what == "step"
    assert isinstance(board.state(), State)
    assert board.state().path == ()


def test_without_a_group_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(watch, "_board", None)
    with watch.waiting("a"), watch.busy("b"):
        pass


def test_a_graph_enters_only_what_nothing_else_guards(monkeypatch):
    board = Board(Group(0, 2), 60.0)
    monkeypatch.setattr(watch, "_board", board)
    region = watch.in_graph("all_reduce 'x'")
    region.enter()
    assert board.state().path == ("all_reduce 'x'",)
    region.leave()
    with watch.waiting("fit"):
        region.enter()
        assert board.state().path == ("fit",)
        region.leave()
    assert board.state().path == ()


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_deadline_refused(monkeypatch, text):
    monkeypatch.setenv("TFDIST_DEADLINE", text)
    with pytest.raises(ValueError, match=f"TFDIST_DEADLINE is '{text}'"):
        watch.deadline()


def test_deadline(monkeypatch):
    monkeypatch.delenv("TFDIST_DEADLINE", raising=False)
    assert watch.deadline() == 60.0
    board = Board(Group(0, 2), 60.0)
    monkeypatch.setattr(watch, "_board", board)
    watch.set_deadline(2)
    assert watch.deadline() == 2.0
    assert board.deadline == 2.0
    monkeypatch.setenv("TFDIST_DEADLINE", "inf")
    assert watch.deadline() == float("inf")
    with pytest.raises(ValueError, match="set_deadline is 0"):
        watch.set_deadline(0)


def test_the_last_resort(monkeypatch, capsys):
    """A main thread that nothing releases is ended with the process."""
    left = threading.Event()
    monkeypatch.setattr(rollcall, "RELEASE_SECONDS", 0.05)
    monkeypatch.setattr(rollcall.os, "_exit", lambda code: left.set())
    board = Board(Group(0, 1), 30.0)
    call = RollCall(board, "token", None, None)
    with Region(board, "barrier", busy=False):
        call._stop("barrier was joined by nobody")
        assert left.wait(10)
    call.close()
    assert "barrier was joined by nobody" in capsys.readouterr().err


def test_a_line_in_pieces():
    one, other = socket.socketpair()
    line = Line.__new__(Line)
    line.sock, line._rest = other, b""
    text = json.dumps({"kind": "ask"}).encode() + b"\n"
    one.sendall(text[:5])
    assert line.receive() == []
    one.sendall(text[5:] + text)
    assert line.receive() == [{"kind": "ask"}] * 2
    one.close()
    assert line.receive() is None
    other.close()


def test_time_goes_by():
    board = Board(Group(0, 2), 60.0)
    before = time.monotonic()
    with Region(board, "fit", busy=False):
        assert 0 <= board.state().seconds <= time.monotonic() - before
