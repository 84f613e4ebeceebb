"""Judges what `facts.py` printed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RUNPATH = "$ORIGIN/../../nvidia/nccl/lib"
# What each of Horovod's operations on a GPU calls.
CALLS = ("ncclAllReduce", "ncclAllGather", "ncclBroadcast", "ncclReduceScatter", "ncclSend", "ncclCommInitRank")
CLASSES = ("NCCLAllreduce", "NCCLAllgather", "NCCLBroadcast", "NCCLAlltoall", "NCCLReducescatter")


def problems(facts: Mapping[str, Any]) -> list[str]:
    """What is wrong, in words; empty where all is as it has to be."""
    found = []
    if not facts["nccl_built"] or not facts["cuda_built"]:
        found.append(f"nccl_built() is {facts['nccl_built']}, cuda_built() is {facts['cuda_built']}")
    if not facts["gloo_built"]:
        found.append("Gloo, which carries Horovod's own messages, is not in")
    if "libnccl.so.2" not in facts["needed"]:
        found.append(f"the library does not ask for libnccl.so.2, but for {', '.join(facts['needed'])}")
    places = [place for text in facts["runpath"] for place in text.split(":")]
    # Others may follow, such as MPI's; the environment that built the wheel is no place for others to look in.
    if places[:1] != [RUNPATH] or any(place.startswith(facts["site"]) for place in places):
        found.append(f"libraries are looked for in {places}, expected {RUNPATH} first and none of {facts['site']}")
    if missing := sorted(set(CALLS) - set(facts["undefined"])):
        found.append(f"no call of {', '.join(missing)}")
    if missing := [name for name in CLASSES if not any(f"{name}::" in line for line in facts["defined"])]:
        found.append(f"no operation {', '.join(missing)}")
    if ".nv_fatbin" not in facts["sections"]:
        found.append("no code for GPUs")
    wanted = f"{facts['site']}/nvidia/nccl/lib/libnccl.so.2"
    if facts["loaded"] != [wanted]:
        found.append(f"loaded {', '.join(facts['loaded']) or 'no NCCL'} instead of {wanted}")
    return found
