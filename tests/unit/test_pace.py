"""How long steps take, with a clock that the test sets."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.planner.outlook import Measured
from tfdist.trainers import pace as room
from tfdist.trainers.pace import Pace


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(room.time, "perf_counter", lambda: now[0])
    return now


def train(pace, step, clock, starts):
    for start in starts:
        clock[0] = start
        step()


def test_the_median_of_steps_without_the_first_and_without_what_is_between_epochs(clock):
    pace = Pace()
    step = pace.watched(lambda: pace.saw(tf.constant(64)), 1)
    pace.begin()
    assert pace.measured() is None
    for began in (0.0, 100.0, 200.0):
        pace.pause()
        # The first call traces, for 30 s in the first epoch.
        train(pace, step, clock, [began, began + (30 if not began else 1), *(began + 40 + 2 * i for i in range(4))])
    # Left out: 0 to 30, and what is between epochs. Left: 10, 2, 2, 2; 1, 39, 2, 2, 2; 1, 39, 2, 2, 2.
    assert pace.measured() == Measured(2.0, 64, 14)


def test_a_call_of_several_steps(clock):
    pace = Pace()
    step = pace.watched(lambda: None, 4)
    pace.saw(32)
    train(pace, step, clock, [0, 8, 10, 12])
    assert pace.measured() == Measured(0.5, 32, 8)


def test_a_short_last_batch_is_not_the_batch(clock):
    pace = Pace()
    step = pace.watched(lambda rows: pace.saw(rows), 1)
    for i, rows in enumerate([64, 64, 64, 7]):
        clock[0] = float(i)
        step(rows)
    assert pace.measured() == Measured(1.0, 64, 2)


def test_a_new_fit_begins_anew(clock):
    pace = Pace()
    step = pace.watched(lambda: pace.saw(64), 1)
    train(pace, step, clock, [0, 1, 2, 3])
    pace.begin()
    assert pace.measured() is None
    again = pace.watched(lambda: pace.saw(16), 1)
    train(pace, again, clock, [10, 15, 18, 21])
    assert pace.measured() == Measured(3.0, 16, 2)


def test_what_the_function_gives_and_raises_comes_through(clock):
    assert Pace().watched(lambda a, b: a + b, 1)(1, b=2) == 3
    with pytest.raises(StopIteration):
        Pace().watched(lambda: next(iter(())), 1)()
