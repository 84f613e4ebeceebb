"""Whether an operation can still complete, from what every rank is doing."""

from __future__ import annotations

import pytest

from tfdist.comm.verdict import State, compatible, ended, judge

HOSTS = ("a", "b", "c")


def state(*path, busy=False, seconds=70.0):
    return State(path, busy, seconds)


def asked(*states, reporter=0, deadline=60.0):
    return judge(reporter, dict(enumerate(states)), HOSTS, deadline)


def test_a_rank_in_user_code_is_missing():
    assert asked(state("evaluate 'm'"), state()) == (
        "evaluate 'm' was joined by rank 0 (a) but not by rank 1 (b) within 60 s: rank 1 is in user code. "
        "Every rank must call it; set TFDIST_DEADLINE (seconds) to wait longer"
    )


def test_all_missing_ranks_are_named():
    message = asked(state(), state("barrier"), state("fit 'm'"), reporter=1, deadline=2.5)
    assert message.startswith(
        "barrier was joined by rank 1 (b) but not by ranks 0 (a), 2 (c) within 2.5 s: "
        "rank 0 is in user code; rank 2 waits in fit 'm'."
    )


def test_a_rank_that_does_not_answer_is_missing():
    assert "rank 1 ended or does not answer" in asked(state("barrier"), None)


def test_ranks_that_part_inside_one_operation():
    message = asked(state("fit", "step", "all_reduce 'x'"), state("fit", "step", "all_gather 'y'"))
    assert "fit > step > all_reduce 'x' was joined by rank 0 (a)" in message
    assert "rank 1 waits in fit > step > all_gather 'y'" in message


@pytest.mark.parametrize(
    "other",
    [
        state("evaluate 'm'"),  # there, only slow
        state("evaluate 'm'", "all_reduce 'x'"),  # further inside
        state("save", busy=True),  # all wait for it
        state("evaluate 'm'", "save", busy=True),
        state(seconds=10.0),  # came out of something else a moment ago
        state("fit 'm'", seconds=10.0),
    ],
)
def test_going_on(other):
    assert asked(state("evaluate 'm'"), other) is None


def test_one_busy_rank_excuses_all():
    assert asked(state("barrier"), state(), state("save", busy=True)) is None


def test_the_reporter_went_on():
    assert asked(state(), state()) is None
    assert asked(state("save", busy=True), state()) is None


def test_compatible():
    assert compatible(("a",), ("a", "b"))
    assert not compatible((), ("a",))
    assert not compatible(("a", "b"), ("a", "c"))


def test_ended():
    assert ended(1, "ValueError: bad", 0, HOSTS, "fit 'm'") == (
        "rank 1 (b) ended with ValueError: bad while rank 0 (a) waited in fit 'm'; its own traceback tells why"
    )
    assert ended(1, "", 0, HOSTS, "fit 'm'").endswith("which every rank must call")
