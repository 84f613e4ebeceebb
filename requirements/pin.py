"""Writes constraints.txt: the newest releases that fit setup.cfg, for every supported Python.

Run by `make pins`. pip resolves for a Python it does not run on (`--python-version`), from wheels
alone; where the Pythons differ, the lines carry markers.
"""

from __future__ import annotations

import configparser
import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = ("cpu", "dev")
HEADER = "# Written by requirements/pin.py (`make pins`). The ranges are in setup.cfg.\n"


def wanted() -> list[str]:
    """The requirements of setup.cfg, with the extras that `make` installs."""
    config = configparser.ConfigParser()
    config.read(HERE.parent / "setup.cfg")
    texts = [config["options"]["install_requires"]]
    texts += [config["options.extras_require"][extra] for extra in EXTRAS]
    return [line for text in texts for line in text.split("\n") if line]


def resolve(python: str) -> dict[str, str]:
    """Versions by distribution name that pip would install on `python`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet"]
        command += ["--ignore-installed", "--only-binary=:all:", "--target", folder]
        command += ["--python-version", python, "--report", str(report), *wanted()]
        subprocess.run(command, check=True)
        items = json.loads(report.read_text())["install"]
    return {
        item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"]
        for item in items
    }


def merge(resolved: dict[str, dict[str, str]]) -> list[str]:
    """The lines of the file, from versions by name by Python."""
    lines = []
    for name in sorted({name for versions in resolved.values() for name in versions}):
        pythons: dict[str, list[str]] = {}
        for python, versions in resolved.items():
            if name in versions:
                pythons.setdefault(versions[name], []).append(python)
        for version, names in pythons.items():
            marker = " or ".join(f"python_version == '{python}'" for python in names)
            # One version wherever it is needed at all: a constraint alone installs nothing.
            lines.append(f"{name}=={version}" + (f"; {marker}" if len(pythons) > 1 else ""))
    return lines


if __name__ == "__main__":
    text = "\n".join(merge({python: resolve(python) for python in PYTHONS}))
    (HERE / "constraints.txt").write_text(f"{HEADER}{text}\n")
