"""What the launcher shows: the ranks' merged output, and who is blamed for a failure."""

from dataclasses import replace

import pytest

from tfdist.launch import verdict
from tfdist.launch.output import HOLD_SECONDS, Merger, last_state
from tfdist.launch.rundir import Failure


class Screen:
    """Feeds a Merger and keeps what it wrote."""

    def __init__(self, ranks=3):
        self.merger = Merger([str(rank) for rank in range(ranks)])
        self.text = ""

    def feed(self, rank, data, now=0.0, stream="out"):
        self.text += "".join(t for _, t in self.merger.feed(rank, stream, data, now))

    def tick(self, now):
        self.text += "".join(t for _, t in self.merger.tick(now))

    def end(self):
        self.text += "".join(t for _, t in self.merger.end())
        return self.text


class TestOutput:
    def test_rank_0_is_raw_the_others_carry_their_rank(self):
        screen = Screen()
        screen.feed(0, b"epoch 1\n")
        screen.feed(1, b"load\nmore\n")
        screen.feed(2, b"x\n")
        assert screen.end() == "epoch 1\n[1] load\n[1] more\n[2] x\n"

    def test_lines_in_pieces(self):
        screen = Screen()
        for piece in (b"lo", b"ad", b"\nne", b"xt"):
            screen.feed(1, piece)
        assert screen.text == "[1] load\n"
        assert screen.end() == "[1] load\n[1] next\n"

    def test_a_progress_bar_of_rank_0_passes_byte_by_byte(self):
        screen = Screen()
        for piece in (b"1/3 [>..]", b"\b" * 9 + b"\r", b"2/3 [=>.]"):
            screen.feed(0, piece)
        assert screen.text == "1/3 [>..]" + "\b" * 9 + "\r2/3 [=>.]"

    def test_of_other_ranks_progress_bars_the_last_state_stays(self):
        screen = Screen()
        screen.feed(1, b"1/3 [>..]" + b"\b" * 9 + b"\r2/3 [=>.]\r")
        screen.feed(1, b"3/3\r\n")
        assert screen.end() == "[1] 3/3 [=>.]\n"
        assert last_state("abc\r\n".rstrip("\n")) == "abc"

    def test_a_line_of_rank_0_is_not_broken_for_another_ranks(self):
        screen = Screen()
        screen.feed(0, b"loss: ")
        screen.feed(1, b"hello\n", now=1.0)
        screen.tick(1.0 + HOLD_SECONDS / 2)
        screen.feed(0, b"0.5\n", now=1.1)
        assert screen.end() == "loss: 0.5\n[1] hello\n"

    def test_but_a_bar_that_never_ends_is(self):
        screen = Screen()
        screen.feed(0, b"1/3")
        screen.feed(1, b"hello\n", now=1.0)
        assert screen.merger.waiting(1.0) == pytest.approx(HOLD_SECONDS)
        screen.feed(0, b"\r2/3", now=1.1)
        screen.tick(1.0 + HOLD_SECONDS)
        screen.feed(0, b"\r3/3\n", now=2.0)
        assert screen.end() == "1/3\r2/3\n[1] hello\n\r3/3\n"
        assert screen.merger.waiting(2.0) is None

    def test_characters_cut_in_two(self):
        screen = Screen()
        data = "Schlüß\n".encode()
        for rank in (0, 1):
            for i in range(len(data)):
                screen.feed(rank, data[i : i + 1])
        assert screen.end() == "Schlüß\n[1] Schlüß\n"

    def test_start_up_notes_come_from_rank_0_only(self):
        notes = (
            b"WARNING: All log messages before absl::InitializeLog() is called are written to "
            b"STDERR\nI0000 00:00:1795959955.985464    6036 port.cc:153] oneDNN custom operations "
            b"are on.\n"
        )
        screen = Screen()
        screen.feed(0, notes, stream="err")
        screen.feed(1, notes + b"WARNING: mine\n", stream="err")
        assert screen.end() == notes.decode() + "[1] WARNING: mine\n"

    def test_the_tail_of_stderr_is_kept(self):
        screen = Screen()
        screen.feed(0, b"to stdout\n")
        screen.feed(0, b"a\nb", stream="err")
        screen.feed(1, b"c\n", stream="err")
        screen.end()
        assert [list(tail) for tail in screen.merger.tails.values()] == [["a", "b"], ["c"], []]


def failure(rank, at, **changes):
    base = Failure(rank, f"node{rank}", 100 + rank, 1, at, ("ValueError", "Exception"), "bad")
    return replace(base, **changes)


class TestVerdict:
    def test_the_earliest(self):
        assert verdict.culprit([failure(0, 2.0), failure(1, 1.0)]).rank == 1
        assert verdict.culprit([]) is None

    @pytest.mark.parametrize(
        "consequence",
        [
            {"kind": ("HorovodInternalError", "RuntimeError")},
            {"kind": ("UnknownError",), "message": "Horovod has been shut down. This was caused"},
            {"message": "[gloo/transport/tcp/pair.cc:589] Connection closed by peer [10.0.0.1]"},
            {"kind": (), "told": True, "signal": 15, "code": 143},
        ],
    )
    def test_a_consequence_is_not_blamed_even_if_it_comes_first(self, consequence):
        victim = failure(0, 1.0, **consequence)
        killed = failure(1, 2.0, kind=(), message="", signal=9, code=137)
        assert verdict.culprit([victim, killed]) is killed

    def test_headlines(self):
        killed = failure(1, 0, kind=(), message="", signal=9, code=137)
        assert verdict.headline(killed).startswith(
            "rank 1 on node1 (pid 101) was killed by signal 9 (SIGKILL)"
        )
        aborted = failure(1, 0, kind=(), message="", signal=6, code=134)
        assert verdict.headline(aborted).endswith("by signal 6 (SIGABRT).")
        left = failure(1, 0, kind=("SystemExit",), message="3", code=3)
        assert verdict.headline(left) == "rank 1 on node1 (pid 101) left with exit code 3."
        said = failure(1, 0, kind=("SystemExit",), message="no data", code=1)
        assert verdict.headline(said).endswith("left with exit code 1: no data.")
        hard = failure(1, 0, kind=(), message="", code=5)
        assert "exit code 5, without a Python exception" in verdict.headline(hard)
        assert verdict.headline(failure(1, 0)).endswith("failed: ValueError: bad")

    def test_the_culprits_traceback_is_last(self):
        victim = failure(0, 1.0, kind=("HorovodInternalError",), traceback="Traceback of victim")
        first = failure(1, 2.0, traceback="Traceback ...\nValueError: bad\n")
        quiet = failure(2, 3.0, told=True, kind=(), signal=15)
        text = verdict.report([first, victim, quiet])
        assert text.endswith("Traceback of rank 1:\nTraceback ...\nValueError: bad")
        assert text.splitlines()[1].startswith("  rank 0 on node0")
        assert "Traceback of victim" not in text
        assert "rank 2" not in text

    def test_many_ranks_fail_in_a_few_lines(self):
        text = verdict.report([failure(rank, rank, traceback="T") for rank in range(64)])
        assert len(text.splitlines()) < 15
        assert "and 55 more ranks" in text
