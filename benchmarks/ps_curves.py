"""Table and picture of the runs of `benchmarks/ps_convergence.py`."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

Run = dict[str, Any]  # history: [(seconds, updates, accuracy)] by epoch; report: RunReport's


def reached(run: Run, accuracy: float) -> tuple[float, int] | None:
    """(seconds, updates) until a run was as good as that, or None."""
    return next(((s, n) for s, n, got in run["history"] if got is not None and got >= accuracy), None)


def staleness(run: Run) -> tuple[float, int]:
    """Mean and largest number of other updates between an update's pull and its push."""
    late = {int(others): count for others, count in run["report"]["late"].items()}
    total = sum(late.values())
    mean = sum(others * count for others, count in late.items()) / total if total else 0.0
    return mean, max(late, default=0)


def middle_run(runs: list[Run], accuracy: float) -> Run:
    """The run of median seconds; one that did not get there counts as slower than all."""
    ranked = sorted(runs, key=lambda run: (reached(run, accuracy) or (float("inf"),))[0])
    return ranked[len(ranked) // 2]


def table(runs: dict[str, list[Run | None]], options: argparse.Namespace, accuracy: float) -> tuple[str, list[Any]]:
    """(title, rows) for `report.write`."""
    good = f"{accuracy:.0%}"
    heads = ["consistency", f"seconds to {good}", f"updates to {good}", "runs", "updates/s"]
    rows = [[*heads, "mean staleness", "largest", "dropped", "others' cores"]]
    for name, all_runs in runs.items():
        found = [run for run in all_runs if run is not None]
        if not found:
            rows.append([name, *["failed"] * 8])
            continue
        times = [got for run in found if (got := reached(run, accuracy))]
        # A median over the runs that got there alone would flatter a kind that often does not.
        enough = 2 * len(times) > len(found)
        ends = [run["history"][-1] for run in found]
        lateness = [staleness(run) for run in found]
        rows.append(
            [
                name,
                f"{median(t[0] for t in times):.1f}" if enough else "not reached",
                f"{median(t[1] for t in times):.0f}" if enough else "not reached",
                f"{len(times)} of {len(all_runs)}",
                f"{median(end[1] / end[0] for end in ends):.0f}",
                f"{median(mean for mean, _ in lateness):.1f}",
                f"{max(most for _, most in lateness)}",
                f"{median(run['report'].get('dropped', 0) for run in found):.0f}",
                f"{median(run['others'] for run in found):.2f}",
            ]
        )
    slow = f"the last at {options.share:.0%} of its speed"
    title = f"{options.workers} workers, {slow}, 1 ps, gradients of {options.batch} samples"
    return title, rows


def show_progress(name: str, run: Run | None, accuracy: float, passed: float) -> None:
    if run is None:
        return
    got = reached(run, accuracy)
    end = f"{got[0]:.1f} s, {got[1]} updates" if got else f"not reached, {run['history'][-1][2]:.1%} at the end"
    print(f"[{passed:4.0f} s] {name}: {end}; the slow worker ran {run['ran']:.0%} of the time", flush=True)


def plot(runs: dict[str, list[Run | None]], accuracy: float, path: Path) -> None:
    """Writes a picture: the error of each kind's middle run by seconds and by updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_time, by_updates) = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    for name, all_runs in runs.items():
        found = [run for run in all_runs if run is not None]
        if not found:
            continue
        points = [point for point in middle_run(found, accuracy)["history"] if point[2] is not None]
        seconds, updates, right = zip(*points, strict=True)
        wrong = [max(100 * (1 - value), 0.1) for value in right]
        by_time.plot(seconds, wrong, marker=".", label=name)
        by_updates.plot(updates, wrong, marker=".", label=name)
    for axes, label in ((by_time, "seconds"), (by_updates, "updates")):
        axes.axhline(100 * (1 - accuracy), color="grey", linestyle=":", linewidth=1)
        axes.set(xlabel=label, xscale="log", yscale="log")
        axes.set_yticks([1, 2, 3, 5, 10, 20, 50], ["1", "2", "3", "5", "10", "20", "50"])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    by_time.set_ylabel("digits not recognised, %")
    by_updates.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"written: {path}")
