"""Where a model is cut: against a brute force over drawn models, and cases by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.planner.partition import Unit, best_cut, bounds_of, describe


def chain(*seconds, out_bytes=0):
    return [Unit(f"u{i}", s, 0.0, 1, 1, (i - 1,) if i else (), out_bytes) for i, s in enumerate(seconds)]


@st.composite
def models(draw):
    """Up to ten units, each fed by any of those before it."""
    units = []
    for i in range(draw(st.integers(1, 10))):
        needs = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        forward, backward, fixed, kept, out = (draw(st.integers(0, 50)) for _ in range(5))
        units.append(Unit(f"u{i}", forward / 20, backward / 20, fixed, kept, tuple(sorted(needs)), out))
    return units


def all_cuts(count, stages):
    for inner in itertools.combinations(range(1, count), stages - 1):
        yield (0, *inner, count)


def cost_by_hand(units, start, stop, live, speed):
    """Seconds, memory and arriving bytes of one stage, from the definition."""
    stage = range(start, stop)
    crossing = {need for i in stage for need in units[i].needs if need < start}
    arriving = sum(units[i].out_bytes for i in crossing)
    seconds = sum(units[i].forward + units[i].backward for i in stage) + 2 * arriving / speed
    return seconds, sum(units[i].fixed_bytes + live * units[i].live_bytes for i in stage), arriving


@given(models(), st.integers(1, 5), st.data())
def test_the_best_of_all_cuts(units, stages, data):
    stages = min(stages, len(units))
    live = data.draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    memory = data.draw(st.sampled_from([math.inf, 400, 200]))
    speed = data.draw(st.sampled_from([math.inf, 100.0, 5.0]))
    by = data.draw(st.sampled_from(["seconds", "memory"]))
    found = {}
    for bounds in all_cuts(len(units), stages):
        parts = [
            cost_by_hand(units, a, b, n, speed) for a, b, n in zip(bounds, bounds[1:], live, strict=False)
        ]
        if all(part[1] <= memory for part in parts):
            found[bounds] = (max(part[by == "memory"] for part in parts), sum(part[2] for part in parts), parts)
    if not found:
        with pytest.raises(ValueError, match="no cut into"):
            best_cut(units, stages, live, memory, speed, by)
        return
    cut = best_cut(units, stages, live, memory, speed, by)
    pace = min(cost for cost, _, _ in found.values())
    assert max(cut.stage_bytes if by == "memory" else cut.seconds) == pytest.approx(pace)
    least = min(arriving for cost, arriving, _ in found.values() if cost <= pace * (1 + 1e-9))
    assert sum(cut.arriving) == least
    parts = found[cut.bounds][2]
    assert cut.seconds == pytest.approx([part[0] for part in parts])
    assert [*cut.stage_bytes] == [part[1] for part in parts]
    assert [*cut.arriving] == [part[2] for part in parts]


@given(models(), st.integers(1, 5))
def test_m7_stages_cover_all_units_once_and_none_is_empty(units, stages):
    stages = min(stages, len(units))
    cut = best_cut(units, stages)
    assert (cut.bounds[0], cut.bounds[-1]) == (0, len(units))
    assert len(cut.counts) == stages
    assert all(count > 0 for count in cut.counts)


def test_m4_six_to_one_on_two_devices():
    assert best_cut(chain(6, 5, 4, 3, 2, 1), 2).counts == (2, 4)


def test_a_cut_goes_where_little_crosses():
    """Both cuts are even in time; over the second go 10 bytes, over the first 1,000."""
    units = [Unit("a", 1.0, out_bytes=1000), Unit("b", 0.0, needs=(0,), out_bytes=10), Unit("c", 1.0, needs=(1,))]
    assert best_cut(units, 2).bounds == (0, 2, 3)
    # Where transfers take time, an uneven cut can be the faster one.
    units = [Unit("a", 1.0, out_bytes=10), Unit("b", 1.0, needs=(0,), out_bytes=1000), Unit("c", 1.5, needs=(1,))]
    assert best_cut(units, 2).bounds == (0, 2, 3)
    assert best_cut(units, 2, bytes_per_second=1000).bounds == (0, 1, 3)


def test_a_skip_over_two_cuts_arrives_where_it_is_used():
    units = [
        Unit("a", 1, out_bytes=7),
        Unit("b", 1, needs=(0,), out_bytes=5),
        Unit("c", 1, needs=(1,), out_bytes=3),
        Unit("d", 1, needs=(2, 0)),
    ]
    assert describe(units, (0, 1, 2, 3, 4)).arriving == (0, 7, 5, 10)
    assert describe(units, (0, 2, 4)).arriving == (0, 12)


def test_first_stages_keep_more_micro_batches_and_get_less_to_keep():
    units = [Unit(f"u{i}", 1.0, live_bytes=10) for i in range(6)]
    assert best_cut(units, 3).counts == (2, 2, 2)
    assert best_cut(units, 3, live=(3, 2, 1), memory=45).counts == (1, 2, 3)
    assert max(best_cut(units, 3, live=(3, 2, 1), by="memory").stage_bytes) == 40


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="3 operations cannot be cut into 4 stages"):
        best_cut(chain(1, 1, 1), 4)
    with pytest.raises(ValueError, match="cannot be cut into 0 stages"):
        best_cut(chain(1, 1, 1), 0)
    with pytest.raises(ValueError, match=r"keeps within 3 bytes a device: the best one needs 4\."):
        best_cut(chain(1, 1, 1, 1), 2, memory=3)
    with pytest.raises(ValueError, match="must all come before it"):
        best_cut([Unit("a", needs=(1,)), Unit("b")], 1)
    with pytest.raises(ValueError, match="negative cost"):
        best_cut([Unit("a", forward=-1.0)], 1)
    with pytest.raises(ValueError, match="live has 1 entries for 2 stages"):
        best_cut(chain(1, 1), 2, live=(1,))
    with pytest.raises(ValueError, match="by is 'time', expected 'seconds' or 'memory'"):
        best_cut(chain(1, 1), 2, by="time")
    for bounds in ((0, 1), (0, 1, 1, 3), (1, 3), (0, 2, 1, 3)):
        with pytest.raises(ValueError, match="expected rising numbers from 0 to 3"):
            describe(chain(1, 1, 1), bounds)
    assert bounds_of([1, 2]) == (0, 1, 3)


def test_a_model_of_a_thousand_units_takes_seconds():
    units = [Unit(f"u{i}", 1.0 + i % 7, 0.0, 1, 1, (i - 1,) if i else (), 8) for i in range(1000)]
    cut = best_cut(units, 8, bytes_per_second=1e6)
    assert max(cut.seconds) < 1.02 * sum(unit.seconds for unit in units) / 8
