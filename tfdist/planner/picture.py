"""A predicted step of training as a picture: devices by time. Draws with matplotlib, which is loaded here only."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from tfdist.planner.amounts import told_rate, told_seconds
from tfdist.planner.timeline import Timed

if TYPE_CHECKING:
    from tfdist.planner.outlook import Report

# Two colours that are told apart in grey and by the colour-blind; the second stage of a device has the lighter of each.
FORWARD, BACKWARD = ("#3b76af", "#8fb8de"), ("#e58a3c", "#f4c08f")
IDLE, INK = "#e6e9ee", "#20262e"
WIDTH, HIGH, AROUND = 12.0, 0.62, 1.7  # inches: the picture, a device, and what is above and below them
DPI = 150
LETTERS = (5.0, 9.0)  # points: the smallest and the largest numbers in boxes
HATCH = "////"  # of a forward that is computed again
BOX = 0.72  # of a device's row
MOST_NUMBERED = 4000  # boxes


def check() -> None:
    """Raises ModuleNotFoundError unless matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "the picture of a step needs matplotlib, which is not installed: pip install matplotlib (tfdist's extra "
            "`plot`)."
        )


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes the picture as a PNG.

    A box is a forward or a backward of a micro-batch, with the micro-batch's number where there is room for it.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    check()
    # Not pyplot, which would choose a backend for the whole process and keep the figure.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, AROUND + HIGH * len(report.setting.devices)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    factor, unit = _unit(report.seconds)
    _boxes(axes, report, factor)
    _frame(figure, axes, report, factor, unit)
    with open(os.fspath(path), "wb") as file:  # whatever the name ends with
        figure.savefig(file, format="png")


def labels(report: Report) -> list[str]:
    """By device: its name and its stages."""
    found = []
    for number, name in enumerate(report.setting.devices):
        mine = [str(i) for i, stage in enumerate(report.stages) if stage.device == number]
        what = f"stage{'s' if len(mine) > 1 else ''} {', '.join(mine)}" if mine else "no stage"
        found.append(f"{name}\n{what}")
    return found


def title(report: Report) -> tuple[str, str]:
    """What the picture shows, and the figures."""
    setting = report.setting
    micros = f"{setting.microbatches} micro-batch{'es' if setting.microbatches != 1 else ''}"
    stages = f"{len(report.stages)} stages on {len(setting.devices)} devices"
    what = f"{report.model}: {setting.schedule}, {stages}, {micros}"
    figures = (
        f"step {told_seconds(report.seconds)}, bubble {report.bubble:.0%}, {told_rate(report.samples_per_s)} samples/s "
        "(predicted)"
    )
    if report.measured is not None:
        figures += f"; measured {told_seconds(report.measured.seconds)}"
        if report.measured_bubble is not None:
            figures += f", bubble {report.measured_bubble:.0%}"
    return what, figures


def _unit(seconds: float) -> tuple[float, str]:
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")


def _boxes(axes: Any, report: Report, factor: float) -> None:
    from matplotlib.patches import Rectangle

    seconds = report.seconds
    for device in range(len(report.setting.devices)):
        axes.add_patch(Rectangle((0, device - BOX / 2), seconds * factor, BOX, facecolor=IDLE, linewidth=0))
    shades = _shades(report)
    points = (WIDTH - 1.6) * 72 / seconds if seconds else 0.0  # of the axes' width, a second
    numbered = len(report.line.steps) <= MOST_NUMBERED
    for timed in report.line.steps:
        device = report.stages[timed.step.stage].device
        colour = (BACKWARD if timed.step.backward else FORWARD)[shades[timed.step.stage]]
        width = timed.end - timed.start
        # A line around a box that is hardly wider than the line would hide it.
        line = min(0.8, width * points / 6)
        axes.add_patch(
            Rectangle(
                (timed.start * factor, device - BOX / 2),
                width * factor,
                BOX,
                facecolor=colour,
                edgecolor="white",
                linewidth=line,
            )
        )
        again = timed.step.backward and report.stages[timed.step.stage].again
        if again:
            _again(axes, report, timed, device, factor)
        if numbered:
            start = timed.end - report.stages[timed.step.stage].backward if again else timed.start
            dark = not (timed.step.backward or shades[timed.step.stage])
            middle, room = (start + timed.end) / 2 * factor, (timed.end - start) * points
            _number(axes, timed.step.micro, middle, device, room, "white" if dark else INK)


def _again(axes: Any, report: Report, timed: Timed, device: int, factor: float) -> None:
    """Where a backward begins with a forward."""
    from matplotlib.patches import Rectangle

    width = report.stages[timed.step.stage].forward * factor
    corner = (timed.start * factor, device - BOX / 2)
    axes.add_patch(Rectangle(corner, width, BOX, facecolor=FORWARD[1], edgecolor="white", hatch=HATCH, linewidth=0))


def _number(axes: Any, micro: int, middle: float, device: int, room: float, ink: str) -> None:
    text = str(micro)
    size = min(LETTERS[1], room / (0.75 * len(text) + 0.3))
    if size >= LETTERS[0]:
        axes.text(middle, device, text, ha="center", va="center_baseline", fontsize=size, color=ink)


def _shades(report: Report) -> list[int]:
    """By stage: 1 for every second one of its device."""
    before: dict[int, int] = {}
    found = []
    for stage in report.stages:
        found.append(before.get(stage.device, 0) % 2)
        before[stage.device] = before.get(stage.device, 0) + 1
    return found


def _frame(figure: Any, axes: Any, report: Report, factor: float, unit: str) -> None:
    from matplotlib.patches import Patch

    count = len(report.setting.devices)
    axes.set_xlim(0, report.seconds * factor or 1.0)
    axes.set_ylim(count - 0.5, -0.5)  # the first device on top
    axes.set_yticks(range(count), labels(report), fontsize=9, color=INK)
    more = "; lighter: every second stage of a device" if any(_shades(report)) else ""
    axes.set_xlabel(f"time in {unit}{more}", fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=9, colors=INK)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    what, figures = title(report)
    axes.set_title(what, loc="left", fontsize=12, fontweight="bold", color=INK, pad=26)
    axes.annotate(
        figures, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", fontsize=10, color=INK
    )
    kinds = [("forward", FORWARD[0]), ("backward", BACKWARD[0]), ("idle", IDLE)]
    if any(stage.again for stage in report.stages):
        kinds.insert(1, ("forward again", FORWARD[1]))
    style: dict[str, Any] = {"edgecolor": "white", "linewidth": 0}
    handles = [Patch(facecolor=c, label=name, hatch=HATCH * (c == FORWARD[1]), **style) for name, c in kinds]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(kinds), frameon=False, fontsize=9)
