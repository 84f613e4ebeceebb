"""A model cut in two over two processes, a core each: `python benchmarks/model_parallel.py`. See benchmarks/README.md.

The parts take turns within a run: one process, tfdist's two, PyTorch's, forwards and backwards. A turn gives
the median step; a figure is the median over turns, a ratio the median of those within a turn.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import psutil

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import quiet, report, split_report  # noqa: E402
from benchmarks.split_report import Case  # noqa: E402
from benchmarks.teams import Team, Teams  # noqa: E402

QUIET = 0.15  # cores that other programs may use
EVEN = [1024] * 9  # 2 x 4 layers
UNEVEN = [256, 1536, 512, 1024, 1024, 512, 256, 128]
MICROS_UNEVEN = 8


def teams(torch_python: str | None) -> dict[str, Team]:
    """Nothing is frozen: tfdist's other task would think the first gone. Those whose turn it is not only wait."""
    found = {
        "one process": Team("one process", "split keras", frozen=False),
        "one core": Team("one core", "split alone", frozen=False),
        "tfdist": Team("tfdist", "split tfdist", pinned=False, frozen=False),
    }
    if torch_python:
        for ranks in (1, split_report.STAGES):
            found[f"torch {ranks}"] = Team(
                f"torch {ranks}", "split torch", ranks, python=torch_python, frozen=False
            )
    return found


def cases(micros: list[int], schedule: str, torch: bool) -> list[Case]:
    """What is measured, in the order of a turn."""
    half = (len(EVEN) - 1) // 2
    chosen = [Case("one process", "even", EVEN, {})]
    chosen += [
        Case(team, f"even, m = {m}", EVEN, {"microbatches": m, "balance": [half, half], "schedule": schedule})
        for m in micros
        for team in ("one core", "tfdist")
    ]
    if torch:
        chosen.append(Case("torch 1", "even", EVEN, {}))
        # Its 1F1B refuses fewer micro-batches than stages.
        chosen += [
            Case("torch 2", f"even, m = {m}", EVEN, {"microbatches": m, "balance": [half, half], "schedule": schedule})
            for m in micros
            if m >= split_report.STAGES
        ]
    layers = len(UNEVEN) - 1
    for cut in range(1, layers):
        how = {"microbatches": MICROS_UNEVEN, "balance": [cut, layers - cut], "schedule": schedule}
        chosen.append(Case("tfdist", f"uneven, {cut} + {layers - cut}", UNEVEN, how))
    how = {"microbatches": MICROS_UNEVEN, "balance": "time", "schedule": schedule}
    return [*chosen, Case("tfdist", "uneven, automatic", UNEVEN, how)]


def family(pids: list[int]) -> list[int]:
    """These and what they have started: tfdist's other task is a child of the first."""
    return [*pids, *(child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--micros", type=int, nargs="+", default=[2, 4, 8, 16], help="micro-batches to try")
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--patience", type=float, default=4.0, help="seconds a turn waits for quiet")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--torch-python", metavar="PATH", help="an interpreter that has torch (default: this one)")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "model_parallel.json")
    parser.add_argument("--show-output", action="store_true", help="show what the processes print")
    options = parser.parse_args()

    torch_python = None if options.without_torch else report.python_with("torch", options.torch_python)
    about = report.surroundings(torch=torch_python)
    started = time.time()
    running = teams(torch_python)
    chosen = cases(options.micros, options.schedule, bool(torch_python))
    turns: split_report.Turns = {case.key: [] for case in chosen}
    with Teams(list(running.values()), options.show_output) as processes:
        cuts = {
            case.key: processes.call(running[case.team], "prepare", *case[1:], options.batch)[0] for case in chosen
        }
        for turn in range(options.turns):
            # Forwards, then backwards: a machine that slows down or speeds up favours nobody.
            for case in chosen if turn % 2 == 0 else reversed(chosen):
                team = running[case.team]
                quiet.wait(QUIET, options.patience)
                with quiet.Others(family(processes.pids(team))) as busy:
                    got = processes.call(team, "run", case.name, case.widths, options.batch, options.steps)
                turns[case.key].append(split_report.Turn.of(got, busy.cores))
            print(f"[{time.time() - started:4.0f} s] turn {turn + 1} of {options.turns}", flush=True)
    split_report.write(turns, cuts, options, {**about, "seconds": round(time.time() - started)})


if __name__ == "__main__":
    main()
