import dataclasses

import pytest

from tests.helpers.machine import MACHINE, TOOLS
from tfdist.build import plan
from tfdist.build.edits import EDITS, NEEDED
from tfdist.build.errors import BuildError
from tfdist.build.plan import make_plan


def changed(**values):
    return dataclasses.replace(MACHINE, **values)


def test_the_plan_for_a_whole_machine():
    made = make_plan(MACHINE)
    assert made.tensorflow == ("tensorflow-cpu", "2.21.0")
    assert made.version == f"0.28.1+tf2.21.0.k{made.key}"
    assert made.controllers == ("gloo", "mpi")
    assert made.tools == made.runtime == made.missing_programs == ()
    assert made.environment == {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI": "1",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "HOROVOD_LOCAL_VERSION": f"tf2.21.0.k{made.key}",
        "MAKEFLAGS": "-j4",
        "CXX": "/usr/bin/g++",
    }


@pytest.mark.parametrize("change", [{"mpi": None}, {}])
def test_without_mpi(change):
    made = make_plan(changed(**change), without_mpi=True)
    assert made.controllers == ("gloo",)
    assert made.environment["HOROVOD_WITHOUT_MPI"] == "1"
    assert "HOROVOD_WITH_MPI" not in made.environment


def test_no_mpicc_and_not_wanting_it_are_the_same_wheel():
    assert make_plan(changed(mpi=None)).key == make_plan(MACHINE, without_mpi=True).key


@pytest.mark.parametrize(
    "change",
    [
        {"tensorflow": {"tensorflow-cpu": "2.20.0"}},
        {"tensorflow": {"tensorflow": "2.21.0"}},
        {"abi": "cpython-312-x86_64-linux-gnu"},
        {"platform": "linux-aarch64 glibc 2.36"},
        {"platform": "linux-x86_64 glibc 2.31"},
        {"compiler_id": "g++ 13.3.0"},
        {"mpi": "Open MPI 5.0.6"},
        {"mpi": None},
        {"cpu": ("avx",)},
        {"flags": {"CXXFLAGS": "-O0"}},
    ],
    ids=str,
)
def test_key_follows_what_the_wheel_depends_on(change):
    assert make_plan(changed(**change)).key != make_plan(MACHINE).key


def test_key_follows_the_patch():
    whole, needed = make_plan(MACHINE), make_plan(MACHINE, edits=NEEDED)
    assert (whole.edits, needed.edits) == (EDITS, NEEDED)
    assert whole.key != needed.key


@pytest.mark.parametrize(
    "change",
    [
        {"cores": 64},
        {"memory": 1 << 30},
        {"distributions": {}},
        {"cmake": None},
        {"make": False},
        {"compiler": "/usr/local/bin/g++"},
        {"cpu": ("fma", "f16c", "avx")},
    ],
    ids=str,
)
def test_key_ignores_the_rest(change):
    assert make_plan(changed(**change)).key == make_plan(MACHINE).key


@pytest.mark.parametrize(
    ("cores", "gigabytes", "asked", "jobs"),
    [(4, 16, None, 4), (64, 16, None, 11), (2, 1, None, 1), (4, 16, 9, 9)],
)
def test_jobs_fit_cores_and_memory(cores, gigabytes, asked, jobs):
    machine = changed(cores=cores, memory=gigabytes << 30)
    assert make_plan(machine, jobs=asked).environment["MAKEFLAGS"] == f"-j{jobs}"


@pytest.mark.parametrize(
    ("change", "tools"),
    [
        ({"distributions": {**TOOLS, "setuptools": "82.0.1"}}, ("setuptools<81",)),
        ({"distributions": {"setuptools": "66.1.1"}}, ("wheel", "packaging")),
        ({"cmake": None}, ("cmake>=3.18",)),
        ({"cmake": "3.10.2"}, ("cmake>=3.18",)),
        ({"cmake": "4.1.0"}, ()),
    ],
    ids=str,
)
def test_missing_tools(change, tools):
    assert make_plan(changed(**change)).tools == tools


def test_missing_libraries_of_horovod():
    assert make_plan(changed(distributions=TOOLS)).runtime == ("cloudpickle", "psutil", "pyyaml")


def test_missing_compiler_is_only_an_error_where_it_is_needed():
    made = make_plan(changed(compiler=None, compiler_id="", make=False))
    with pytest.raises(BuildError) as caught:
        plan.check_programs(made)
    assert "no g++ and make on PATH" in str(caught.value)
    assert "apt-get install g++ make" in str(caught.value)
    assert "dnf install gcc-c++ make" in str(caught.value)
    plan.check_programs(make_plan(MACHINE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"system": "Windows"}, "Windows.*WSL2"),
        ({"python": (3, 14)}, r"Python 3\.14 is not supported"),
        ({"tensorflow": {}}, "No TensorFlow is installed"),
        ({"tensorflow": {"tensorflow": "2.16.1"}}, r"tensorflow 2\.16\.1 is not supported"),
    ],
    ids=str,
)
def test_refusals(change, message):
    with pytest.raises(BuildError, match=message):
        make_plan(changed(**change))
