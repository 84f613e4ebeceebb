"""What each stage does when: properties of the schedules, the theory's formulas, and the drawing in schedule.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.planner import schedule
from tfdist.planner.layout import Layout, chain, grouped, layout_of
from tfdist.planner.schedule import Step, before, gpipe, live, one_forward_one_backward, order_of
from tfdist.planner.timeline import simulate

STAGES, MICROS = st.integers(1, 6), st.integers(1, 12)
NAMES = st.sampled_from(sorted(schedule.SCHEDULES))
TIMES = st.lists(st.integers(0, 20).map(float), min_size=6, max_size=6)
DEVICES = st.lists(st.integers(0, 2), min_size=1, max_size=10)


@st.composite
def networks(draw):
    """(device, needs) of operations; all devices up to the highest are used, and the last operation ends all."""
    devices = draw(DEVICES)
    numbers = {device: i for i, device in enumerate(sorted(set(devices)))}
    needs = [tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else () for i in range(len(devices))]
    used = {n for mine in needs for n in mine}
    needs[-1] = tuple(sorted({*needs[-1], *(i for i in range(len(devices) - 1) if i not in used)}))
    return [numbers[d] for d in devices], needs


@st.composite
def layouts(draw):
    devices, needs = draw(networks())
    stages = grouped(devices, needs)
    return layout_of(stages, [devices[s[0]] for s in stages], needs)


@given(NAMES, layouts(), MICROS)
def test_every_micro_batch_goes_forth_and_back_once_on_every_stage(name, layout, micros):
    order = order_of(name, layout, micros)
    assert len(order) == layout.width
    steps = [step for lane in order for step in lane]
    every = {Step(s, b, m) for s in range(layout.stages) for b in (False, True) for m in range(micros)}
    assert len(steps) == len(every)
    assert set(steps) == every
    for lane, mine in enumerate(order):
        assert {layout.lanes[step.stage] for step in mine} == {lane}


@given(NAMES, layouts(), MICROS, st.data())
def test_no_step_waits_for_ever_or_begins_too_early(name, layout, micros, data):
    numbers = st.integers(0, 20).map(float)
    forward, backward = ([data.draw(numbers) for _ in range(layout.stages)] for _ in range(2))
    wires = {(n, s): data.draw(numbers) for s, needs in enumerate(layout.needs) for n in needs}
    line = simulate(layout, order_of(name, layout, micros), forward, backward, wires)
    at = {t.step: t for t in line.steps}
    assert len(at) == 2 * layout.stages * micros
    for step, timed in at.items():
        assert timed.end - timed.start == pytest.approx((backward if step.backward else forward)[step.stage])
        for need in before(layout, step):
            ends = sorted((need.stage, step.stage))
            assert timed.start >= at[need].end + wires.get(tuple(ends), 0.0)
    for lane in range(layout.width):
        mine = [t for t in line.steps if layout.lanes[t.step.stage] == lane and t.end > t.start]
        for one, other in zip(mine, mine[1:], strict=False):
            assert one.end <= other.start


@given(STAGES, MICROS)
def test_1f1b_is_the_known_one_on_a_chain(stages, micros):
    """As the papers give it: a stage is as many forwards ahead as stages come after it."""
    for stage, steps in enumerate(one_forward_one_backward(chain(stages), micros)):
        ahead = min(stages - stage - 1, micros)
        known = [(False, i) for i in range(ahead)]
        for i in range(micros):
            known += [(False, i + ahead)] * (i + ahead < micros) + [(True, i)]
        assert [(step.backward, step.micro) for step in steps] == known


@given(NAMES, STAGES, MICROS)
def test_even_stages_wait_for_p_minus_1_steps(name, stages, micros):
    line = simulate(chain(stages), order_of(name, chain(stages), micros), [1.0] * stages, [2.0] * stages)
    assert line.seconds == pytest.approx(3.0 * (micros + stages - 1))
    assert line.bubble == pytest.approx((stages - 1) / (micros + stages - 1))


@given(STAGES, MICROS, TIMES, TIMES)
def test_gpipe_takes_the_sum_and_the_slowest_stage_for_each_further_micro_batch(stages, micros, forward, backward):
    forward, backward = forward[:stages], backward[:stages]
    line = simulate(chain(stages), gpipe(chain(stages), micros), forward, backward)
    theory = sum(forward) + (micros - 1) * max(forward) + sum(backward) + (micros - 1) * max(backward)
    assert line.seconds == pytest.approx(theory)


@given(STAGES, MICROS, layouts())
def test_what_is_kept_alive(stages, micros, layout):
    assert live(gpipe(chain(stages), micros)) == (micros,) * stages
    found = live(one_forward_one_backward(chain(stages), micros))
    assert found == tuple(min(stages - s, micros) for s in range(stages))
    branched = live(one_forward_one_backward(layout, micros))
    assert all(kept <= min(depth, micros) for kept, depth in zip(branched, layout.depths, strict=True))


def test_branches_on_two_devices_run_side_by_side():
    """stem, then two branches of one moment each, then what joins them: 1 + 1 + 1 forwards, as many back."""
    needs = [(), (0,), (0,), (1,), (2,), (3, 4)]
    devices = [0, 0, 1, 0, 1, 0]
    stages = grouped(devices, needs)
    assert stages == [(0,), (1, 3), (2, 4), (5,)]
    layout = layout_of(stages, [devices[s[0]] for s in stages], needs)
    assert layout == Layout((0, 0, 1, 0), ((), (0,), (0,), (1, 2)))
    line = simulate(layout, one_forward_one_backward(layout, 1), [1.0] * 4, [1.0] * 4)
    assert line.seconds == 6.0
    starts = {(t.step.stage, t.step.backward): t.start for t in line.steps}
    assert starts[1, False] == starts[2, False] == 1.0
    assert starts[1, True] == starts[2, True] == 4.0


@given(networks())
def test_stages_of_devices_cover_all_once_in_an_order_that_can_be_computed(network):
    devices, needs = network
    stages = grouped(devices, needs)
    assert sorted(p for stage in stages for p in stage) == list(range(len(devices)))
    for stage in stages:
        assert len({devices[p] for p in stage}) == 1
    layout_of(stages, [devices[s[0]] for s in stages], needs)  # raises where a stage needs a later one


def test_a_row_of_layers_stays_one_stage_a_device():
    assert grouped([0, 0, 1, 1, 2], [(), (0,), (1,), (2, 0), (3,)]) == [(0, 1), (2, 3), (4,)]


def test_the_drawing():
    """With backwards as long as forwards: what schedule.py shows."""

    def row(order, stage):
        line = simulate(chain(4), order, [1.0] * 4, [1.0] * 4)
        drawn = [" "] * round(line.seconds)
        for timed in line.steps:
            if timed.step.stage == stage:
                names = "ABCDEFGH" if timed.step.backward else "01234567"
                drawn[round(timed.start)] = names[timed.step.micro]
        return "".join(drawn)

    for stage in range(4):
        left, right = (row(SCHEDULE(chain(4), 8), stage) for SCHEDULE in (gpipe, one_forward_one_backward))
        shown = f" {stage} | {left}   {stage} | {right}".rstrip()
        assert any(line.endswith(shown) for line in schedule.__doc__.splitlines()), shown


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="schedule is 'zb', expected one of: 1f1b, gpipe"):
        order_of("zb", chain(2), 2)
    with pytest.raises(ValueError, match="at least one micro-batch, got 0"):
        order_of("gpipe", chain(2), 0)
    with pytest.raises(ValueError, match="stage 0 needs .1,., expected stages before it"):
        Layout((0, 1), ((1,), ()))
    with pytest.raises(ValueError, match="2 stages on 2 devices need 2 forward and backward times"):
        simulate(chain(2), gpipe(chain(2), 2), [1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(chain(1), ((Step(0, True, 0), Step(0, False, 0)),), [1.0], [1.0])
