"""Looks at the Horovod that is installed: run by the environment's own Python, prints JSON. Needs no GPU."""

import json
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import horovod.tensorflow as hvd

root = Path(next(iter(find_spec("horovod").submodule_search_locations)))
library = next((root / "tensorflow").glob("mpi_lib*.so"))


def told(*argv):
    return subprocess.run([*argv, str(library)], capture_output=True, text=True, check=True).stdout


dynamic = told("readelf", "-dW")
print(
    json.dumps(
        {
            "version": version("horovod"),
            "nccl_built": hvd.nccl_built(),
            "cuda_built": bool(hvd.cuda_built()),
            "gloo_built": bool(hvd.gloo_built()),
            "needed": [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line],
            "runpath": [line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "PATH)" in line],
            "sections": [word for word in told("readelf", "-SW").split() if word.startswith(".nv")],
            "undefined": [
                line.split()[-1].partition("@")[0] for line in told("nm", "-D", "--undefined-only").splitlines()
            ],
            "defined": sorted(
                {name for name in told("nm", "-C").split("\n") if "NCCL" in name and "::Execute(" in name}
            ),
            "loaded": sorted(
                {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnccl" in line}
            ),
            "site": str(root.parent),
        }
    ),
    file=sys.stdout,
)
