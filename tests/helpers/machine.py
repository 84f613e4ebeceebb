"""Machines on which Horovod can be built, as plain facts."""

import dataclasses

from tfdist.build.gpu import Gpu
from tfdist.build.plan import Machine

TOOLS = {"setuptools": "80.9.0", "wheel": "0.45.1", "packaging": "25.0"}
LIBRARIES = {"cloudpickle": "3.1.1", "psutil": "7.0.0", "pyyaml": "6.0.2"}
MACHINE = Machine(
    system="Linux",
    platform="linux-x86_64 glibc 2.36",
    python=(3, 11),
    abi="cpython-311-x86_64-linux-gnu",
    distributions={**TOOLS, **LIBRARIES},
    tensorflow={"tensorflow-cpu": "2.21.0"},
    compiler="/usr/bin/g++",
    compiler_id="g++ (Debian 12.2.0-14) 12.2.0",
    make=True,
    cmake="3.25.1",
    mpi="Open MPI 4.1.4",
    cpu=("avx", "f16c", "fma"),
    cores=4,
    memory=16 << 30,
)
GPU_MACHINE = dataclasses.replace(MACHINE, tensorflow={"tensorflow": "2.21.0"})
CUDA = Gpu(
    cuda="12.5.1",
    capabilities=("sm_60", "sm_70", "sm_80", "sm_89", "compute_90"),
    nccl="nvidia-nccl-cu12<3.0,>=2.27.7",
    nccl_version="2.27.7",
    home="/opt/cuda",
    nvcc="12.4.131",
    architectures=(50, 52, 60, 61, 70, 75, 80, 86, 89, 90),
)
