"""Tables and JSON of the measurements, with what they were measured on."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.models import BATCH


class Measured(NamedTuple):
    """One model: by team one figure a turn, and what the teams say of themselves."""

    seconds: dict[str, list[float]]  # of a step
    others: dict[str, list[float]]  # cores that other programs kept busy meanwhile
    processor: dict[str, list[float]]  # CPU seconds of a step and rank, start and end of `fit` included
    facts: dict[str, dict[str, Any]]


RESULTS = Path(__file__).resolve().parent / "results"
# To reach; benchmarks/README.md says what each means.
ONE_RANK = 0.98  # speed of tfdist on one rank over plain Keras
AGAINST_LOOP = {"deep": 1.5, "mlp": 1.05, "cnn": 1.05, "transformer": 1.05}
EFFICIENCY = {"deep": 0.55, "mlp": 0.50, "cnn": 0.90}


def python_with(package: str, asked: str | None, beside: str = "numpy") -> str | None:
    """The interpreter to run a peer with: `asked`, or this one, or None where this one has no such package."""
    if asked is None:
        return sys.executable if importlib.util.find_spec(package) else None
    if subprocess.run([asked, "-c", f"import {package}, {beside}"], capture_output=True).returncode:
        option = f"--{package.replace('_', '-')}-python"
        raise SystemExit(
            f"{option} {asked}: it has no {package} or no {beside}: {asked} -m pip install {package} {beside}"
        )
    return asked


def show_progress(model: str, measured: Measured, passed: float) -> None:
    line = ", ".join(f"{name} {median(s) * 1e3:.1f}" for name, s in measured.seconds.items())
    noise = median(turn for turns in measured.others.values() for turn in turns)
    print(f"[{passed:4.0f} s] {model}, ms a step: {line}; other programs used {noise:.2f} cores", flush=True)


def ratios(seconds: dict[str, list[float]], tail: str = "") -> dict[str, float]:
    """The figures of one controller."""
    return {
        "one rank / Keras": _over(seconds, "keras", "tfdist 1"),
        "two ranks / loop": _over(seconds, f"released 2{tail}", f"tfdist 2{tail}"),
        "two ranks / loop on tfdist's Horovod": _over(seconds, f"horovod 2{tail}", f"tfdist 2{tail}"),
        "efficiency": _over(seconds, "tfdist 1", f"tfdist 2{tail}"),
    }


def _over(seconds: dict[str, list[float]], a: str, b: str) -> float:
    """The median over turns of the ratio within a turn, in which both met the same machine."""
    turns = min(len(seconds[a]), len(seconds[b]))
    return median(x / y for x, y in zip(_by_turn(seconds[a], turns), _by_turn(seconds[b], turns), strict=True))


def _by_turn(seconds: list[float], turns: int) -> list[float]:
    """One figure a turn: the median of a variant's processes."""
    each = len(seconds) // turns
    return [median(seconds[turn * each : (turn + 1) * each]) for turn in range(turns)]


def ring(results: dict[str, Measured], options: argparse.Namespace, about: dict[str, Any]) -> None:
    """Prints the tables of `benchmarks/ring.py`; writes JSON, and markdown beside it."""
    names = list(next(iter(results.values())).seconds)
    speed = [["model", *names, "others' cores"]]
    loops = ("two ranks / loop on released Horovod", "... on tfdist's Horovod")
    compared = [["model", "controller", "one rank / Keras", *loops, "efficiency", "DDP's"]]
    figures: dict[str, Any] = {}
    for model, measured in results.items():
        seconds, others = measured.seconds, measured.others
        steps = [(median(seconds[name]), 2 if " 2" in name else 1) for name in names]
        noise = median(turn for turns in others.values() for turn in turns)
        speed.append([model, *(f"{s * 1e3:.1f} ms, {n * BATCH / s:.0f}/s" for s, n in steps), f"{noise:.2f}"])
        for controller in options.controller:
            got = ratios(seconds, "" if controller == "gloo" else f" {controller}")
            figures.setdefault(model, {})[controller] = got
            targets = (ONE_RANK, AGAINST_LOOP[model], None, EFFICIENCY.get(model))
            if controller != "gloo":
                targets = (None,) * 4
            cells = [against(value, target) for value, target in zip(got.values(), targets, strict=True)]
            ddp = f"{_over(seconds, 'torch 1', 'torch 2'):.2f}" if "torch 2" in seconds else "-"
            compared.append([model, controller, *cells, ddp])
    titles = (
        f"Median step, samples/s of all ranks together; one core a rank, {BATCH} samples a rank",
        "Ratios, higher is better; in brackets what is to be reached",
    )
    write(
        options.json or RESULTS / "ring.json",
        {**about, "command": shlex.join(["python", *sys.argv])},
        list(zip(titles, (speed, compared), strict=True)),
        {
            "ratios": figures,
            "step_seconds": {model: m.seconds for model, m in results.items()},
            "processor_seconds": {model: m.processor for model, m in results.items()},
            "others_cores": {model: m.others for model, m in results.items()},
            "facts": {model: m.facts for model, m in results.items()},
        },
    )


def against(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({target:.2f}{'' if value >= target else ', short'})"


def surroundings(**peers: str | None) -> dict[str, Any]:
    """What a figure depends on: versions, machine, load at the start, date; of a peer, by its interpreter, too."""
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    for package, python in peers.items():
        if python:
            ask = [python, "-c", f"import {package}; print({package}.__version__)"]
            found[package] = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _processor(),
        "load_average_of_the_last_minute": os.getloadavg()[0],
        "versions": found,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")


def write(
    path: Path, about: dict[str, Any], tables: list[tuple[str, list[list[str]]]], figures: dict[str, Any]
) -> None:
    """Prints tables (first row: heads), writes them as markdown to `path`.md and all figures as JSON to `path`."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    text = [f"# {path.stem}\n"]
    text += [f"- {key.replace('_', ' ')}: {_plain(value)}" for key, value in about.items()]
    for title, (heads, *rows) in tables:
        table = Table(title=title, title_justify="left")
        for index, head in enumerate(heads):
            table.add_column(head, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        text += ["", f"## {title}", "", _line(heads), _line(["---"] * len(heads)), *map(_line, rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about, **figures}, indent=1) + "\n")
    path.with_suffix(".md").write_text("\n".join(text) + "\n")
    console.print(f"written: {path} and {path.with_suffix('.md').name}", highlight=False)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
