"""Tables of the parameter server's measurements."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks import models, report


class Figures(NamedTuple):
    """One measurement of one variant."""

    updates_per_s: float  # in the middle of a later `fit`
    first_s: float  # the whole first `fit`
    bytes_an_update: float  # on the loopback interface
    others: float  # cores that other programs kept busy meanwhile


Turns = dict[str, list["Figures | None"]]  # by variant; None where it failed

OURS, PEER, LEGACY = "tfdist 2", "tf_keras 2", "tf_keras 2 legacy SGD"  # how the names of the variants begin
# To reach, with 2 workers, over the better of the peer's: updates/s by model, and the whole first `fit`.
SPEED = {"deep": 3.0, "mlp": 1.3, "cnn": 1.3, "wide": 1.5}
WHOLE = 1.5


def _speed(figures: Figures) -> float:
    return figures.updates_per_s


def _quickness(figures: Figures) -> float:
    return 1 / figures.first_s


def over_peer(turns: Turns, what: Callable[[Figures], float], peer: str = PEER) -> float | None:
    """How many times better tfdist with 2 workers is than the better of the peer's two: the median over turns."""
    peers = [figures for name, figures in turns.items() if name.startswith(f"{peer},")]
    ratios = []
    for turn, ours in enumerate(turns[OURS]):
        best = max((what(p[turn]) for p in peers if p[turn] is not None), default=None)
        if ours is not None and best is not None:
            ratios.append(what(ours) / best)
    return median(ratios) if ratios else None


def middle_of(figures: list[Figures | None], what: Callable[[Figures], float]) -> float | None:
    """The median over the turns that did not fail."""
    found = [what(f) for f in figures if f is not None]
    return median(found) if found else None


def show_progress(model: str, turns: Turns, passed: float) -> None:
    cells = [f"{name}: {_cell(middle_of(got, _speed), '.1f')}" for name, got in turns.items()]
    print(f"[{passed:4.0f} s] {model}, updates/s: {'; '.join(cells)}", flush=True)


def parameter_server(
    results: dict[str, Turns],
    by_ids: dict[int, list[Figures | None]],
    options: argparse.Namespace,
    about: dict[str, Any],
) -> None:
    """Prints the tables of `benchmarks/parameter_server.py`; writes JSON, and markdown beside it."""
    names = list(next(iter(results.values())))
    speed, whole = [["model", *names, "others' cores"]], [["model", *names]]
    compared = [["model", *(f"{what}, over {peer}" for peer in (PEER, LEGACY) for what in ("updates/s", "first fit"))]]
    ratios = {}
    for model, turns in results.items():
        noise = [f.others for got in turns.values() for f in got if f is not None]
        cells = [_cell(middle_of(turns[name], _speed), ".1f") for name in names]
        speed.append([model, *cells, f"{median(noise):.2f}" if noise else "-"])
        whole.append([model, *(_cell(middle_of(turns[name], lambda f: f.first_s), ".1f") for name in names)])
        ratios[model] = {
            peer: {"updates/s": over_peer(turns, _speed, peer), "first fit": over_peer(turns, _quickness, peer)}
            for peer in (PEER, LEGACY)
        }
        values = [value for each in ratios[model].values() for value in each.values()]
        targets = zip(values, (SPEED[model], WHOLE) * 2, strict=True)
        compared.append([model, *("-" if v is None else report.against(v, target) for v, target in targets)])
    tables = [
        (f"Updates/s of all workers together, batches of {models.BATCH}", speed),
        (f"Seconds of the first fit, {options.first} updates, set-up included, start of the cluster not", whole),
        (
            "tfdist over tf_keras (the better of 1 and 10 a call), 2 workers; in brackets what is to be reached",
            compared,
        ),
    ]
    if by_ids:
        title = "Bytes an update on the loopback interface: `wide`, tfdist, 2 workers"
        tables.append((f"{title}, a table of {options.table_rows:,} x {models.WIDTH}", _traffic(by_ids)))
    report.write(
        options.json,
        {**about, "pinning": PINNING, "command": shlex.join(["python", *sys.argv])},
        tables,
        {
            "over_tf_keras": ratios,
            "turns": {model: _plain(turns) for model, turns in results.items()},
            "traffic": _plain(by_ids),
        },
    )


PINNING = "worker i on core i % cores, tfdist's and tf_keras' alike; chiefs and ps free; plain Keras on one core"


def _traffic(by_ids: dict[int, list[Figures | None]]) -> list[list[str]]:
    """Rows touched are ids a sample x samples: among a million nearly all differ."""
    rows = [["ids a sample", "ids an update", "kB an update", "bytes for each further id"]]
    last = None
    for ids, figures in by_ids.items():
        touched, moved = ids * models.BATCH, middle_of(figures, lambda f: f.bytes_an_update)
        each = None if last is None or None in (moved, last[1]) else (moved - last[1]) / (touched - last[0])
        rows.append([str(ids), f"{touched:,}", _cell(moved and moved / 1e3, ",.0f"), _cell(each, ",.0f")])
        last = touched, moved
    return rows


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _plain(named: dict[Any, list[Figures | None]]) -> dict[str, list[dict[str, float] | None]]:
    return {str(name): [None if f is None else f._asdict() for f in got] for name, got in named.items()}
