"""A machine on which Horovod can be built, as plain facts."""

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
