"""Has two processes sum a tensor with the Horovod that is installed, through its own launcher."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tfdist.build import explain, process
from tfdist.build.errors import BuildError

RANKS = 2
DEADLINE = 240.0

# A string, run by processes of its own: within tfdist only comm/horovod.py imports Horovod.
SCRIPT = """
import json, pathlib, sys
import tensorflow as tf
import horovod.tensorflow as hvd

hvd.init()
mine = tf.range(4099, dtype=tf.float32) * (hvd.rank() + 1)
total = hvd.allreduce(mine, op=hvd.Sum, name="tfdist.check")
fact = {
    "size": hvd.size(),
    "gloo": bool(hvd.gloo_enabled()),
    "mpi": bool(hvd.mpi_enabled()),
    "last": float(total[-1]),
    "error": float(tf.reduce_max(tf.abs(total - 3.0 * tf.range(4099, dtype=tf.float32)))),
}
pathlib.Path(sys.argv[1], f"rank{hvd.rank()}.json").write_text(json.dumps(fact))
hvd.shutdown()
"""


def command(python: str, controller: str, script: str, out: str) -> list[str]:
    """The launcher's command for `controller`, "gloo" or "mpi"."""
    launch = [python, "-m", "horovod.runner.launch", f"--{controller}", "-np", str(RANKS)]
    return [*launch, python, script, out]


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Quiet, on the CPU, and free of another job's Horovod settings."""
    env = {name: value for name, value in inherited.items() if not name.startswith("HOROVOD_")}
    return {**env, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def judge(controller: str, facts: list[dict[str, object]]) -> str | None:
    """What is wrong with the facts that the ranks wrote, None if nothing."""
    if len(facts) != RANKS:
        return f"{len(facts)} of {RANKS} ranks wrote a result"
    for rank, fact in enumerate(facts):
        if fact["size"] != RANKS:
            return f"rank {rank} saw {fact['size']} ranks instead of {RANKS}"
        if not fact[controller]:
            return f"rank {rank} did not run on the {controller} controller"
        if fact["error"] != 0.0 or fact["last"] != 3.0 * 4098:
            return f"rank {rank} got a wrong sum (largest error {fact['error']})"
    return None


def all_reduce(controller: str, log: Path) -> None:
    """Run the check.

    Raises:
        BuildError: it failed; the log's last lines are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-check-") as folder:
        script = Path(folder, "check.py")
        script.write_text(SCRIPT, encoding="utf-8")
        start = log.stat().st_size if log.exists() else 0
        code = process.run(
            command(sys.executable, controller, str(script), folder),
            log=log,
            env=environment(os.environ),
            deadline=DEADLINE,
            cwd=Path(folder),
        )
        files = sorted(Path(folder).glob("rank*.json"))
        wrong = judge(controller, [json.loads(file.read_text()) for file in files])
    if code == 0 and wrong is None:
        return
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(start)
        text = file.read()
    remedy = (
        "Build without MPI (`tfdist build-horovod --without-mpi`), or mend the MPI installation."
        if controller == "mpi"
        else "Build it again (`tfdist build-horovod --rebuild`); `tfdist doctor` says more."
    )
    what = f"sum a tensor over {RANKS} processes with the {controller} controller"
    detail = f" {wrong}." if code == 0 and wrong else ""
    raise BuildError(f"{explain.failure(what, code, log, text)}{detail}\n{remedy}")


def can_check(controller: str) -> bool:
    """Whether the controller's launcher is here: MPI's is a package of its own on Debian."""
    return controller != "mpi" or shutil.which("mpirun") is not None
