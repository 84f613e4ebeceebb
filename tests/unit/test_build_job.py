import contextlib
import dataclasses
import sys

import pytest
from click.testing import CliRunner

from tests.helpers.machine import CUDA, GPU_MACHINE, MACHINE
from tfdist.build import cache, check, job, plan, steps, survey, survey_gpu
from tfdist.build.errors import BuildError
from tfdist.cli.main import main


class Notes:
    """A `job.Progress` that remembers."""

    def __init__(self):
        self.steps, self.notes = [], []

    @contextlib.contextmanager
    def step(self, title):
        self.steps.append(title)
        yield

    def note(self, text):
        self.notes.append(text)


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The job with its slow steps replaced by ones that write down that they were called."""

    class Bench:
        machine = MACHINE
        installed = None
        done = []

        def run(self, **options):
            self.done, self.notes = [], Notes()
            job.build(job.Options(**options), self.notes)
            return self.done

    bench = Bench()

    def compile_wheel(_source, env, work, _log):
        bench.done.append("compile")
        bench.environment = env
        wheel = work / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
        wheel.write_text("wheel")
        return wheel

    def install(todo, wheel, _work, _log):
        assert wheel.read_text() == "wheel"
        bench.done.append("install")
        bench.installed = todo.version

    monkeypatch.setenv("TFDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(survey, "look", lambda: bench.machine)
    monkeypatch.setattr(survey, "installed_horovod", lambda: bench.installed)
    monkeypatch.setattr(steps, "bring_tools", lambda *a: bench.done.append("tools"))
    monkeypatch.setattr(steps, "fetch_sdist", lambda *a: bench.done.append("fetch"))
    monkeypatch.setattr(steps, "unpack", lambda *a: bench.done.append("unpack"))
    monkeypatch.setattr(steps, "compile_wheel", compile_wheel)
    monkeypatch.setattr(steps, "install", install)
    monkeypatch.setattr(check, "can_check", lambda controller: True)
    monkeypatch.setattr(survey_gpu, "look", lambda distribution: CUDA)
    monkeypatch.setattr(survey_gpu, "usable_gpus", lambda env: 0)
    nccl = {"HOROVOD_NCCL_INCLUDE": "/nccl/include", "HOROVOD_NCCL_LIB": "/nccl/lib"}
    monkeypatch.setattr(steps, "bring_nccl", lambda *a: bench.done.append("nccl") or nccl)

    def all_reduce(name, _log, device="CPU"):
        bench.done.append(f"check {name}" + (" on GPUs" if device == "GPU" else ""))

    monkeypatch.setattr(check, "all_reduce", all_reduce)
    return bench


CHECKS = ["check gloo", "check mpi"]
BUILD = ["fetch", "unpack", "compile", "install", *CHECKS]


def test_built_once_then_checked_only_then_installed_from_the_cache(bench):
    assert bench.run() == BUILD
    assert bench.run() == CHECKS
    bench.installed = "0.28.1"
    assert bench.run() == ["install", *CHECKS]


def test_another_tensorflow_is_built_for_anew_and_the_old_wheel_is_kept(bench):
    bench.run()
    bench.machine = dataclasses.replace(MACHINE, tensorflow={"tensorflow-cpu": "2.20.0"})
    assert bench.run() == BUILD
    bench.machine = MACHINE
    assert bench.run() == ["install", *CHECKS]


def test_rebuild_does_it_all_again(bench):
    bench.run()
    assert bench.run(rebuild=True) == BUILD


def test_without_mpi_is_a_wheel_of_its_own(bench):
    bench.run()
    assert bench.run(without_mpi=True) == ["fetch", "unpack", "compile", "install", "check gloo"]
    assert bench.environment["HOROVOD_WITHOUT_MPI"] == "1"


def test_nccl_is_a_wheel_of_its_own_and_says_its_plan_first(bench):
    bench.machine = GPU_MACHINE
    bench.run()
    assert bench.run(gpu=True) == ["nccl", *BUILD]
    assert bench.environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert bench.environment["HOROVOD_NCCL_LIB"] == "/nccl/lib"
    assert bench.notes.notes[1].startswith("GPUs: NCCL (nvidia-nccl-cu12")
    assert bench.notes.notes[-1] == (
        "NCCL is built in, but not checked: that takes 2 GPUs, and here are 0."
    )
    # From the cache it needs neither NCCL's headers nor a compiler.
    bench.installed = None
    assert bench.run(gpu=True) == ["install", *CHECKS]
    assert bench.run() == ["install", *CHECKS]
    assert "`--gpu` builds with it" in bench.notes.notes[1]


def test_nccl_is_checked_where_each_of_two_processes_has_a_gpu(bench, monkeypatch):
    bench.machine = GPU_MACHINE
    monkeypatch.setattr(survey_gpu, "usable_gpus", lambda env: 2)
    assert bench.run(gpu=True)[-1] == "check gloo on GPUs"
    assert bench.notes.steps[-1] == "Summing a tensor over two GPUs (NCCL)"


def test_what_another_has_installed_meanwhile_is_not_installed_again(bench, monkeypatch):
    class Waited(cache.WheelCache):
        @contextlib.contextmanager
        def lock(self, key, on_wait):
            bench.installed = plan.make_plan(MACHINE).version
            yield

    monkeypatch.setattr(cache, "WheelCache", Waited)
    assert bench.run() == CHECKS


def test_missing_tools_are_fetched(bench):
    bench.machine = dataclasses.replace(MACHINE, cmake=None)
    assert bench.run() == ["tools", *BUILD]


def test_a_compiler_is_needed_only_to_compile(bench):
    bench.run()
    bench.machine = dataclasses.replace(MACHINE, make=False)
    assert bench.run() == CHECKS
    with pytest.raises(BuildError, match="no make on PATH"):
        bench.run(rebuild=True)
    assert bench.done == []


def test_mpi_that_cannot_be_started_is_said(bench, monkeypatch):
    monkeypatch.setattr(check, "can_check", lambda controller: controller == "gloo")
    assert bench.run()[-1] == "check gloo"
    assert bench.notes.notes[-1] == "mpi is built in, but not checked: there is no mpirun on PATH."


def test_failed_compile_leaves_nothing_in_the_cache(bench, monkeypatch, tmp_path):
    def broken(*_args):
        raise BuildError("Could not compile Horovod")

    with monkeypatch.context() as patch, pytest.raises(BuildError, match="Could not compile"):
        patch.setattr(steps, "compile_wheel", broken)
        bench.run()
    assert not list((tmp_path / "cache").rglob("*.whl"))
    assert bench.run() == BUILD


def test_cache_that_cannot_be_written(bench, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFDIST_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="cannot be written.*Point TFDIST_CACHE"):
        bench.run()


def test_command_line_shows_an_error_and_no_traceback(bench):
    bench.machine = dataclasses.replace(MACHINE, tensorflow={})
    result = CliRunner().invoke(main, ["build-horovod"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: No TensorFlow is installed in this environment")
    assert "Traceback" not in result.output


def test_command_line_says_that_tensorflow_is_without_cuda(bench, monkeypatch):
    monkeypatch.setattr(survey_gpu, "look", lambda d: dataclasses.replace(CUDA, cuda=None))
    result = CliRunner().invoke(main, ["build-horovod", "--gpu"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: tensorflow-cpu 2.21.0 is built without CUDA")
    assert bench.done == []


def test_command_line_shows_the_steps(bench):
    result = CliRunner().invoke(main, ["build-horovod", "--without-mpi", "--jobs", "3"])
    assert result.exit_code == 0
    assert bench.environment["MAKEFLAGS"] == "-j3"
    assert "for tensorflow-cpu 2.21.0, controllers: gloo\n" in result.output
    assert result.output.endswith("Horovod is ready.\n")


def test_real_survey_makes_a_plan():
    machine = survey.look({"PATH": "/nowhere"})
    assert machine.python == sys.version_info[:2]
    assert machine.compiler is machine.cmake is machine.mpi is None
    assert not machine.make
    assert machine.cores >= 1
    assert machine.memory > 0


def test_survey_takes_the_compiler_of_cxx(tmp_path):
    compiler = tmp_path / "mycc"
    compiler.write_text("#!/bin/sh\necho 'mycc 7.1'\n")
    compiler.chmod(0o755)
    machine = survey.look({"PATH": str(tmp_path), "CXX": "mycc", "CXXFLAGS": "-g"})
    assert machine.compiler == str(compiler)
    assert machine.compiler_id == "mycc 7.1"
    assert machine.flags == {"CXXFLAGS": "-g"}


def test_cached_wheels_path_follows_the_key(bench, tmp_path):
    bench.run()
    key = plan.make_plan(MACHINE).key
    kept = cache.WheelCache(tmp_path / "cache" / "wheels").get(key)
    assert kept is not None
    assert kept.parent.name == key
