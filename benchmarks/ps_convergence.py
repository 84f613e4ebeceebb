"""How soon each kind of consistency is good: `python benchmarks/ps_convergence.py`. See benchmarks/README.md.

A small network on scikit-learn's digits, SGD with momentum, 1 ps and `--workers`, of which the last runs a tenth of the
time. Each run is a process with a cluster of its own, set up before the clock starts; it ends when 97 % of the samples
held back are recognised at the end of an epoch, or after `--epochs`. Kinds take turns, each turn from other initial
weights; figures are medians over turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import ps_curves, quiet, report  # noqa: E402
from benchmarks.slowed import Slowed  # noqa: E402
from benchmarks.teams import Team, Teams  # noqa: E402

QUIET = 0.15  # cores that other programs may use
ACCURACY = 0.97
# Classes of tfdist and their arguments.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Async()": ("Async", {}),
    'Async(correction="scale")': ("Async", {"correction": "scale"}),
    'Async(correction="dc")': ("Async", {"correction": "dc"}),
    "Bounded(staleness=4)": ("Bounded", {"staleness": 4}),
    "Sync()": ("Sync", {}),
    "Sync(backup_workers=1)": ("Sync", {"backup_workers": 1}),
    "LocalSGD(steps=8)": ("LocalSGD", {"steps": 8}),
}


def measure(name: str, number: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """One run, in processes that end with it; None, and a message, where it failed."""
    team = Team(f"digits {number}", "ps digits", pinned=False)
    kind, arguments = KINDS[name]
    task = (kind, arguments, options.workers, options.batch, options.epochs, ACCURACY, number)
    quiet.wait(QUIET, options.patience)
    try:
        with Teams([team], options.show_output, options.deadline) as running:
            pids = running.call(team, "prepare", *task)[0]["pids"]
            slow = Slowed(pids[f"worker/{options.workers - 1}"], options.share, options.period)
            with quiet.Others([*running.pids(team), *pids.values()]) as busy, slow:
                found = running.call(team, "run")[0]
    except RuntimeError as error:
        print(f"{name}: FAILED, and is left out: {error}", file=sys.stderr, flush=True)
        return None
    return {**found, "ran": slow.ran, "others": busy.cores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="samples of a worker's gradient")
    parser.add_argument("--epochs", type=int, default=100, help="epochs of a run, at most")
    parser.add_argument("--share", type=float, default=0.1, help="of the time that the slow worker runs")
    parser.add_argument("--period", type=float, default=0.04, help="seconds between two stops of it")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds a run waits for quiet")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds of a run")
    parser.add_argument("--without-plot", action="store_true", help="no picture, for which matplotlib is needed")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "ps_convergence.json", help="where to write")
    parser.add_argument("--show-output", action="store_true", help="show what the runs print")
    options = parser.parse_args()
    if not options.without_plot and importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("The picture needs matplotlib, which is not there: pip install matplotlib, or --without-plot")

    started = time.time()
    about = report.surroundings()
    runs: dict[str, list[dict[str, Any] | None]] = {name: [] for name in options.kinds}
    for turn in range(options.turns):
        for name in options.kinds if turn % 2 == 0 else reversed(options.kinds):
            runs[name].append(measure(name, turn, options))
            ps_curves.show_progress(name, runs[name][-1], ACCURACY, time.time() - started)
    about |= {"command": shlex.join(["python", *sys.argv]), "seconds": round(time.time() - started)}
    report.write(options.json, about, [ps_curves.table(runs, options, ACCURACY)], {"runs": runs})
    if not options.without_plot:
        ps_curves.plot(runs, ACCURACY, options.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
