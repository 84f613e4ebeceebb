"""Tables of `benchmarks/model_parallel.py`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks import report

STAGES = 2
OF_IDEAL = 0.85  # to reach with 8 micro-batches
AUTOMATIC = 0.95  # of the speed of the best manual cut


class Case(NamedTuple):
    """One thing to measure: which team, under which name, which layers, and how they are cut."""

    team: str
    name: str
    widths: list[int]
    how: dict[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        return self.team, self.name


class Turn(NamedTuple):
    """What a team said of one turn."""

    step: float  # seconds, the median of its slowest process
    processor: list[float]  # seconds of a step, by process
    others: float  # cores that other programs kept busy meanwhile

    @classmethod
    def of(cls, told: Sequence[dict[str, Any]], others: float) -> Turn:
        step = max(median(one["seconds"]) for one in told)
        return cls(step, [used for one in told for used in one["processor"]], others)


Turns = dict[tuple[str, str], list[Turn]]


def ideal(alone: float, micros: int) -> float:
    """Seconds of a step without any cost of cutting: the pipeline fills and empties, and nothing else waits."""
    return alone * (micros + STAGES - 1) / (STAGES * micros)


def of_ideal(alone: Sequence[Turn], cut: Sequence[Turn], micros: int) -> float:
    """The median over turns of ideal over measured time."""
    return median(ideal(a.step, micros) / c.step for a, c in zip(alone, cut, strict=True))


def over_best(turns: Sequence[Sequence[Turn]], one: Sequence[Turn]) -> float:
    """The speed of `one` over that of the cut whose median over turns is best: the median over turns."""
    best = min(turns, key=_middle)
    return median(b.step / o.step for b, o in zip(best, one, strict=True))


def _middle(turns: Sequence[Turn]) -> float:
    return median(turn.step for turn in turns)


def _ms(turns: Sequence[Turn]) -> str:
    return f"{_middle(turns) * 1e3:.0f}"


def write(
    turns: Turns, cuts: dict[tuple[str, str], Any], options: argparse.Namespace, about: dict[str, Any]
) -> None:
    """Prints the tables; writes JSON, and markdown beside it."""
    heads = ["m", "ms", "of the ideal", "one core ms", "of its ideal", "processor ms", "torch ms", "of its ideal"]
    rows = [[*heads, "others' cores"]]
    fractions, same = {}, {}
    alone, torch = turns["one process", "even"], turns.get(("torch 1", "even"))
    for m in options.micros:
        cut, peer = turns["tfdist", f"even, m = {m}"], turns.get(("torch 2", f"even, m = {m}"))
        slowly = turns["one core", f"even, m = {m}"]
        fractions[m], same[m] = of_ideal(alone, cut, m), of_ideal(slowly, cut, m)
        used = [median(each) * 1e3 for each in zip(*(turn.processor for turn in cut), strict=True)]
        rows.append(
            [
                str(m),
                _ms(cut),
                report.against(fractions[m], OF_IDEAL if m == 8 else None),
                _ms(slowly),
                f"{same[m]:.2f}",
                " + ".join(f"{value:.0f}" for value in used),
                _ms(peer) if peer else "-",
                f"{of_ideal(torch, peer, m):.2f}" if torch and peer else "-",
                f"{median(turn.others for turn in cut):.2f}",
            ]
        )
    uneven = {name: got for (team, name), got in turns.items() if team == "tfdist" and name.startswith("uneven")}
    automatic = uneven.pop("uneven, automatic")
    ratio = over_best(list(uneven.values()), automatic)
    best = min(_middle(got) for got in uneven.values())
    other = [["cut", "ms", "speed over the best"]]
    other += [[name[8:], _ms(got), f"{best / _middle(got):.2f}"] for name, got in uneven.items()]
    chosen = cuts["tfdist", "uneven, automatic"]
    other.append([f"automatic: {chosen} first", _ms(automatic), report.against(ratio, AUTOMATIC)])
    one = f"one process: {_ms(alone)} ms" + (f"; torch: {_ms(torch)} ms" if torch else "")
    report.write(
        options.json,
        {**about, "command": shlex.join(["python", *sys.argv])},
        [
            (f"8 Dense(1024), 4 on each of two processes, batch {options.batch}, {options.schedule}; {one}", rows),
            ("Layers of different widths, cut into two at every place, and automatically; m = 8", other),
        ],
        {
            "of_ideal": fractions,
            "of_ideal_of_one_core_with_micro_batches": same,
            "automatic_over_best": ratio,
            "turns": {f"{team}: {name}": [turn._asdict() for turn in got] for (team, name), got in turns.items()},
        },
    )
