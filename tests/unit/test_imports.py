"""The rule of the rooms: who may import whom, and what a pure module must not bring along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tfdist").rglob("*.py"))

# Modules that plan and judge. They must be importable where neither TensorFlow nor Horovod is.
PURE = [
    "tfdist",
    "tfdist.build.job",
    "tfdist.cli.build_horovod",
    "tfdist.cli.doctor",
    "tfdist.cli.main",
    "tfdist.cli.plan",
    "tfdist.cli.render",
    "tfdist.cli.run",
    "tfdist.cluster",
    "tfdist.comm.buckets",
    "tfdist.doctor.findings",
    "tfdist.doctor.probe",
    "tfdist.launch.health",
    "tfdist.launch.plan",
    "tfdist.meeting",
    "tfdist.planner.partition",
    "tfdist.planner.picture",
    "tfdist.planner.predict",
    "tfdist.planner.telling",
    "tfdist.planner.schedule",
    "tfdist.ps.consistency",
    "tfdist.ps.layout",
    "tfdist.ps.pacing",
    "tfdist.slurm",
    "tfdist.tf_config",
]
HEAVY = ("tensorflow", "horovod", "keras")


def imported(file):
    """Every module name that the file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(*names):
    """Files, relative to tfdist/, that import one of the modules or something below it."""
    return {
        str(file.relative_to(ROOT / "tfdist"))
        for file in FILES
        for module in imported(file)
        if any(module == name or module.startswith(f"{name}.") for name in names)
    }


def test_one_file_imports_horovods_operations():
    # launch/horovodrun.py is a program, run in a process of its own: Horovod's launcher with a short cut.
    # comm/hall.py takes the launcher's key-value store, plain Python.
    assert importers("horovod") <= {"comm/hall.py", "comm/horovod.py", "launch/horovodrun.py"}
    assert importers("horovod.tensorflow", "horovod.common") <= {"comm/horovod.py"}


def test_one_file_imports_private_parts_of_tensorflow_and_keras():
    assert importers("tensorflow.python", "keras.src", "tensorflow.compiler") <= {"private.py"}


def test_nothing_imports_the_old_keras():
    assert importers("tf_keras", "tensorflow.keras") == set()


# One process for all: each would take the interpreter's start-up otherwise.
SCRIPT = f"""
import importlib, sys
for name in {PURE!r}:
    importlib.import_module(name)
    heavy = [module for module in {HEAVY!r} if module in sys.modules]
    if heavy:
        sys.exit(f"importing {{name}} brings in {{', '.join(heavy)}}")
"""


def test_pure_modules_bring_in_neither_tensorflow_nor_horovod():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_verb():
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.cli.main", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    for verb in ("run", "build-horovod", "doctor", "plan", "render"):
        assert f"\n  {verb} " in done.stdout


def test_unknown_verb_is_answered_with_the_known_ones():
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.cli.main", "biuld-horovod"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "There is no verb 'biuld-horovod'. Known: build-horovod, doctor, plan, render, run" in done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_files_stay_small_and_have_a_name_of_their_own(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 350
    assert file.name not in ("utils.py", "util.py", "helpers.py", "common.py", "misc.py")
