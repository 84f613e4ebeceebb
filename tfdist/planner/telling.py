"""The report of an outlook as text. Pure.

Columns of numbers are as wide as they must be; the column of names gets the rest and is shortened to it: first, last
and how many.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.planner.amounts import told_bytes, told_rate, told_seconds

if TYPE_CHECKING:
    from tfdist.planner.outlook import Report

Line = tuple[str, str]  # text, and its style in rich
HEAD, PLAIN, FAINT = "bold", "", "dim"
GAP = "  "
LEAST = 12  # characters for names of operations
NOTHING = "-"


def lines(report: Report, width: int) -> list[Line]:
    """The whole report, in lines of at most `width` characters as far as that cuts no number."""
    every = [*_title(report, width), _empty()]
    every += [*_stages(report, width), _empty(), *_memory(report, width), _empty(), *_devices(report), _empty()]
    every += [*_step(report), _empty(), *_verdict(report, width), _empty(), *_how(report, width)]
    return every


def names(operations: Sequence[str], width: int) -> str:
    """Names in at most `width` characters: all, or the first, the last, and how many there are.

    >>> names(["conv", "conv_1", "conv_2", "flatten"], 40)
    'conv, conv_1, conv_2, flatten'
    >>> names(["conv", "conv_1", "conv_2", "flatten"], 24)
    'conv ... flatten (4)'
    """
    if not operations:
        return "(the loss)"
    every = ", ".join(operations)
    if len(every) <= width:
        return every
    if len(operations) == 1:
        return _shortened(every, width)
    count = f" ({len(operations)})"
    room = max(width - len(count) - len(" ... "), 2)
    first, last = operations[0], operations[-1]
    # What the shorter of the two leaves is the other's.
    half = max(room // 2, room - len(last)) if len(last) < room // 2 else room // 2
    first = _shortened(first, half)
    return f"{first} ... {_shortened(last, room - len(first))}{count}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[Line]:
    """Columns as wide as their longest entry, to the right but for those in `left`."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    found = []
    for row, style in ((head, HEAD), *((row, PLAIN) for row in rows)):
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        found.append((GAP.join(cells).rstrip(), style))
    return found


def _empty() -> Line:
    return "", PLAIN


def _shortened(name: str, width: int) -> str:
    """Without its middle: names in a row often differ at their ends."""
    if len(name) <= width:
        return name
    end = (width - 2) // 2
    return f"{name[: max(width - 2 - end, 1)]}..{name[len(name) - end :] if end > 0 else ''}"


def _wrapped(text: str, width: int, style: str = PLAIN, indent: int = 0) -> list[Line]:
    broken = textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return [(line, style) for line in broken]


def _title(report: Report, width: int) -> list[Line]:
    setting = report.setting
    micro = f"{setting.microbatches} micro-batch" + ("es" if setting.microbatches != 1 else "")
    most = "" if setting.microbatches * setting.samples == setting.batch else "at most "
    again = ", forwards again before backwards" if any(stage.again for stage in report.stages) else ""
    text = (
        f"{report.model}: {len(report.stages)} stages on {len(setting.devices)} devices, {setting.schedule}{again}; a "
        f"batch of {setting.batch:,} samples in {micro} of {most}{setting.samples:,}"
    )
    return _wrapped(text, width, HEAD)


def _stages(report: Report, width: int) -> list[Line]:
    head = ["stage", "device", "operations", "parameters", "forward", "backward"]
    rows = []
    for number, stage in enumerate(report.stages):
        times = [told_seconds(stage.forward), told_seconds(stage.back)]
        rows.append([str(number), report.setting.devices[stage.device], "", f"{stage.held.parameters:,}", *times])
    others = sum(max(len(row[i]) for row in (head, *rows)) for i in (0, 1, 3, 4, 5))
    room = max(width - others - len(GAP) * (len(head) - 1), LEAST)
    for row, stage in zip(rows, report.stages, strict=True):
        row[2] = names(stage.operations, room)
    return table(head, rows, left=(1, 2))


def _memory(report: Report, width: int) -> list[Line]:
    head = ["stage", "weights", "gradients", "slots", "activations kept", "arrives"]
    rows = []
    for number, stage in enumerate(report.stages):
        held = stage.held
        kept = f"{stage.live} x {told_bytes(stage.kept_bytes)}"
        if stage.transient_bytes:
            kept += f" + {told_bytes(stage.transient_bytes)}"
        come = [f"{told_bytes(count)} from {source}" for source, count in stage.arriving] or [NOTHING]
        sizes = [told_bytes(held.weights), told_bytes(held.gradients), told_bytes(held.slots)]
        rows.append([str(number), *sizes, kept, come[0]])
        rows += [["", "", "", "", "", more] for more in come[1:]]
    return table(head, rows)


def _devices(report: Report) -> list[Line]:
    setting = report.setting
    limited = setting.memory != math.inf
    head = ["device", "memory", *(["allowed"] if limited else []), "computes", "waits"]
    rows = []
    for name, memory, busy in zip(setting.devices, report.memory, report.busy, strict=True):
        waits = 1 - busy / report.seconds if report.seconds else 0.0
        allowed = [told_bytes(setting.memory)] if limited else []
        rows.append([name, told_bytes(memory), *allowed, told_seconds(busy), f"{waits:.0%}"])
    return table(head, rows, left=(0,))


def _step(report: Report) -> list[Line]:
    measured = report.measured
    predicted = [told_seconds(report.seconds), told_rate(report.samples_per_s), f"{report.bubble:.0%}"]
    if measured is None:
        found = [NOTHING] * 3
    else:
        bubble = report.measured_bubble
        found = [
            told_seconds(measured.seconds),
            told_rate(report.measured_samples_per_s or 0.0),
            NOTHING if bubble is None else f"{bubble:.0%}",
        ]
    rows = [list(row) for row in zip(("step", "samples/s", "bubble"), predicted, found, strict=True)]
    return table(["", "predicted", "measured"], rows, left=(0,))


def _verdict(report: Report, width: int) -> list[Line]:
    setting, other = report.setting, report.data_parallel
    mine, theirs = told_rate(report.samples_per_s), told_rate(report.data_parallel_samples_per_s)
    count = f"the same {len(setting.devices)} devices"
    said = {
        "data parallel": f"Data parallel would be faster here: {theirs} samples/s on {count}, against {mine}.",
        "model parallel": f"Model parallel is faster here: {mine} samples/s, against {theirs} by data parallel on "
        f"{count}.",
        "about equal": f"About equal: {mine} samples/s, and {theirs} by data parallel on {count}.",
    }[report.faster]
    need = (
        f"Data parallel needs {told_bytes(other.bytes)} on each device, model parallel at most "
        f"{told_bytes(max(report.memory))}"
    )
    if report.data_parallel_fits:
        need += "."
    else:
        need += f": it does not fit in {told_bytes(setting.memory)}."
    return _wrapped(f"{said} {need}", width, HEAD)


def _how(report: Report, width: int) -> list[Line]:
    setting, other = report.setting, report.data_parallel
    count = len(setting.devices)
    free = setting.bytes_per_second == math.inf
    speed = "none: transfers take no time" if free else f"{told_bytes(setting.bytes_per_second)}/s each way"
    sources = dict(setting.sources)
    if "bandwidth" in sources:
        speed += f", {sources.pop('bandwidth')}"
    formulas = [
        ("bandwidth B", speed),
        ("step", "the schedule, simulated with these forwards, backwards and bytes / B; without loss and optimizer"),
        ("bubble", f"1 - sum of `computes` / ({count} devices x step)"),
        ("samples/s", f"{setting.batch:,} / step"),
        ("memory", "weights + gradients + slots + activations kept (micro-batches x outputs of the operations)"),
        (
            "data parallel",
            f"step = {setting.microbatches} / {count} x sum of forwards and backwards + 2 ({count} - 1) / {count} x "
            f"gradients / B = {told_seconds(other.compute)} + {told_seconds(other.reduce)}, nothing "
            "hidden behind the backward pass",
        ),
    ]
    if report.measured is not None:
        what = report.measured
        formulas.append(("measured", f"median of {what.steps:,} steps of fit, batches of {what.batch:,} samples"))
    formulas += sources.items()
    indent = max(len(name) for name, _ in formulas) + len(GAP)
    return [line for name, said in formulas for line in _wrapped(name.ljust(indent) + said, width, FAINT, indent)]
