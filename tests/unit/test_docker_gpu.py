"""docker/Dockerfile.gpu, read: its default images cannot be pulled wherever the tests run."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from tfdist.build import gpu, versions

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docker" / "Dockerfile.gpu"


def instructions(file):
    """(instruction, its text on one line) in order, comments left out."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", file.read_text(encoding="utf-8")))
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name, " ".join(rest.split())


def stages(file):
    """Instructions by stage; those before the first FROM as "global"."""
    found, name = {"global": []}, "global"
    for instruction, text in instructions(file):
        if instruction == "FROM":
            name = text.partition(" AS ")[2] or f"after {name}"
            found[name] = []
        found[name].append((instruction, text))
    return found


STAGES = stages(FILE)
ARGS = dict(text.split("=", 1) for name, text in STAGES["global"] if name == "ARG")
BUILDER, LAST = STAGES["builder"], STAGES["runtime"]


def test_compiles_in_the_first_stage_and_runs_in_the_last():
    assert list(STAGES) == ["global", "builder", "runtime"]
    assert BUILDER[0] == ("FROM", "${BASE_IMAGE} AS builder")
    assert LAST[0] == ("FROM", "${RUNTIME_IMAGE} AS runtime")
    assert ("RUN", "python -m tfdist.cli.main build-horovod --gpu") in BUILDER
    assert ("COPY", "--from=builder /opt/venv /opt/venv") in LAST


def test_no_compiler_in_the_last_stage():
    assert "-devel-" in ARGS["BASE_IMAGE"]
    assert "-devel" not in ARGS["RUNTIME_IMAGE"]
    installed = next(text for _, text in LAST if "apt-get install" in text)
    assert re.findall(r"install -y --no-install-recommends (.+?) &&", installed) == ["python3"]


def test_the_last_user_is_not_root():
    users = [text for name, text in LAST if name == "USER"]
    assert users == ["tfdist"]
    assert any("useradd --create-home --uid 1000 tfdist" in text for _, text in LAST)


def test_cuda_of_the_images_is_tensorflows():
    """The extra of the TensorFlow that is installed here names the wheels of one major of CUDA."""
    name = next(n for n in versions.TENSORFLOW_DISTRIBUTIONS if _installed(n))
    wheel = gpu.nccl_requirement(importlib.metadata.requires(name))
    major = re.match(r"nvidia-nccl-cu(\d+)", wheel)[1]
    for argument in ("BASE_IMAGE", "RUNTIME_IMAGE"):
        assert ARGS[argument].startswith(f"nvidia/cuda:{major}.")
    assert ARGS["BASE_IMAGE"].replace("-devel-", "-runtime-") == ARGS["RUNTIME_IMAGE"]


def test_tensorflow_is_the_pinned_one():
    given = dict(text.split("=", 1) for name, text in BUILDER if name == "ARG")
    pins = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntensorflow-cpu=={given['TENSORFLOW']}\n" in pins


def test_what_is_copied_is_there():
    copies = [text for stage in (BUILDER, LAST) for name, text in stage if name == "COPY"]
    for text in copies:
        if not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source


def test_nothing_secret_and_no_script_from_elsewhere():
    text = FILE.read_text(encoding="utf-8").lower()
    for word in ("password", "token", "secret", "id_rsa", "curl ", "wget ", "http://", "https://"):
        assert word not in text


def test_it_differs_from_the_one_for_cpus_in_the_gpu_alone():
    cpu = ROOT / "docker" / "Dockerfile"
    if not cpu.exists():
        pytest.skip("docker/Dockerfile is not there")
    other = stages(cpu)

    def common(stage):
        return [i for i in stage if i[0] in ("WORKDIR", "USER", "HEALTHCHECK", "CMD", "ENV", "COPY")]

    assert common(BUILDER) == common(other["builder"])
    assert common(LAST) == common(other["runtime"])


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
