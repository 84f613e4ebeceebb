"""The parameter server beside its peer: `python benchmarks/parameter_server.py`. See benchmarks/README.md.

Batches of 64, SGD, one ps, worker i on core i % cores; chief and ps are not pinned, and plain Keras has one core. Each
measurement is a process of its own, which starts its cluster, times a first `fit` of `--first` updates as a whole
(the cluster runs already), and looks at the middle 80 % of a second one of `--updates`. The variants take turns, A B
C, C B A, ...; a figure is the median over turns, a ratio the median of those within a turn.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import models, ps_report, quiet, report  # noqa: E402
from benchmarks.peers.ps_fit import Setting  # noqa: E402
from benchmarks.teams import Team, Teams  # noqa: E402

QUIET = 0.15  # cores that other programs may use
IDS = (5, 20, 80)  # a sample, for the table of bytes


class Variant(NamedTuple):
    """A column of the tables."""

    team: Team
    workers: int = 0
    steps_per_execution: int = 1
    legacy: bool = False


def variants(tf_keras_python: str | None) -> list[Variant]:
    """Plain Keras, tfdist on 1, 2 and 4 workers, and tf_keras where there is one."""
    chosen = [Variant(Team("keras", "ps keras"))]
    chosen += [Variant(Team(f"tfdist {n}", "ps tfdist", pinned=False), n) for n in (1, 2, 4)]
    if tf_keras_python:
        for legacy, steps in itertools.product((False, True), (1, 10)):
            name = f"{ps_report.LEGACY if legacy else ps_report.PEER}, {steps} a call"
            team = Team(name, "ps tf_keras", python=tf_keras_python, pinned=False)
            chosen.append(Variant(team, 2, steps, legacy))
    return chosen


def measure(variant: Variant, model: str, table: models.Table, options: argparse.Namespace) -> ps_report.Figures | None:
    """One variant with one model, in processes that end with it; None, and a message, where it failed."""
    setting = Setting(model, *variant[1:], table)
    quiet.wait(QUIET, options.patience)
    try:
        with Teams([variant.team], options.show_output, options.deadline) as running:
            facts = running.call(variant.team, "prepare", setting)[0]
            with quiet.Others([*running.pids(variant.team), *facts["pids"]]) as busy:
                first = running.call(variant.team, "first", options.first)[0]
                steady = running.call(variant.team, "steady", options.updates)[0]
    except RuntimeError as error:
        print(f"{model}, {variant.team.name}: FAILED, and is left out: {error}", file=sys.stderr, flush=True)
        return None
    return ps_report.Figures(steady["updates_per_s"], first, steady["bytes_an_update"], busy.cores)


def speeds(options: argparse.Namespace, chosen: list[Variant], started: float) -> dict[str, ps_report.Turns]:
    """All variants with all models: by model and variant one measurement a turn."""
    results: dict[str, ps_report.Turns] = {}
    for model in options.models:
        results[model] = {variant.team.name: [] for variant in chosen}
        for turn in range(options.turns):
            # Forwards, then backwards: a machine that slows down or speeds up favours nobody.
            for variant in chosen if turn % 2 == 0 else reversed(chosen):
                got = measure(variant, model, models.Table(options.table_rows), options)
                results[model][variant.team.name].append(got)
        ps_report.show_progress(model, results[model], time.time() - started)
    return results


def traffic(options: argparse.Namespace) -> dict[int, list[ps_report.Figures | None]]:
    """tfdist on 2 workers with `wide`, by the number of ids a sample."""
    two = next(variant for variant in variants(None) if variant.workers == 2)
    return {ids: [measure(two, "wide", models.Table(options.table_rows, ids), options)] for ids in IDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.PS_NAMES, default=list(models.PS_NAMES))
    parser.add_argument("--first", type=int, default=200, help="updates of the fit that is timed as a whole")
    parser.add_argument("--updates", type=int, default=400, help="updates of the fit whose middle is looked at")
    parser.add_argument("--turns", type=int, default=3, help="turns of each variant")
    parser.add_argument("--table-rows", type=int, default=models.Table().rows, help="rows of the Embedding of `wide`")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds a measurement waits for quiet")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds of a fit")
    parser.add_argument("--without-tf-keras", action="store_true")
    parser.add_argument("--tf-keras-python", metavar="PATH", help="an interpreter with tf_keras (default: this one)")
    parser.add_argument("--json", type=Path, default=report.RESULTS / "parameter_server.json", help="where to write")
    parser.add_argument("--show-output", action="store_true", help="show what the variants print")
    options = parser.parse_args()

    python = None if options.without_tf_keras else report.python_with("tf_keras", options.tf_keras_python, "psutil")
    started = time.time()
    about = report.surroundings(tf_keras=python)
    results = speeds(options, variants(python), started)
    bytes_by_ids = traffic(options) if "wide" in options.models else {}
    ps_report.parameter_server(results, bytes_by_ids, options, {**about, "seconds": round(time.time() - started)})


if __name__ == "__main__":
    main()
