"""The judgement of `make check-gpu-build`, which itself is no part of the suite: it downloads and compiles."""

from pathlib import Path

import pytest

from tests.gpu_build import verdict

ROOT = Path(__file__).parents[2]
WELL = {
    "version": "0.28.1",
    "nccl_built": 22707,
    "cuda_built": True,
    "gloo_built": True,
    "needed": ["libnccl.so.2", "libtensorflow_framework.so.2"],
    "runpath": ["$ORIGIN/../../nvidia/nccl/lib"],
    "sections": [".nv_fatbin", ".nvFatBinSegment"],
    "undefined": [*verdict.CALLS, "cudaLaunchKernel"],
    "defined": [f"0e T horovod::common::{name}::Execute(" for name in verdict.CLASSES],
    "loaded": ["/env/nvidia/nccl/lib/libnccl.so.2"],
    "site": "/env",
}


def test_a_whole_build_is_well():
    assert verdict.problems(WELL) == []
    assert verdict.problems({**WELL, "runpath": [f"{verdict.RUNPATH}:/opt/openmpi/lib"]}) == []


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"nccl_built": 0}, "nccl_built() is 0"),
        ({"cuda_built": False}, "cuda_built() is False"),
        ({"gloo_built": False}, "Gloo"),
        ({"needed": ["libc.so.6"]}, "does not ask for libnccl.so.2"),
        ({"runpath": []}, "looked for in []"),
        ({"runpath": ["/env/nvidia/nccl/lib"]}, "looked for in ['/env"),
        ({"runpath": [f"{verdict.RUNPATH}:/env/nvidia/nccl/lib"]}, "none of /env"),
        ({"undefined": list(verdict.CALLS[1:])}, "no call of ncclAllReduce"),
        ({"defined": WELL["defined"][1:]}, "no operation NCCLAllreduce"),
        ({"sections": []}, "no code for GPUs"),
        ({"loaded": []}, "loaded no NCCL"),
        ({"loaded": ["/usr/lib/libnccl.so.2"]}, "loaded /usr/lib/libnccl.so.2 instead of /env"),
    ],
    ids=str,
)
def test_each_fault_is_named(change, what):
    (found,) = verdict.problems({**WELL, **change})
    assert what in found
