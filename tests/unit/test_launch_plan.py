"""The launcher's plan, and the usage of `tfdist run`."""

import shlex
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tfdist.cli.run import run
from tfdist.launch.installed import problem
from tfdist.launch.place import Place
from tfdist.launch.plan import (
    Job,
    Program,
    core_warning,
    find_package_root,
    plan,
    program_argv,
    rank_cores,
    rank_env,
)

SCRIPT = Program("script", "train.py", ("--epochs", "3", "a b"))


class TestPlan:
    def test_several_ranks_go_through_horovods_launcher(self):
        process = plan(Job(SCRIPT, 2), "/run", "py", {})
        ring, rank = process.argv[:8], process.argv[8:]
        assert ring == (
            *("py", "-m", "tfdist.launch.horovodrun", "--gloo", "-np", "2", "-H", "localhost:2"),
        )
        assert rank == (
            *("--disable-cache", "py", "-m", "tfdist.launch.rank", "/run"),
            *("script", "train.py", "--epochs", "3", "a b"),
        )
        assert process.env == {"TFDIST_RUN_DIR": "/run"}

    def test_one_rank_does_not(self):
        process = plan(Job(Program("module", "my.train"), 1, cores_per_rank=2), "/run", "py", {})
        assert process.argv == (
            *("py", "-m", "tfdist.launch.rank", "--cores-per-rank", "2"),
            *("/run", "module", "my.train"),
        )

    def test_mpi(self):
        assert "--mpi" in plan(Job(SCRIPT, 2, "mpi"), "/run", "py", {}).argv

    def test_the_place_of_an_outer_rank_is_not_passed_on(self):
        outer = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PMI_RANK": "1", "HOME": "/h"}
        process = plan(Job(SCRIPT, 1), "/run", "py", outer)
        assert process.environment(outer) == {"HOME": "/h", "TFDIST_RUN_DIR": "/run"}

    def test_the_package_is_found_from_a_checkout(self):
        assert plan(Job(SCRIPT, 2), "/run", "py", {}, "/src").env["PYTHONPATH"] == "/src"
        known = {"PYTHONPATH": "/mine"}
        assert plan(Job(SCRIPT, 2), "/run", "py", known, "/src").env["PYTHONPATH"] == "/mine:/src"
        known = {"PYTHONPATH": "/src:/mine"}
        assert "PYTHONPATH" not in plan(Job(SCRIPT, 2), "/run", "py", known, "/src").env
        assert find_package_root("/opt/lib/site-packages/tfdist/cluster.py") is None
        assert find_package_root("/src/tfdist/cluster.py") == "/src"

    def test_the_shell_line_is_the_process(self):
        process = plan(Job(SCRIPT, 1), "/run", "py", {"PMI_RANK": "0"})
        words = shlex.split(process.shell())
        assert words[:4] == ["env", "-u", "PMI_RANK", "TFDIST_RUN_DIR=/run"]
        assert tuple(words[4:]) == process.argv

    def test_program(self):
        expected = ["py", "-m", "tfdist.launch.program", "1", "script", "train.py"]
        assert program_argv("py", Place(1), ["script", "train.py"]) == expected

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"ranks": 0}, "ranks is 0"),
            ({"controller": "nccl"}, "'nccl', expected one of: gloo, mpi"),
            ({"cores_per_rank": 0}, "cores per rank is 0"),
        ],
    )
    def test_bad_jobs(self, change, words):
        with pytest.raises(ValueError, match=words):
            replace(Job(SCRIPT, 2), **change)
        with pytest.raises(ValueError, match="'scripts', expected"):
            Program("scripts", "x")


class TestRank:
    @pytest.mark.parametrize(
        ("available", "local_rank", "each", "cores"),
        [
            ([0, 1], 0, 1, [0]),
            ([0, 1], 1, 1, [1]),
            ([4, 5, 6, 7], 1, 2, [6, 7]),  # the cores that this process may use, not 0, 1, ...
            ([0, 1], 2, 1, [0]),
            ([0, 1, 2], 1, 2, [0, 2]),
            ([3], 0, 4, [3]),
        ],
    )
    def test_cores(self, available, local_rank, each, cores):
        assert rank_cores(available, local_rank, each) == cores

    def test_two_inter_op_threads_on_one_core(self):
        assert rank_env({}, 0, 1) == {
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "2",
        }
        assert rank_env({}, 0, 4)["TF_NUM_INTEROP_THREADS"] == "4"

    def test_the_users_settings_stay(self):
        mine = {"OMP_NUM_THREADS": "7", "TF_CPP_MIN_LOG_LEVEL": "0"}
        assert rank_env(mine, 1, 1) == {
            **mine,
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "2",
        }

    def test_only_rank_0_is_as_talkative_as_usual(self):
        assert rank_env({}, 0, None) == {}
        assert rank_env({}, 1, None) == {"TF_CPP_MIN_LOG_LEVEL": "2"}

    def test_more_ranks_than_cores_is_one_line(self):
        assert core_warning(Job(SCRIPT, 2).places, None, 2) is None
        text = core_warning(Job(SCRIPT, 3).places, None, 2)
        assert text == "3 ranks share 2 cores: they will slow each other."
        text = core_warning(Job(SCRIPT, 2).places, 2, 2)
        assert text == "2 ranks x 2 cores share 2 cores: they will slow each other."


@pytest.mark.parametrize(
    ("controller", "built", "mpirun", "words"),
    [
        ("gloo", None, None, "not installed"),
        ("mpi", ("gloo",), "/bin/mpirun", "without the controller 'mpi' (it has: gloo)"),
        ("gloo", (), None, "it has: none"),
        ("mpi", ("gloo", "mpi"), None, "`mpirun` on PATH"),
    ],
)
def test_what_is_missing_and_the_remedy(controller, built, mpirun, words):
    text = problem(controller, built, mpirun)
    assert words in text
    assert "tfdist build-horovod" in text
    assert problem("mpi", ("gloo", "mpi"), "/bin/mpirun") is None
    assert problem("gloo", ("gloo",), None) is None


class TestCommand:
    def invoke(self, *args):
        return CliRunner().invoke(run, args)

    def test_dry_run_starts_nothing(self, tmp_path):
        script = tmp_path / "train.py"
        script.write_text("raise SystemExit(9)")
        options = ("-np", "2", "--cores-per-rank", "1", "--dry-run")
        result = self.invoke(*options, str(script), "-np", "7", "--dry-run")
        assert result.exit_code == 0
        command, *ranks = result.output.splitlines()
        assert command.endswith(f"script {script} -np 7 --dry-run")
        assert " -np 2 " in command
        assert [line.split(":")[0].split(" on ")[0] for line in ranks] == ["rank 0", "rank 1"]
        assert "TF_NUM_INTEROP_THREADS=2" in ranks[1]

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["-np", "2"], "Missing argument 'PROGRAM'"),
            (["train.py"], "Missing option '-np'"),
            (["-np", "0", "train.py"], "0 is not in the range x>=1"),
            (["-np", "two", "train.py"], "'two' is not a valid integer"),
            (["-np", "2", "nowhere.py"], "there is no file 'nowhere.py'"),
            (["-np", "2", "--controller", "nccl", "train.py"], "'nccl' is not one of"),
            (["-np", "2", "--cores-per-rank", "0", "train.py"], "0 is not in the range"),
        ],
    )
    def test_usage(self, args, words):
        result = self.invoke(*args)
        assert result.exit_code == 2
        assert words in result.output

    @pytest.mark.parametrize(
        ("args", "tail"),
        [
            (["-m", "my.train", "-m", "x"], "module my.train -m x"),
            (["-m", "--", "my.train", "--", "x"], "module my.train -- x"),
        ],
    )
    def test_module_and_double_dash(self, args, tail):
        result = self.invoke("-np", "2", "--dry-run", *args)
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[0].endswith(tail)

    def test_double_dash_before_a_script(self, tmp_path):
        script = tmp_path / "-odd.py"
        script.write_text("")
        result = self.invoke("-np", "2", "--dry-run", "--", str(script), "--x")
        assert result.output.splitlines()[0].endswith(f"{script} --x")

    def test_without_horovod_the_build_is_named(self, tmp_path, monkeypatch):
        script = tmp_path / "train.py"
        script.write_text("")
        monkeypatch.setattr("tfdist.launch.installed.built_controllers", lambda: None)
        result = self.invoke("-np", "2", str(script))
        assert result.exit_code == 1
        assert "tfdist build-horovod" in result.output
