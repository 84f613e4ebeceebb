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
device = sys.argv[2]
if device == "GPU":
    tf.config.set_visible_devices(tf.config.list_physical_devices("GPU")[hvd.local_rank()], "GPU")
with tf.device(f"/{device}:0"):
    mine = tf.range(4099, dtype=tf.float32) * (hvd.rank() + 1)
    total = hvd.allreduce(mine, op=hvd.Sum, name="tfdist.check")
fact = {
    "size": hvd.size(),
    "gloo": bool(hvd.gloo_enabled()),
    "mpi": bool(hvd.mpi_enabled()),
    "device": total.device,
    "last": float(total[-1]),
    "error": float(tf.reduce_max(tf.abs(total - 3.0 * tf.range(4099, dtype=tf.float32)))),
}
pathlib.Path(sys.argv[1], f"rank{hvd.rank()}.json").write_text(json.dumps(fact))
hvd.shutdown()
"""


def command(
    python: str, controller: str, script: str, out: str, device: str = "CPU"
) -> list[str]:
    """The launcher's command for `controller`, "gloo" or "mpi", and `device`, "CPU" or "GPU"."""
    launch = [python, "-m", "horovod.runner.launch", f"--{controller}", "-np", str(RANKS)]
    return [*launch, python, script, out, device]


def environment(inherited: Mapping[str, str], device: str = "CPU") -> dict[str, str]:
    """Quiet, on the device, and free of another job's Horovod settings."""
    env = {name: value for name, value in inherited.items() if not name.startswith("HOROVOD_")}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "CPU" else {}
    return {**env, "TF_CPP_MIN_LOG_LEVEL": "3", **hidden}


def judge(controller: str, facts: list[dict[str, object]], device: str = "CPU") -> str | None:
    """What is wrong with the facts that the ranks wrote, None if nothing."""
    if len(facts) != RANKS:
        return f"{len(facts)} of {RANKS} ranks wrote a result"
    for rank, fact in enumerate(facts):
        if fact["size"] != RANKS:
            return f"rank {rank} saw {fact['size']} ranks instead of {RANKS}"
        if not fact[controller]:
            return f"rank {rank} did not run on the {controller} controller"
        if f"{device}:0" not in str(fact["device"]):
            return f"rank {rank} summed on {fact['device']} instead of its {device}"
        if fact["error"] != 0.0 or fact["last"] != 3.0 * 4098:
            return f"rank {rank} got a wrong sum (largest error {fact['error']})"
    return None


def all_reduce(controller: str, log: Path, device: str = "CPU") -> None:
    """Run the check: on the CPU, or by NCCL with a GPU for each process.

    Raises:
        BuildError: it failed; the log's last lines are in the message.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-check-") as folder:
        script = Path(folder, "check.py")
        script.write_text(SCRIPT, encoding="utf-8")
        start = log.stat().st_size if log.exists() else 0
        code = process.run(
            command(sys.executable, controller, str(script), folder, device),
            log=log,
            env=environment(os.environ, device),
            deadline=DEADLINE,
            cwd=Path(folder),
        )
        files = sorted(Path(folder).glob("rank*.json"))
        wrong = judge(controller, [json.loads(file.read_text()) for file in files], device)
    if code == 0 and wrong is None:
        return
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(start)
        text = file.read()
    remedy = (
        "Build without MPI (`tfdist build-horovod --without-mpi`), or mend the MPI installation."
        if controller == "mpi"
        else "Build without NCCL (`tfdist build-horovod`), or see that CUDA and the driver are there "
        "(`nvidia-smi`, `tfdist doctor`); NCCL_DEBUG=INFO has NCCL say more."
        if device == "GPU"
        else "Build it again (`tfdist build-horovod --rebuild`); `tfdist doctor` says more."
    )
    how = f"with the {controller} controller" if device == "CPU" else "on a GPU each by NCCL"
    what = f"sum a tensor over {RANKS} processes {how}"
    detail = f" {wrong}." if code == 0 and wrong else ""
    raise BuildError(f"{explain.failure(what, code, log, text)}{detail}\n{remedy}")


def can_check(controller: str) -> bool:
    """Whether the controller's launcher is here: MPI's is a package of its own on Debian."""
    return controller != "mpi" or shutil.which("mpirun") is not None
