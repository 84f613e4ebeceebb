"""What a step costs on the wire, by the counters of the hosts' network interfaces, at 1 Gbit/s a host.

A gradient of G bytes costs each rank of a ring 2 (n - 1) / n G (Patarasuk and Yuan 2009), and a worker of a
parameter server G each way. `-s` shows the table that docs/bandwidth.md has.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.test_hosts import ENV, ROOT, TFDIST
from tests.helpers import hosts as testing
from tests.helpers.cluster import needs_mpi

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why := testing.missing()), reason=why or "-")]

WIDE = str(Path(__file__).with_name("wide.py"))
WIDTH, STEPS, EPOCHS = 2048, 8, 3  # of wide.py
GRADIENT = WIDTH * WIDTH * 4  # bytes
GBIT = 1000  # Mbit/s
WITHIN = 0.05


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with testing.Hosts(4, tmp_path_factory.mktemp("hosts"), same_names=True) as made:
        made.limit(GBIT)
        yield made


def measured(hosts, command, count):
    """Bytes that each of the first `count` hosts sent a step, and seconds a step, from the second epoch to the last."""
    process = hosts.popen(0, command, env=ENV, cwd=ROOT)
    marks = []
    for line in process.stdout:
        if line.startswith("epoch "):
            marks.append((time.monotonic(), [hosts.sent(h) for h in range(count)]))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(marks) == EPOCHS
    (began, before), (ended, after) = marks[1], marks[-1]
    steps = (EPOCHS - 2) * STEPS
    return [(b - a) / steps for a, b in zip(before, after, strict=True)], (ended - began) / steps


def shown(name, each, ideal, seconds):
    bytes_ = ", ".join(f"{b / 1e6:.2f}" for b in each)
    print(f"\n| {name} | {bytes_} | {ideal / 1e6:.2f} | {max(each) / ideal:.3f} | {1e3 * seconds:.0f} |")


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_a_ring_sends_what_the_algorithm_says(four, controller, count):
    names = ",".join(f"{name}:1" for name in four.names[:count])
    if controller == "gloo":
        command = [*TFDIST, "run", "-i", str(four.key), "-H", names, WIDE, str(EPOCHS)]
    else:
        mca = {
            "plm_rsh_args": f"-i {four.key}", "btl": "tcp,self", "btl_tcp_if_include": "eth0",
            "oob_tcp_if_include": "eth0",
        }  # fmt: skip
        command = [shutil.which("mpirun"), "--allow-run-as-root", "-np", str(count), "-H", names]
        command += [word for name, value in mca.items() for word in ("--mca", name, value)]
        command += [word for name in ENV if name.startswith(("TF_", "PYTHON", "CUDA", "PATH")) for word in ("-x", name)]
        command += [sys.executable, WIDE, str(EPOCHS)]
    each, seconds = measured(four, command, count)
    ideal = 2 * (count - 1) / count * GRADIENT
    shown(f"ring of {count}, {controller}", each, ideal, seconds)
    for sent in each:
        assert abs(sent - ideal) <= WITHIN * ideal


def test_a_parameter_server_sends_once_each_way(four):
    """Chief and ps on the first host, the worker on the second: it pushes a gradient and pulls the weights."""
    words = ["run", "-i", str(four.key), "-H", "alpha:2,beta:1", "--ps", "1", "--workers", "1", WIDE, str(EPOCHS)]
    each, seconds = measured(four, [*TFDIST, *words], 2)
    shown("parameter server: ps, worker", each, GRADIENT, seconds)
    for sent in each:
        assert abs(sent - GRADIENT) <= WITHIN * GRADIENT
