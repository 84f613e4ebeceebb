import dataclasses
import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from tfdist.cli import doctor
from tfdist.cli.main import main
from tfdist.doctor import probe
from tfdist.doctor.facts import Facts, keras_backend
from tfdist.doctor.findings import findings

WELL = Facts(
    python=(3, 11, 7),
    cores=(2, 2),
    tensorflow={"tensorflow-cpu": "2.21.0"},
    keras="3.15.1",
    horovod="0.28.1+tf2.21.0.k0123456789ab",
    controllers=("gloo", "mpi"),
    operations=("gloo", "mpi"),
    mpirun="mpirun (Open MPI) 4.1.4",
    programs={"g++": True, "make": True},
)


def changed(**values):
    return dataclasses.replace(WELL, **values)


def test_all_is_well():
    assert findings(WELL) == []
    assert findings(changed(mpirun=None, controllers=("gloo",), operations=("gloo",))) == []


@pytest.mark.parametrize(
    ("change", "what", "mend"),
    [
        ({"system": "Darwin"}, "Darwin", "Linux"),
        ({"python": (3, 14, 0)}, "3.10 to 3.13", "Make an environment"),
        ({"tensorflow": {}}, "No TensorFlow is installed", "pip install"),
        ({"tensorflow": {"tensorflow": "2.16.1"}}, "tensorflow 2.16.1 is not", "pip install"),
        (
            {"tensorflow": {"tensorflow": "2.21.0", "tensorflow-cpu": "2.20.0"}},
            "Several TensorFlow distributions",
            "pip uninstall tensorflow tensorflow-cpu",
        ),
        ({"tensorflow_error": "ImportError: libfoo"}, "ImportError: libfoo", "--force-reinstall"),
        ({"keras": None}, "Keras is not installed", "pip install keras"),
        ({"keras": "2.15.0"}, "Keras 2.15.0", 'pip install "keras>=3.5"'),
        ({"backend": ("jax", "KERAS_BACKEND")}, "'jax', chosen by KERAS_BACKEND", "Unset it"),
        ({"backend": ("torch", "/h/keras.json")}, "'torch'", "Set `backend` in /h/keras.json"),
        ({"legacy_keras": "1"}, "TF_USE_LEGACY_KERAS=1", "Unset TF_USE_LEGACY_KERAS"),
        ({"horovod": None}, "Horovod is not installed", "Run `tfdist build-horovod`."),
        (
            {"horovod": None, "programs": {"g++": False, "make": False}},
            "Horovod is not installed",
            "apt-get install g++ make",
        ),
        (
            {"horovod": "0.28.1+tf2.20.0.k0123456789ab", "horovod_error": "undefined symbol"},
            "was built for TensorFlow 2.20.0, and installed is 2.21.0",
            "Run `tfdist build-horovod`.",
        ),
        (
            {"horovod": "0.28.1+tf2.20.0.nccl.k0123456789ab"},
            "was built for TensorFlow 2.20.0, and installed is 2.21.0",
            "Run `tfdist build-horovod --gpu`.",
        ),
        (
            {"horovod": "0.28.1+tf2.21.0.nccl.k0123456789ab", "horovod_error": "it crashed"},
            "it crashed",
            "Run `tfdist build-horovod --gpu --rebuild`.",
        ),
        ({"horovod_error": "undefined symbol: x"}, "undefined symbol: x", "--rebuild"),
        ({"controllers": (), "operations": ()}, "neither the Gloo nor", "build-horovod"),
        (
            {"controllers": ("mpi",), "operations": ("mpi",), "mpirun": None},
            "no mpirun",
            "openmpi-bin",
        ),
        (
            {"horovod_error": "ImportError: libnccl.so.2: cannot open shared object file"},
            "its library is not found",
            "pip install --force-reinstall nvidia-nccl-cu12",
        ),
    ],
    ids=str,
)
def test_wrong_things_say_what_and_how_to_mend_it(change, what, mend):
    (found,) = findings(changed(**change))
    assert found.wrong
    assert what in found.what
    assert mend in found.mend
    assert found.mend[0].isupper()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"mpirun": None}, "no mpirun on PATH"),
        ({"horovod": "0.28.1"}, "not built by tfdist"),
        ({"gpus": ("GPU 0: H100",)}, "TensorFlow none"),
        ({"gpus": ("GPU 0: H100",), "tensorflow_gpus": 1}, "without NCCL"),
    ],
    ids=str,
)
def test_things_worth_knowing_are_not_wrong(change, what):
    (found,) = findings(changed(**change))
    assert not found.wrong
    assert what in found.what


GPU = {
    "tensorflow": {"tensorflow": "2.21.0"},
    "gpus": ("GPU 0: H100",),
    "tensorflow_gpus": 1,
    "cuda": "12.5.1",
    "nccl": "2.27.7",
    "nvcc": "12.4.131 in /usr/local/cuda",
}


def test_a_build_with_nccl_is_well():
    assert findings(changed(**GPU, operations=("gloo", "mpi", "nccl"))) == []


@pytest.mark.parametrize(
    ("nvcc", "mend"),
    [
        (GPU["nvcc"], "Run `tfdist build-horovod --gpu`."),
        (None, "Install nvcc of CUDA 12 (here is none) and set CUDA_HOME. Run"),
        ("13.0.88 in /x", "Install nvcc of CUDA 12 (here is 13.0.88 in /x) and"),
    ],
)
def test_what_nccl_takes_is_said(nvcc, mend):
    (found,) = findings(changed(**{**GPU, "nvcc": nvcc}))
    assert "without NCCL" in found.what
    assert found.mend.startswith(mend)


def test_nccl_beside_a_tensorflow_without_cuda_is_said():
    (found,) = findings(changed(operations=("gloo", "mpi", "nccl")))
    assert not found.wrong
    assert "the installed TensorFlow without CUDA" in found.what


def test_wrong_things_come_first():
    found = findings(changed(mpirun=None, keras="2.15.0", gpus=("GPU 0: H100",)))
    assert [finding.wrong for finding in found] == [True, False, False]


def test_broken_tensorflow_does_not_accuse_horovod():
    broken = changed(tensorflow_error="it crashed", controllers=(), operations=())
    assert [finding.what for finding in findings(broken)] == [
        "TensorFlow cannot be imported: it crashed"
    ]


def test_empty_environment_names_each_thing_once():
    found = findings(Facts(python=(3, 11, 7)))
    assert [finding.what.split()[0] for finding in found] == ["No", "Horovod"]


@pytest.mark.parametrize(
    ("env", "config", "expected"),
    [
        ({}, None, ("tensorflow", "the default")),
        ({}, '{"backend": "jax"}', ("jax", "/k.json")),
        ({"KERAS_BACKEND": "torch"}, '{"backend": "jax"}', ("torch", "KERAS_BACKEND")),
        ({"KERAS_BACKEND": ""}, '{"floatx": "float32"}', ("tensorflow", "the default")),
        ({}, "not json", ("tensorflow", "the default")),
        ({}, "[]", ("tensorflow", "the default")),
    ],
)
def test_backend_is_chosen_as_keras_does(env, config, expected):
    assert keras_backend(env, config, "/k.json") == expected


def printed(facts, width=60):
    out = io.StringIO()
    doctor.show(Console(file=out, width=width), facts, findings(facts))
    return out.getvalue()


def test_table_shows_what_is_there():
    text = printed(WELL)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:10] == [
        "Python 3.11.7",
        "TensorFlow tensorflow-cpu 2.21.0",
        "Keras 3.15.1",
        "Keras backend tensorflow (by the default)",
        "Horovod 0.28.1+tf2.21.0.k0123456789ab",
        "controllers gloo, mpi",
        "operations gloo, mpi, Adasum",
        "MPI mpirun (Open MPI) 4.1.4",
        "GPUs none",
        "cores 2",
    ]
    assert lines[-1] == "All is well."


def test_table_shows_cuda_where_tensorflow_has_it():
    text = " ".join(printed(changed(**GPU, operations=("gloo", "nccl")), width=200).split())
    assert "operations gloo, nccl MPI" in text
    assert "CUDA TensorFlow's 12.5.1, NCCL 2.27.7, nvcc 12.4.131 in /usr/local/cuda" in text


def test_findings_are_printed_whole_and_as_they_are():
    text = printed(
        changed(horovod_error="[red]odd[/red] /a/path.so: undefined symbol " + "x" * 200)
    )
    assert "[red]odd[/red] /a/path.so: undefined symbol " + "x" * 200 in text
    assert "-> Run `tfdist build-horovod --rebuild`." in text
    assert text.rstrip().endswith("1 wrong")


@pytest.mark.parametrize(("facts", "code"), [(WELL, 0), (changed(keras=None), 1)])
def test_exit_code(monkeypatch, facts, code):
    monkeypatch.setattr(probe, "look", lambda: facts)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == code


def test_notes_alone_are_no_failure(monkeypatch):
    monkeypatch.setattr(probe, "look", lambda: changed(mpirun=None))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "note" in result.output


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "Python did not start"),
        (
            probe.SCRIPT.replace("import tensorflow as tf", "import os; os.abort()"),
            "importing it crashed",
        ),
        (
            probe.SCRIPT.replace("import tensorflow as tf", "raise ImportError('no luck')"),
            "ImportError: no luck",
        ),
    ],
    ids=["killed", "crashes", "raises"],
)
def test_probe_survives_tensorflow(monkeypatch, script, expected):
    monkeypatch.setattr(probe, "SCRIPT", script)
    assert probe._ask_libraries({})["tensorflow_error"] == expected


def test_probe_ends_after_its_deadline(monkeypatch):
    monkeypatch.setattr(probe, "SCRIPT", "import threading; threading.Event().wait()")
    monkeypatch.setattr(probe, "DEADLINE", 0.2)
    assert "more than" in probe._ask_libraries({})["tensorflow_error"]


def test_mpirun_is_asked(tmp_path):
    file = tmp_path / "mpirun"
    file.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'; echo 'Report bugs to somebody'\n")
    file.chmod(0o755)
    assert probe._mpirun({"PATH": str(tmp_path)}) == "mpirun (Open MPI) 4.1.4"
    assert probe._mpirun({"PATH": "/nowhere"}) is None
