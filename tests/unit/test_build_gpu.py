import dataclasses
import importlib.metadata

import pytest

from tests.helpers.machine import CUDA, GPU_MACHINE, MACHINE
from tfdist.build import gpu, plan
from tfdist.build.edits import EDITS, GPU
from tfdist.build.errors import BuildError
from tfdist.build.plan import make_plan


def changed(**values):
    return dataclasses.replace(CUDA, **values)


def test_plan_of_a_build_with_nccl():
    cpu, made = make_plan(GPU_MACHINE), make_plan(GPU_MACHINE, gpu=CUDA)
    more = dict(made.environment.items() - cpu.environment.items())
    assert more.pop("HOROVOD_LOCAL_VERSION") == f"tf2.21.0.nccl.k{made.key}"
    assert more == {
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_LINK": "SHARED",
        "HOROVOD_BUILD_CUDA_CC_LIST": "60,70,80,89,90",
        "HOROVOD_WITHOUT_NVTX": "1",
        "HOROVOD_CUDA_HOME": "/opt/cuda",
    }
    assert made.edits == EDITS + GPU
    assert made.key != cpu.key
    assert made.controllers == ("gloo", "mpi")
    assert made.runtime == ()


def test_a_build_without_gpus_is_what_it_was():
    made = make_plan(GPU_MACHINE)
    assert made.edits == EDITS
    assert made.gpu is None
    assert not any("NCCL" in name or "CUDA" in name for name in made.environment)


def test_missing_nccl_is_installed_with_horovod():
    made = make_plan(GPU_MACHINE, gpu=changed(nccl_version=None))
    assert made.runtime == ("nvidia-nccl-cu12<3.0,>=2.27.7",)
    assert make_plan(GPU_MACHINE, gpu=changed(nccl_version="2.21.5")).runtime == made.runtime


@pytest.mark.parametrize(
    "change",
    [
        {"nvcc": "12.9.86"},
        {"cuda": "12.9.1"},
        {"nccl": "nvidia-nccl-cu12<3.0,>=2.28"},
        {"capabilities": ("sm_80", "compute_90")},
        {"architectures": (60, 70, 80, 89)},
        {"flags": {"NVCC_APPEND_FLAGS": "-O1"}},
    ],
    ids=str,
)
def test_key_follows_what_the_wheel_depends_on(change):
    made = make_plan(GPU_MACHINE, gpu=changed(**change))
    assert made.key != make_plan(GPU_MACHINE, gpu=CUDA).key


@pytest.mark.parametrize(
    "change",
    [{"home": "/usr/local/cuda"}, {"nccl_version": "2.29.0"}, {"nccl_version": None}],
    ids=str,
)
def test_key_ignores_places_and_what_is_only_linked_to(change):
    made = make_plan(GPU_MACHINE, gpu=changed(**change))
    assert made.key == make_plan(GPU_MACHINE, gpu=CUDA).key


def test_kernels_are_compiled_for_what_tensorflow_is_and_nvcc_knows():
    made = gpu.switches(changed(capabilities=("sm_50", "sm_90a", "compute_120")))
    assert made["HOROVOD_BUILD_CUDA_CC_LIST"] == "50,90"


@pytest.mark.parametrize(
    ("change", "what", "mend"),
    [
        ({"cuda": None}, "tensorflow 2.21.0 is built without CUDA", '"tensorflow[and-cuda]==2.21.0"'),
        ({"nccl": None}, "is built without CUDA", "or build without `--gpu`"),
        (
            {"home": None, "nvcc": None},
            "CUDA_HOME, CUDA_PATH, PATH and /usr/local/cuda have none",
            "apt-get install cuda-nvcc-12-5 cuda-cudart-dev-12-5",
        ),
        ({"nvcc": None}, "/opt/cuda has no bin/nvcc that runs", "CUDA_HOME"),
        (
            {"nvcc": "13.0.88"},
            "built with CUDA 12.5.1, and the nvcc of /opt/cuda is of CUDA 13.0.88",
            "Install CUDA 12's compiler",
        ),
        ({"nvcc": "1.2.3"}, "both have to be of CUDA 12", "CUDA_HOME"),
        ({"missing": ("cuda_runtime.h",)}, "but not cuda_runtime.h", "cuda-cudart-dev-12-5"),
        ({"architectures": (100, 120)}, "compiles for none of", "sm_60"),
    ],
    ids=str,
)
def test_refusals(change, what, mend):
    with pytest.raises(BuildError) as caught:
        make_plan(GPU_MACHINE, gpu=changed(**change))
    assert what in str(caught.value)
    assert mend in str(caught.value)


def test_tensorflow_for_cpus_is_refused_by_its_name():
    with pytest.raises(BuildError, match="tensorflow-cpu 2.21.0 is built without CUDA") as caught:
        make_plan(MACHINE, gpu=changed(cuda=None))
    assert "pip uninstall tensorflow-cpu" in str(caught.value)


def test_programs_of_the_cpu_build_are_needed_too():
    made = make_plan(dataclasses.replace(GPU_MACHINE, make=False), gpu=CUDA)
    with pytest.raises(BuildError, match="no make on PATH"):
        plan.check_programs(made)


def test_nccl_is_the_wheel_that_the_installed_tensorflow_asks_for():
    """Every TensorFlow distribution lists the wheels of its extra, the one for CPUs too."""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            requires = importlib.metadata.requires(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = gpu.nccl_requirement(requires)
        assert found is not None
        assert found.startswith("nvidia-nccl-cu12<3.0,>=2.")
        return
    pytest.skip("no TensorFlow distribution of those names is installed")


def test_requirements_that_are_none():
    assert gpu.nccl_requirement([]) is None
    assert gpu.nccl_requirement(["numpy>=1.26", "what is this", "nvidia-cudnn-cu12"]) is None


def test_summary_says_what_with_what_and_for_what():
    assert gpu.summary(CUDA) == (
        "GPUs: NCCL (nvidia-nccl-cu12<3.0,>=2.27.7, 2.27.7 is here), nvcc 12.4.131 in /opt/cuda, "
        "for compute capabilities 6.0, 7.0, 8.0, 8.9, 9.0"
    )
    assert "(nvidia-nccl-cu12<3.0,>=2.27.7, to be installed)" in gpu.summary(
        changed(nccl_version=None)
    )
