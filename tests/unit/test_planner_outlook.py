"""What a plan brings, against figures worked out by hand; its text, and its picture."""

from __future__ import annotations

import dataclasses
import math
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tfdist.planner import picture, telling
from tfdist.planner.amounts import read_bytes, told_bytes, told_rate, told_seconds
from tfdist.planner.outlook import Held, Measured, Setting
from tfdist.planner.partition import Unit
from tfdist.planner.plan import Plan, StagePlan
from tfdist.planner.predict import predict

COUNTS, SECONDS = st.integers(0, 10**9), st.integers(0, 1000).map(lambda n: n / 1000)
AN_AMOUNT = r"-?[\d,.]+ (?:B|kB|MB|GB|TB|us|ms|s)\b"


@st.composite
def models(draw):
    """(units, held, plan, setting): any graph of operations, cut in a row."""
    count = draw(st.integers(2, 8))
    units = []
    for i in range(count):
        needs = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=2)))) if i else ()
        live, out = draw(COUNTS), draw(COUNTS)
        units.append(Unit(f"op{i}", draw(SECONDS), draw(SECONDS), 0, live, needs, out))
    held = [Held(*(draw(COUNTS) for _ in range(4))) for _ in range(count)]
    stages = draw(st.integers(2, min(count, 4)))
    ends = [0, *sorted(draw(st.sets(st.integers(1, count - 1), min_size=stages - 1, max_size=stages - 1))), count]
    plans = [StagePlan(s, tuple(u.name for u in units[ends[s] : ends[s + 1]])) for s in range(stages)]
    devices = stages + draw(st.integers(0, 1))  # one may have nothing to do
    micros = draw(st.integers(1, 9))
    samples = draw(st.integers(1, 50))
    batch = draw(st.integers((samples - 1) * micros + 1, samples * micros))
    setting = Setting(
        tuple(f"GPU:{i}" for i in range(devices)),
        draw(st.sampled_from(["1f1b", "gpipe"])),
        micros,
        batch,
        samples,
        draw(st.sampled_from([1e6, 1e9, math.inf])),
        draw(st.booleans()),
    )
    return units, held, Plan("model", tuple(plans)), setting


@given(models())
def test_stages_cost_what_their_operations_cost(model):
    units, held, plan, setting = model
    report = predict(units, held, plan, setting, [len(units) - 1])
    numbers = {unit.name: i for i, unit in enumerate(units)}
    count = len(plan.stages)
    for number, (stage, planned) in enumerate(zip(report.stages, plan.stages, strict=True)):
        mine = [numbers[name] for name in planned.operations]
        assert (stage.device, stage.operations) == (number, planned.operations)
        assert stage.forward == pytest.approx(sum(units[i].forward for i in mine))
        assert stage.backward == pytest.approx(sum(units[i].backward for i in mine))
        assert stage.held.parameters == sum(held[i].parameters for i in mine)
        four = sum(held[i].weights + held[i].gradients + held[i].slots for i in mine)
        made = sum(units[i].live_bytes for i in mine)
        came = {
            (stage_of(plan, units[made_by].name), made_by)
            for i in mine
            for made_by in units[i].needs
            if made_by not in mine
        }
        by_stage = {s: sum(units[i].out_bytes for t, i in came if t == s) for s, _ in came}
        assert dict(stage.arriving) == by_stage
        # Where the operations hang together in a row of stages, a stage is as many ahead as come after it.
        assert 1 <= stage.live <= (setting.microbatches if setting.schedule == "gpipe" else count - number)
        assert stage.again == (setting.recompute and stage.live > 1)
        kept = stage.live * sum(by_stage.values()) + made if stage.again else stage.live * made
        assert stage.bytes == four + kept
        assert report.memory[number] == stage.bytes
        assert stage.back == pytest.approx(stage.backward + stage.again * stage.forward)


def stage_of(plan, name):
    return next(i for i, stage in enumerate(plan.stages) if name in stage.operations)


@given(models())
def test_step_bubble_and_speed_follow(model):
    units, held, plan, setting = model
    report = predict(units, held, plan, setting, [len(units) - 1])
    p, m = len(setting.devices), setting.microbatches
    busy = m * sum(u.forward + u.backward for u in units) + m * sum(s.forward for s in report.stages if s.again)
    assert sum(report.busy) == pytest.approx(busy)
    assert report.seconds >= max(report.busy) - 1e-9
    if report.seconds:
        assert report.bubble == pytest.approx(1 - busy / (p * report.seconds))
        assert report.samples_per_s == pytest.approx(setting.batch / report.seconds)
    other = report.data_parallel
    assert other.compute == pytest.approx(m / p * sum(u.forward + u.backward for u in units))
    gradients = sum(h.gradients for h in held)
    assert other.reduce == pytest.approx(2 * (p - 1) / p * gradients / setting.bytes_per_second)
    weights = sum(h.weights + h.gradients + h.slots for h in held)
    assert other.bytes == weights + math.ceil(m / p * sum(u.live_bytes for u in units))


@given(st.integers(2, 6), st.integers(1, 12), st.sampled_from(["1f1b", "gpipe"]))
def test_even_stages_wait_as_the_theory_says(stages, micros, schedule):
    report = even(stages, micros, schedule=schedule)
    assert report.seconds == pytest.approx(0.003 * (micros + stages - 1))
    assert report.bubble == pytest.approx((stages - 1) / (micros + stages - 1))
    assert report.samples_per_s == pytest.approx(10 * micros / report.seconds)
    # Without gradients data parallelism has nothing to wait for.
    assert report.data_parallel.seconds == pytest.approx(0.003 * micros)


def even(stages, micros, held=None, measured=None, memory=math.inf, out=0, bytes_per_second=1e9, names="dense", **more):
    units = [
        Unit(f"{names}_{i}", 0.001, 0.002, 0, 10**6, (i - 1,) if i else (), out) for i in range(stages)
    ]
    plan = Plan("even", tuple(StagePlan(i, (unit.name,)) for i, unit in enumerate(units)))
    more.setdefault("schedule", "1f1b")
    setting = Setting(
        tuple(f"GPU:{i}" for i in range(stages)),
        microbatches=micros,
        batch=10 * micros,
        samples=10,
        bytes_per_second=bytes_per_second,
        memory=memory,
        **more,
    )
    return predict(units, held or [Held()] * stages, plan, setting, [stages - 1], measured)


def test_transfers_delay_the_step():
    """One micro-batch on two devices: 1 + 2 ms each, and 10 MB forth and back at 1 GB/s."""
    assert even(2, 1, out=10**7).seconds == pytest.approx(0.006 + 2 * 0.010)


def test_who_is_faster_and_what_fits():
    """Two stages, 8 micro-batches: 27 ms. Data parallel: 24 ms, and the gradients of both stages at 1 GB/s."""
    cases = [(500_000, 1, "about equal"), (0, 0, "data parallel"), (10**7, 20, "model parallel")]
    for gradients, ring_ms, faster in cases:
        report = even(2, 8, [Held(1, 10**6, gradients, 0)] * 2)
        assert report.data_parallel.reduce == pytest.approx(ring_ms / 1000)
        assert report.faster == faster
    text = even(2, 8, [Held(1, 10**6, 0, 0)] * 2).text(200)
    assert "Data parallel would be faster here: 3,330 samples/s on the same 2 devices, against 2,960." in text
    assert "Data parallel needs 10.0 MB on each device, model parallel at most 3.00 MB." in text
    report = even(2, 8, [Held(1, 10**6, 10**7, 0)] * 2, memory=15e6)
    assert not report.data_parallel_fits
    words = " ".join(report.text().split())
    assert "Model parallel is faster here: 2,960 samples/s, against 1,820 by data parallel" in words
    assert "needs 30.0 MB on each device, model parallel at most 13.0 MB: it does not fit in 15.0 MB." in words


def test_what_was_measured():
    """A step of 36 ms on two devices, of which the stages compute 2 x 24 ms."""
    report = even(2, 8, measured=Measured(0.036, 80, 12))
    assert report.measured_samples_per_s == pytest.approx(80 / 0.036)
    assert report.measured_bubble == pytest.approx(1 / 3)
    assert re.search(r"\nbubble +11% +33%\n", str(report))
    other = even(2, 8, measured=Measured(0.036, 64, 12))
    assert other.measured_bubble is None  # other batches than those of the report
    assert re.search(r"\nsamples/s +2,960 +1,780\n", str(other))
    assert even(2, 8).measured_samples_per_s is None


def test_the_formulas_and_their_figures_are_printed():
    text = even(4, 8, [Held(1, 10**6, 10**6, 0)] * 4, sources=(("bandwidth", "given"), ("slots", "assumed"))).text(200)
    assert re.search(r"\nbandwidth B +1.00 GB/s each way, given\n", text)
    assert "step = 8 / 4 x sum of forwards and backwards + 2 (4 - 1) / 4 x gradients / B = 24.0 ms + 6.00 ms" in text
    assert "1 - sum of `computes` / (4 devices x step)" in text
    assert text.endswith("slots          assumed")
    free = even(4, 8, bytes_per_second=math.inf).text(200)
    assert "bandwidth B    none: transfers take no time" in free


@given(models(), st.integers(80, 140))
def test_text_fits_and_cuts_no_number(model, width):
    units, held, plan, setting = model
    # Names of any length; those of devices on other machines are the longest.
    setting = dataclasses.replace(setting, devices=tuple(f"worker/{i}/GPU:0" for i in range(len(setting.devices))))
    report = predict(units, held, plan, setting, [len(units) - 1], Measured(0.5, setting.batch, 3))
    text = report.text(width)
    assert max(len(line) for line in text.split("\n")) <= width
    words = " ".join(text.split())
    for stage in report.stages:
        parts = [told_seconds(stage.forward), told_seconds(stage.back), f"{stage.held.parameters:,}"]
        parts += [told_bytes(n) for n in (stage.held.weights, stage.held.gradients, stage.held.slots)]
        parts += [f"{stage.live} x {told_bytes(stage.kept_bytes)}"]
        parts += [f"{told_bytes(count)} from {source}" for source, count in stage.arriving]
        for part in parts:
            assert re.search(rf"(?<![\d,.]){re.escape(part)}(?![\d,.]*\d)", words), (part, text)
    assert told_bytes(report.data_parallel.bytes) in words


def test_a_branch_names_all_that_arrives():
    units = [Unit(f"u{i}", needs=needs, out_bytes=1000) for i, needs in enumerate([(), (0,), (0,), (1, 2)])]
    plan = Plan("branches", tuple(StagePlan(d, (f"u{i}",)) for i, d in enumerate([0, 0, 1, 0])))
    report = predict(units, [Held()] * 4, plan, Setting(("a", "b"), "1f1b", 2, 4, 2, 1e9), [3])
    assert report.stages[3].arriving == ((1, 1000), (2, 1000))
    assert re.search(r"1.00 kB from 1\n +1.00 kB from 2\n", str(report))
    assert picture.labels(report) == ["a\nstages 0, 1, 3", "b\nstage 2"]


def test_a_plan_for_other_devices_or_operations_is_refused():
    with pytest.raises(ValueError, match="a plan for 2 devices of a model of 2 operations, got 1 devices"):
        plan = Plan("m", (StagePlan(0, ("a",)), StagePlan(1, ("b",))))
        predict([Unit("a"), Unit("b")], [Held()] * 2, plan, Setting(("x",), "1f1b", 1, 1, 1, 1.0))
    with pytest.raises(ValueError, match="is for another model"):
        predict([Unit("a"), Unit("c")], [Held()] * 2, plan, Setting(("x", "y"), "1f1b", 1, 1, 1, 1.0))


@given(st.lists(st.text("abc_1", min_size=1, max_size=30), min_size=1, max_size=9), st.integers(20, 90))
def test_long_lists_of_names_are_their_ends_and_their_number(operations, width):
    text = telling.names(operations, width)
    assert len(text) <= width
    if len(", ".join(operations)) <= width:
        assert text == ", ".join(operations)
    elif len(operations) > 1:
        assert text.endswith(f" ({len(operations)})")
        assert " ... " in text


def test_names():
    blocks = [f"conv{i}_block1_out" for i in range(5)]
    assert telling.names(blocks, 50) == "conv0_block1_out ... conv4_block1_out (5)"
    assert telling.names(blocks, 31) == "conv0.._out ... conv4.._out (5)"
    assert telling.names([], 12) == "(the loss)"
    assert telling.names(["a_very_long_name_of_one"], 12) == "a_ver..f_one"


def test_rich_prints_the_same():
    report = even(4, 8)
    for width in (80, 120):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(report)
        printed = [line.rstrip() for line in console.export_text().rstrip().split("\n")]
        assert printed == report.text(width).split("\n")


@given(st.integers(1, 10**15))
def test_bytes_read_back(count):
    assert read_bytes(told_bytes(count)) == pytest.approx(count, rel=0.006)
    digits = told_bytes(count).split()[0].replace(".", "")
    assert len(digits) <= 3


def test_amounts():
    assert [told_bytes(n) for n in (0, 999, 1000, 999_499, 999_500, 1e18)] == [
        *("0 B", "999 B", "1.00 kB", "999 kB", "1.00 MB", "1000 PB"),
    ]
    seconds = [told_seconds(s) for s in (0, 2e-7, 1.2345e-3, 0.99949, 0.9996, 12.34, 1234)]
    assert seconds == ["0 s", "0.20 us", "1.23 ms", "999 ms", "1.00 s", "12.3 s", "1234 s"]
    assert [told_rate(r) for r in (0, 0.01234, 99.96, 12345.6, math.inf)] == ["0", "0.0123", "100", "12,300", "inf"]
    assert [read_bytes(t) for t in ("8GB", " 1.5 MiB ", "2e9", "1,000 kb", "12")] == [8e9, 1.5 * 2**20, 2e9, 1e6, 12]


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "8QB", "1.2.3MB", "8 GB each", "nan", "inf"])
def test_what_is_no_number_of_bytes(text):
    with pytest.raises(ValueError, match="is no number of bytes; expected one above 0"):
        read_bytes(text)


def test_the_pictures_colours_take_the_share_that_they_stand_for(tmp_path):
    """Of the rows' pixels as many are idle as devices wait, and as many blue as there are forwards."""
    image = pytest.importorskip("matplotlib.image")
    loaded = "matplotlib.pyplot" in sys.modules
    report = even(4, 6, recompute=False)
    report.timeline(tmp_path / "step.png")
    assert ("matplotlib.pyplot" in sys.modules) == loaded
    pixels = (image.imread(tmp_path / "step.png")[:, :, :3] * 255).round().astype(int)

    def share(colour):
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        return int((abs(pixels - wanted).max(axis=2) <= 2).sum())

    forward, backward, idle = (share(c) for c in (picture.FORWARD[0], picture.BACKWARD[0], picture.IDLE))
    whole = forward + backward + idle
    assert idle / whole == pytest.approx(3 / 9, abs=0.03)
    assert forward / whole == pytest.approx(2 / 9, abs=0.03)
    assert backward / whole == pytest.approx(4 / 9, abs=0.03)


def test_the_picture_says_what_it_shows(tmp_path):
    pytest.importorskip("matplotlib")
    # The first stage starts its backwards at 4 ms and goes on to the end: 8 of 3 ms, and 6 forwards.
    report = even(2, 8, measured=Measured(0.036, 80, 12), recompute=True)
    assert picture.title(report) == (
        "even: 1f1b, 2 stages on 2 devices, 8 micro-batches",
        "step 34.0 ms, bubble 18%, 2,350 samples/s (predicted); measured 36.0 ms, bubble 22%",
    )
    report.timeline(tmp_path / "again.png")
    many = even(4, 300, schedule="gpipe")
    many.timeline(str(tmp_path / "many.png"))
    for name in ("again.png", "many.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(OSError, match="nowhere"):
        report.timeline(tmp_path / "nowhere" / "step.png")


def test_a_missing_matplotlib_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib, .* pip install matplotlib"):
        even(2, 2).timeline(tmp_path / "step.png")
