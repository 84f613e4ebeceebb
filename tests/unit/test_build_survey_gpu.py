"""The survey for a build with NCCL, on toolkits and wheels that the tests lay out."""

import importlib.metadata
import os

import pytest

from tfdist.build import steps, survey_gpu
from tfdist.build.errors import BuildError

NCCL = "nvidia-nccl-cu12<3.0,>=2.27.7"
VERSION = "Cuda compilation tools, release 12.4, V12.4.131\n"


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)


@pytest.fixture
def cuda(tmp_path):
    """A toolkit as NVIDIA lays it out, whose nvcc answers what the real one does."""
    home = tmp_path / "cuda-12.4"
    program(
        home / "bin" / "nvcc",
        f"""case "$1" in
--version) echo 'nvcc: NVIDIA (R) Cuda compiler driver'; echo '{VERSION.strip()}';;
--list-gpu-arch) echo compute_90; echo compute_80;;
--dryrun) echo '#$ _NVVM_BRANCH_=nvvm' >&2; echo '#$ TOP={home}/bin/..' >&2;;
esac
""",
    )
    libraries = ("libcudart.so", "libcudart_static.a", "libcudadevrt.a")
    for file in ("include/cuda_runtime.h", *(f"lib64/{name}" for name in libraries)):
        (home / file).parent.mkdir(exist_ok=True)
        (home / file).write_text("")
    return home


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_that_the_user_names_goes_first(cuda, variable):
    assert survey_gpu.toolkit({variable: "/named", "PATH": f"{cuda}/bin"}) == "/named"
    assert survey_gpu.nvcc_version("/named") is None


def test_toolkit_behind_a_script_on_path(cuda, tmp_path):
    program(tmp_path / "bin" / "nvcc", f'exec {cuda}/bin/nvcc "$@"\n')
    assert survey_gpu.toolkit({"PATH": str(tmp_path / "bin")}) == str(cuda)


def test_toolkit_behind_a_link_where_nvcc_does_not_say(cuda, tmp_path):
    program(cuda / "bin" / "nvcc", f"echo '{VERSION.strip()}'\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(cuda / "bin" / "nvcc")
    assert survey_gpu.toolkit({"PATH": str(tmp_path / "bin")}) == str(cuda)


def test_no_toolkit(monkeypatch, tmp_path):
    monkeypatch.setattr(survey_gpu, "_DEFAULT_HOME", str(tmp_path / "none"))
    assert survey_gpu.toolkit({"PATH": "/nowhere"}) is None
    assert survey_gpu.nvcc_version(None) is None


def test_what_the_toolkit_has(cuda, monkeypatch):
    info = {
        "is_cuda_build": True,
        "cuda_version": "12.5.1",
        "cuda_compute_capabilities": ["sm_80", "compute_90"],
    }
    monkeypatch.setattr(survey_gpu, "_build_info", lambda env: info)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: [f'{NCCL}; extra == "and-cuda"'])
    env = {"CUDA_HOME": str(cuda), "PATH": os.defpath, "NVCC_APPEND_FLAGS": "-v"}
    found = survey_gpu.look("tensorflow", env)
    assert (found.cuda, found.capabilities) == ("12.5.1", ("sm_80", "compute_90"))
    assert (found.home, found.nvcc, found.architectures) == (str(cuda), "12.4.131", (80, 90))
    assert (found.nccl, found.nccl_version) == (NCCL, None)
    assert found.missing == ()
    assert found.flags == {"NVCC_APPEND_FLAGS": "-v"}
    (cuda / "include" / "cuda_runtime.h").unlink()
    (cuda / "lib64" / "libcudart.so").unlink()
    assert survey_gpu.look("tensorflow", env).missing == ("cuda_runtime.h", "libcudart.so")


def test_headers_by_target_count(cuda):
    (cuda / "targets" / "x86_64-linux").mkdir(parents=True)
    (cuda / "include").rename(cuda / "targets" / "x86_64-linux" / "include")
    (cuda / "lib64").rename(cuda / "targets" / "x86_64-linux" / "lib")
    assert survey_gpu._missing(str(cuda)) == ()


def test_the_installed_tensorflow_is_asked():
    info = survey_gpu._build_info(os.environ)
    assert isinstance(info["is_cuda_build"], bool)


def test_tensorflow_that_cannot_be_imported(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no luck')\n")
    with pytest.raises(BuildError, match="cannot be imported.*ImportError: no luck.*doctor"):
        survey_gpu._build_info({**os.environ, "PYTHONPATH": str(tmp_path)})


def test_gpus_are_counted(tmp_path):
    lines = "GPU 0: NVIDIA H100 (UUID: GPU-1)\nGPU 1: NVIDIA H100 (UUID: GPU-2)"
    program(tmp_path / "nvidia-smi", f"/bin/cat <<'END'\n{lines}\nEND\n")
    env = {"PATH": str(tmp_path)}
    assert survey_gpu.gpus(env) == ("GPU 0: NVIDIA H100", "GPU 1: NVIDIA H100")
    assert survey_gpu.gpus({"PATH": "/nowhere"}) == ()
    counts = {None: 2, "": 0, "1": 1, "0,1": 2, "0,1,2,3": 2}
    for shown, count in counts.items():
        extra = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
        assert survey_gpu.usable_gpus({**env, **extra}) == count


class Wheel:
    """An installed wheel of NCCL, as importlib.metadata shows it."""

    def __init__(self, folder, names):
        self.files = []
        for name in names:
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")
            path = importlib.metadata.PackagePath(name)
            path.dist = self
            self.files.append(path)
        self._folder = folder

    def locate_file(self, path):
        return self._folder / path


def installs(monkeypatch, wheel):
    def files(name):
        assert name == "nvidia-nccl-cu12"
        if wheel is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return wheel.files

    monkeypatch.setattr(importlib.metadata, "files", files)


WHOLE = ("nvidia/nccl/include/nccl.h", "nvidia/nccl/lib/libnccl.so.2")


def test_nccl_is_found_in_its_wheel(monkeypatch, tmp_path):
    installs(monkeypatch, Wheel(tmp_path, WHOLE))
    root = tmp_path / "nvidia" / "nccl"
    assert survey_gpu.nccl_directory(NCCL) == root
    assert steps.bring_nccl(NCCL, tmp_path, tmp_path / "log") == {
        "HOROVOD_NCCL_INCLUDE": f"{root}/include",
        "HOROVOD_NCCL_LIB": f"{root}/lib",
    }


def test_missing_nccl_is_installed(monkeypatch, tmp_path):
    installs(monkeypatch, None)

    def pip(argv, **_options):
        assert argv[-2:] == ["install", NCCL]
        installs(monkeypatch, Wheel(tmp_path, WHOLE))
        return 0

    monkeypatch.setattr("tfdist.build.process.run", pip)
    assert "HOROVOD_NCCL_LIB" in steps.bring_nccl(NCCL, tmp_path, tmp_path / "log")


@pytest.mark.parametrize("names", [WHOLE[:1], WHOLE[1:], ()], ids=str)
def test_broken_nccl_is_named(monkeypatch, tmp_path, names):
    installs(monkeypatch, Wheel(tmp_path, names))
    monkeypatch.setattr("tfdist.build.process.run", lambda argv, **_options: 0)
    with pytest.raises(BuildError, match="no libnccl.so.2 beside it.*--force-reinstall"):
        steps.bring_nccl(NCCL, tmp_path, tmp_path / "log")
