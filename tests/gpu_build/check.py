"""Builds Horovod with NCCL on a machine without a GPU and looks at the result: `make check-gpu-build`.

It makes its own environment with the TensorFlow for GPUs, takes the CUDA 12 toolkit of CUDA_HOME or puts one together
from packages, and has `tfdist build-horovod --gpu` do the rest. It says what was checked, and what only a GPU can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.gpu_build import toolkit, verdict  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def main(folder: Path, tensorflow: str) -> int:
    """Returns the exit code.

    Args:
        folder: of the environment.
        tensorflow: requirement of TensorFlow with CUDA.
    """
    python = folder / "bin" / "python"
    say(f"Environment {folder}: {tensorflow}, without the libraries of CUDA")
    if not python.exists():
        venv.create(folder, with_pip=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    run(*pip, "-c", ROOT / "requirements/constraints.txt", "-e", ROOT, tensorflow)
    env = {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    env["PATH"] = f"{folder / 'bin'}:{env.get('PATH', os.defpath)}"
    if env.get("CUDA_HOME"):
        say(f"CUDA toolkit of CUDA_HOME: {env['CUDA_HOME']}")
    else:
        home = folder / "cuda"
        env["CUDA_HOME"] = str(home)
        if not (home / "lib64/libcudadevrt.a").exists():
            say(f"CUDA toolkit {home}: {toolkit.PACKAGE} of Debian ({toolkit.SUITE}), headers of NVIDIA's wheels")
            toolkit.assemble(home, folder / "cuda-packages")
    tfdist = folder / "bin" / "tfdist"
    # Anew each time: a wheel of the cache would show nothing.
    run(tfdist, "build-horovod", "--gpu", "--rebuild", env=env)
    env["TF_CPP_MIN_LOG_LEVEL"] = "3"
    done = run(python, Path(__file__).with_name("facts.py"), env=env, capture=True)
    facts = json.loads(done.splitlines()[-1])
    found = verdict.problems(facts)
    report = run(tfdist, "doctor", env=env, capture=True, codes=(0, 1))
    if "nccl" not in next(line for line in report.splitlines() if "operations" in line):
        found.append("tfdist doctor does not show NCCL")
    for problem in found:
        say(f"WRONG: {problem}")
    if found:
        return 1
    code = facts["nccl_built"]
    say(
        f"""
Checked, for Horovod {facts["version"]}:
  it compiles and links with NCCL {code // 10000}.{code // 100 % 100}.{code % 100} and nvcc of {env["CUDA_HOME"]}
  it has NCCL's {len(verdict.CLASSES)} operations and code for GPUs; nccl_built() and cuda_built() say so
  it loads, and finds {facts["loaded"][0]} without LD_LIBRARY_PATH
  two processes sum a tensor of the CPU with it
Not checked, as that takes GPUs: any operation of NCCL, the handle of TensorFlow's streams, the kernels."""
    )
    return 0


def run(*argv: object, env: dict[str, str] | None = None, capture: bool = False, codes: tuple[int, ...] = (0,)) -> str:
    """Runs a program, its output shown or returned; ends the check where it fails."""
    pipe = subprocess.PIPE if capture else None
    done = subprocess.run([str(a) for a in argv], env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    if done.returncode not in codes:
        said = (done.stdout or "") + (done.stderr or "")
        raise SystemExit(f"`{' '.join(map(str, argv))}` failed with exit code {done.returncode}.\n{said}")
    return done.stdout or ""


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: python tests/gpu_build/check.py FOLDER TENSORFLOW, as `make check-gpu-build` does")
    sys.exit(main(Path(sys.argv[1]).absolute(), sys.argv[2]))
