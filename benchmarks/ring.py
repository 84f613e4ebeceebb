"""Ring all-reduce beside its peers: `python benchmarks/ring.py`. See benchmarks/README.md.

One core a rank, 64 samples a rank, SGD. Every variant is started once; then, model by model, the variants take
turns (A B C, C B A, ...) of `--steps` steps each while all others are frozen. A turn gives the median step of its
slowest rank, a figure is the median over turns. A turn that other programs disturb is waited for and repeated, within
`--patience`; the report says how much of the machine they used.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from statistics import median  # noqa: E402

from benchmarks import models, quiet, released, report  # noqa: E402
from benchmarks.teams import Team, Teams  # noqa: E402

QUIET = 0.15  # cores that other programs may use
ONE_PROCESS = (("keras", "keras"), ("tfdist 1", "tfdist"))


def teams(torch_python: str | None, controllers: list[str]) -> list[Team]:
    """The variants: one process, then two. What follows a # is not part of a variant's name.

    Two processes that do the same differ by some percent for as long as they live (where their memory lies). That is
    more than tfdist may cost on one rank, so those variants have two of them.
    """
    chosen = [Team(f"{name}#{n}", variant) for n in (1, 2) for name, variant in ONE_PROCESS]
    as_released = {"PYTHONPATH": str(released.folder())}
    for controller in controllers:
        tail = "" if controller == "gloo" else f" {controller}"
        chosen.append(Team(f"tfdist 2{tail}", "tfdist", 2, controller))
        chosen.append(Team(f"released 2{tail}", "horovod", 2, controller, env=as_released))
        chosen.append(Team(f"horovod 2{tail}", "horovod", 2, controller))
    if torch_python:
        chosen += [Team(f"torch {n}", "torch", n, python=torch_python) for n in (1, 2)]
    return chosen


def measure(running: Teams, model: str, steps: int, turns: int, patience: float) -> report.Measured:
    """All teams with one model."""
    names = {team.name: team.name.partition("#")[0] for team in running.teams}
    facts = {names[team.name]: running.call(team, "prepare", model, steps)[0] for team in running.teams}
    seconds: dict[str, list[float]] = {name: [] for name in facts}
    others: dict[str, list[float]] = {name: [] for name in facts}
    processor: dict[str, list[float]] = {name: [] for name in facts}
    for turn in range(turns):
        # Forwards, then backwards: a machine that slows down or speeds up favours nobody.
        for team in running.teams if turn % 2 == 0 else reversed(running.teams):
            taken, busy = calmest(running, team, patience)
            name = names[team.name]
            seconds[name].append(max(median(times) for times in taken))
            others[name].append(busy.cores)
            processor[name].append(busy.own / sum(map(len, taken)))
    return report.Measured(seconds, others, processor, facts)


def calmest(running: Teams, team: Team, patience: float) -> tuple[list[list[float]], quiet.Others]:
    """A turn: the first that other programs left alone, or the least disturbed within `patience` seconds."""
    ends = time.monotonic() + patience
    best = None
    while best is None or (best[1].cores >= QUIET and time.monotonic() < ends):
        quiet.wait(QUIET, ends - time.monotonic())
        with quiet.Others(running.pids(team)) as busy:
            taken = running.call(team, "run")
        if best is None or busy.cores < best[1].cores:
            best = taken, busy
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES))
    parser.add_argument("--steps", type=int, default=60, help="steps a turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each variant")
    parser.add_argument("--patience", type=float, default=4.0, help="seconds a turn waits for quiet")
    parser.add_argument("--controller", nargs="+", choices=["gloo", "mpi"], default=["gloo"])
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch (default: this one)")
    parser.add_argument("--json", type=Path, help="where to write (default: benchmarks/results/ring.json)")
    parser.add_argument("--show-output", action="store_true", help="show what the variants print")
    options = parser.parse_args()

    torch_python = None if options.without_torch else report.python_with("torch", options.torch_python)
    started = time.time()
    about = report.surroundings(torch=torch_python)
    results = {}
    with Teams(teams(torch_python, options.controller), options.show_output) as running:
        for model in options.models:
            results[model] = measure(running, model, options.steps, options.turns, options.patience)
            report.show_progress(model, results[model], time.time() - started)
    report.ring(results, options, {**about, "seconds": round(time.time() - started)})


if __name__ == "__main__":
    main()
