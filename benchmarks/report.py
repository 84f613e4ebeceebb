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
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.models import BATCH

RESULTS = Path(__file__).resolve().parent / "results"
# To reach; docs/benchmarks.md says what each means.
ONE_RANK = 0.98  # speed of tfdist on one rank over plain Keras
AGAINST_LOOP = {"deep": 1.5, "mlp": 1.05, "cnn": 1.05, "transformer": 1.05}
EFFICIENCY = {"deep": 0.55, "mlp": 0.50, "cnn": 0.90}


def python_with_torch(asked: str | None) -> str | None:
    """The interpreter to run PyTorch with, or None where there is none."""
    if asked is None:
        return sys.executable if importlib.util.find_spec("torch") else None
    if subprocess.run([asked, "-c", "import torch, numpy"], capture_output=True).returncode:
        raise SystemExit(f"--torch-python {asked}: it has no torch or no numpy: {asked} -m pip install torch numpy")
    return asked


def show_progress(model: str, seconds: dict[str, list[float]], passed: float) -> None:
    line = ", ".join(f"{name} {median(s) * 1e3:.1f}" for name, s in seconds.items())
    print(f"[{passed:4.0f} s] {model}, ms a step: {line}", flush=True)


def ratios(seconds: dict[str, list[float]], tail: str = "") -> dict[str, float]:
    """The three figures with targets: each the median over turns of the ratio within a turn."""

    def over(a: str, b: str) -> float:
        return median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))

    return {
        "one rank / Keras": over("keras", "tfdist 1"),
        "two ranks / loop": over(f"horovod 2{tail}", f"tfdist 2{tail}"),
        "efficiency": over("tfdist 1", f"tfdist 2{tail}"),
    }


def ring(
    results: dict[str, tuple[dict[str, list[float]], dict]],
    options: argparse.Namespace,
    passed: float,
    torch_python: str | None,
) -> None:
    """Prints the tables of `benchmarks/ring.py`; writes JSON, and markdown beside it."""
    names = list(next(iter(results.values()))[0])
    speed = [["model", *names]]
    for model, (seconds, _) in results.items():
        cells = []
        for name in names:
            ranks = 2 if " 2" in name else 1
            step = median(seconds[name])
            cells.append(f"{step * 1e3:.1f} ms, {ranks * BATCH / step:.0f}/s")
        speed.append([model, *cells])
    compared = [["model", "controller", "one rank / Keras", "two ranks / hand-written loop", "efficiency", "DDP's"]]
    figures: dict[str, Any] = {}
    for model, (seconds, _) in results.items():
        for controller in options.controller:
            got = ratios(seconds, "" if controller == "gloo" else f" {controller}")
            figures.setdefault(model, {})[controller] = got
            judged = controller == "gloo"
            torch = "-"
            if torch_python:
                torch = f"{median(a / b for a, b in zip(seconds['torch 1'], seconds['torch 2'], strict=True)):.2f}"
            compared.append(
                [
                    model,
                    controller,
                    _against(got["one rank / Keras"], ONE_RANK if judged else None),
                    _against(got["two ranks / loop"], AGAINST_LOOP[model] if judged else None),
                    _against(got["efficiency"], EFFICIENCY.get(model) if judged else None),
                    torch,
                ]
            )
    titles = (
        f"Median step, samples/s of all ranks together; one core a rank, {BATCH} samples a rank",
        "Ratios, higher is better; in brackets what is to be reached",
    )
    about = surroundings(torch_python)
    about |= {"command": shlex.join(["python", *sys.argv]), "seconds": round(passed)}
    write(
        options.json or RESULTS / "ring.json",
        about,
        list(zip(titles, (speed, compared), strict=True)),
        {
            "ratios": figures,
            "step_seconds": {model: seconds for model, (seconds, _) in results.items()},
            "facts": {model: facts for model, (_, facts) in results.items()},
        },
    )


def _against(value: float, target: float | None) -> str:
    if target is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({target:.2f}{'' if value >= target else ', short'})"


def surroundings(torch_python: str | None = None) -> dict[str, Any]:
    """What a figure depends on: versions, machine, load at the start, date."""
    found = {"python": platform.python_version()}
    for package in ("tensorflow", "tensorflow-cpu", "keras", "horovod", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch_python:
        ask = [torch_python, "-c", "import torch; print(torch.__version__)"]
        found["torch"] = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
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
