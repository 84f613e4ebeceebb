"""What each stage does when: properties of the schedules, the theory's formulas, and the drawing in schedule.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.planner import schedule
from tfdist.planner.schedule import Step, gpipe, live, one_forward_one_backward, order_of, simulate

STAGES, MICROS = st.integers(1, 6), st.integers(1, 12)
NAMES = st.sampled_from(sorted(schedule.SCHEDULES))
TIMES = st.lists(st.integers(0, 20).map(float), min_size=6, max_size=6)


@given(NAMES, STAGES, MICROS)
def test_every_micro_batch_goes_forth_and_back_once_on_every_stage(name, stages, micros):
    for steps in order_of(name, stages, micros):
        assert sorted(s.micro for s in steps if not s.backward) == list(range(micros))
        assert sorted(s.micro for s in steps if s.backward) == list(range(micros))
        for i in range(micros):
            assert steps.index(Step(False, i)) < steps.index(Step(True, i))


@given(NAMES, STAGES, MICROS, TIMES, TIMES, TIMES)
def test_no_step_waits_for_ever_or_begins_too_early(name, stages, micros, forward, backward, transfer):
    line = simulate(order_of(name, stages, micros), forward[:stages], backward[:stages], transfer[: stages - 1])
    at = {(t.stage, t.step): t for t in line.steps}
    assert len(at) == 2 * stages * micros
    for (stage, step), timed in at.items():
        if step.backward:
            assert timed.start >= at[stage, Step(False, step.micro)].end
            if stage < stages - 1:
                assert timed.start >= at[stage + 1, step].end + transfer[stage]
        elif stage:
            assert timed.start >= at[stage - 1, step].end + transfer[stage - 1]
    for stage in range(stages):
        mine = [t for t in line.steps if t.stage == stage]
        for one, other in zip(mine, mine[1:], strict=False):
            assert one.end <= other.start


@given(NAMES, STAGES, MICROS)
def test_even_stages_wait_for_p_minus_1_steps(name, stages, micros):
    line = simulate(order_of(name, stages, micros), [1.0] * stages, [2.0] * stages)
    assert line.seconds == pytest.approx(3.0 * (micros + stages - 1))
    assert line.bubble == pytest.approx((stages - 1) / (micros + stages - 1))


@given(STAGES, MICROS, TIMES, TIMES)
def test_gpipe_takes_the_sum_and_the_slowest_stage_for_each_further_micro_batch(stages, micros, forward, backward):
    forward, backward = forward[:stages], backward[:stages]
    line = simulate(gpipe(stages, micros), forward, backward)
    theory = sum(forward) + (micros - 1) * max(forward) + sum(backward) + (micros - 1) * max(backward)
    assert line.seconds == pytest.approx(theory)


@given(STAGES, MICROS)
def test_what_is_kept_alive(stages, micros):
    assert live(gpipe(stages, micros)) == (micros,) * stages
    assert live(one_forward_one_backward(stages, micros)) == tuple(min(stages - s, micros) for s in range(stages))


def test_the_drawing():
    """With backwards as long as forwards: what schedule.py shows."""

    def row(order, stage):
        line = simulate(order, [1.0] * 4, [1.0] * 4)
        drawn = [" "] * round(line.seconds)
        for timed in line.steps:
            if timed.stage == stage:
                names = "ABCDEFGH" if timed.step.backward else "01234567"
                drawn[round(timed.start)] = names[timed.step.micro]
        return "".join(drawn)

    for stage in range(4):
        left, right = row(gpipe(4, 8), stage), row(one_forward_one_backward(4, 8), stage)
        shown = f" {stage} | {left}   {stage} | {right}".rstrip()
        assert any(line.endswith(shown) for line in schedule.__doc__.splitlines()), shown


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="schedule is 'zb', expected one of: 1f1b, gpipe"):
        order_of("zb", 2, 2)
    with pytest.raises(ValueError, match="at least one stage and one micro-batch, got 2 and 0"):
        order_of("gpipe", 2, 0)
    with pytest.raises(ValueError, match="2 stages needs 2 forward and backward times and 1 transfers, got 1, 2 and 1"):
        simulate(gpipe(2, 2), [1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(((Step(True, 0), Step(False, 0)),), [1.0], [1.0])
