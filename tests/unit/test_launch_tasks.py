"""The plan of a parameter-server job, when its processes end, and the usage of its options."""

import json
import math
import shlex

import pytest
from click.testing import CliRunner

from tfdist import tf_config
from tfdist.cli.run import run
from tfdist.launch import verdict
from tfdist.launch.ending import Ending
from tfdist.launch.output import Merger
from tfdist.launch.place import Place
from tfdist.launch.plan import Program, core_warning
from tfdist.launch.ports import cluster_on_free_ports, free_addresses
from tfdist.launch.rundir import Failure
from tfdist.launch.task_plan import TaskJob, plan_tasks, task_process
from tfdist.tf_config import Cluster, Task

SCRIPT = Program("script", "train.py", ("--epochs", "3"))
CLUSTER = Cluster("127.0.0.1:1", workers=("127.0.0.1:3", "127.0.0.1:4"), ps=("127.0.0.1:2",))
NAMES = ["chief/0", "ps/0", "worker/0", "worker/1"]


class TestPlan:
    def test_the_launcher_gets_the_cluster_as_the_tasks_do(self):
        outer = {"HOROVOD_RANK": "1", "PMI_SIZE": "2", "TF_CONFIG": "another", "HOME": "/h"}
        process = plan_tasks(TaskJob(SCRIPT, CLUSTER, 2), "/run", "py", outer)
        assert process.argv == (
            *("py", "-m", "tfdist.launch.tasks", "--restarts", "0", "--cores-per-rank", "2"),
            *("/run", "script", "train.py", "--epochs", "3"),
        )
        env = process.environment(outer)
        assert tf_config.from_env(env) == (CLUSTER, Task("chief", 0))
        assert env.keys() == {"HOME", "TFDIST_RUN_DIR", "TF_CONFIG"}

    def test_each_task_gets_its_own_place(self):
        process = task_process(CLUSTER, Task("worker", 1), ["/run", "script", "x"], "py", {})
        assert process.argv == (
            *("py", "-m", "tfdist.launch.rank", "--place", "3:worker/1"),
            *("/run", "script", "x"),
        )
        assert tf_config.from_env(process.env) == (CLUSTER, Task("worker", 1))
        assert process.env["GRPC_FAIL_FAST"] == "use_caller"

    def test_the_users_setting_stays(self):
        mine = {"GRPC_FAIL_FAST": "no"}
        process = task_process(CLUSTER, Task("ps", 0), [], "py", mine)
        assert process.environment(mine)["GRPC_FAIL_FAST"] == "no"

    def test_places(self):
        places = TaskJob(SCRIPT, CLUSTER).places
        assert [place.who for place in places] == NAMES
        assert [place.number for place in places] == [0, 1, 2, 3]
        for place in (*places, Place(7)):
            assert Place.parse(place.written()) == place
        assert (Place(7).who, Place(7).label, Place(7).written()) == ("rank 7", "7", "7")

    def test_bad_jobs(self):
        with pytest.raises(ValueError, match="cluster.worker is not given"):
            TaskJob(SCRIPT, Cluster("a:1", workers=()))
        with pytest.raises(ValueError, match="1 chief"):
            TaskJob(SCRIPT, Cluster(None, workers=("b:1",), ps=("c:1",)))
        with pytest.raises(ValueError, match="restarts is 1, expected 0 in a job without ps"):
            TaskJob(SCRIPT, Cluster(None, workers=("b:1",)), restarts=1)
        with pytest.raises(ValueError, match="cores per rank is 0"):
            TaskJob(SCRIPT, CLUSTER, 0)

    def test_more_tasks_than_cores_is_one_line(self):
        places = TaskJob(SCRIPT, CLUSTER).places
        assert core_warning(places, None, 4) is None
        assert core_warning(places, 2, 4).startswith("4 tasks x 2 cores share 4 cores:")

    def test_ports_differ(self):
        assert len(set(free_addresses(50))) == 50
        cluster = cluster_on_free_ports(ps=2, workers=3)
        assert (len(cluster.ps), len(cluster.workers), len(cluster.evaluators)) == (2, 3, 0)
        assert all(cluster.address(task).startswith("127.0.0.1:") for task in cluster.tasks())
        assert [t.name for t in cluster_on_free_ports(ps=0, workers=2).tasks()] == ["worker/0", "worker/1"]
        watched = cluster_on_free_ports(ps=2, workers=3, evaluator=True)
        assert watched.tasks()[-1] == Task("evaluator", 0)
        assert "evaluator" not in watched.spec()


class TestEnding:
    def test_a_failure_in_any_job(self):
        ending = Ending(3, None)
        assert ending.next_at() == math.inf
        ending.hear_failed(1, False, 10.0)
        ending.hear_failed(2, True, 10.5)
        assert (ending.next_at(), ending.due(10.9), ending.due(11.0)) == (11.0, "", "stop")
        ending.stopped(11.0)
        assert (ending.due(17.9), ending.due(18.0)) == ("", "kill")
        ending.killed = True
        assert ending.next_at() == math.inf

    def test_those_that_asked_for_patience_have_it(self):
        ending = Ending(3, None, chief_decides=True)
        ending.told_patient(120.0, 10.0)
        assert ending.is_patient and not ending.is_stopped
        assert (ending.due(129.0), ending.due(130.0)) == ("", "stop")
        ending.hear_failed(0, False, 20.0)  # the chief has left; the others follow
        assert (ending.due(20.9), ending.due(21.0)) == ("", "stop")
        ending.stopped(21.0)
        assert (ending.due(27.9), ending.due(28.0)) == ("", "kill")

    def test_the_deadline(self):
        ending = Ending(3, 60.0)
        ending.hear_ended(0, 0, 5.0)
        assert ending.due(60.0) == "stop"
        assert ending.overdue == (1, 2)

    def test_ranks_end_when_they_like(self):
        ending = Ending(2, None)
        ending.hear_ended(0, 0, 5.0)
        assert not ending.done
        assert ending.next_at() == math.inf

    def test_the_chiefs_good_end_is_the_jobs(self):
        ending = Ending(3, None, chief_decides=True)
        ending.hear_ended(1, 0, 3.0)  # another's is not
        assert ending.next_at() == math.inf
        ending.hear_ended(0, 0, 5.0)
        ending.hear_failed(2, False, 5.5)
        assert ending.done
        assert (ending.due(14.9), ending.due(15.0)) == ("", "stop")
        assert ending.lingering == (2,)

    @pytest.mark.parametrize(("peers_lost", "done"), [(True, True), (False, False)])
    def test_a_failure_shortly_before_it(self, peers_lost, done):
        """A worker whose connection to the chief has closed may be heard of first."""
        ending = Ending(2, None, chief_decides=True)
        ending.hear_failed(1, peers_lost, 4.9)
        ending.hear_ended(0, 0, 5.0)
        assert ending.done is done
        assert ending.next_at() == (15.0 if done else 5.9)

    def test_the_chiefs_failure_is_one(self):
        ending = Ending(2, None, chief_decides=True)
        ending.hear_failed(0, False, 5.0)
        ending.hear_ended(0, 1, 5.1)
        assert not ending.done
        assert ending.due(6.0) == "stop"


def test_lines_carry_the_task():
    merger = Merger(["chief/0", "ps/0", "worker/0"])
    shown = [merger.feed(i, "out", b"load\n", 0.0) for i in range(3)]
    assert "".join(t for each in shown for _, t in each) == "load\n[ps/0] load\n[worker/0] load\n"


def test_the_report_names_tasks():
    lost = Failure(0, "a", 10, 1, 2.0, ("UnavailableError",), "gone", task="chief/0")
    first = Failure(3, "a", 13, 137, 3.0, signal=9, task="worker/1")
    lines = verdict.report([lost, first]).splitlines()
    assert lines[0] == "these tasks failed after worker/1:"
    assert lines[1].startswith("  chief/0 on a (pid 10) failed: UnavailableError")
    assert lines[-1].startswith("worker/1 on a (pid 13) was killed by signal 9")


class TestCommand:
    def invoke(self, *args):
        return CliRunner().invoke(run, args)

    def test_dry_run_starts_nothing(self, tmp_path):
        script = tmp_path / "train.py"
        script.write_text("raise SystemExit(9)")
        options = ("--ps", "2", "--workers", "1", "--cores-per-rank", "1", "--dry-run")
        result = self.invoke(*options, str(script), "--workers", "7", "-np", "1")
        assert result.exit_code == 0, result.output
        command, *tasks = result.output.splitlines()
        assert command.endswith(f"script {script} --workers 7 -np 1")
        names = ["chief/0", "ps/0", "ps/1", "worker/0"]
        assert [line.split(" on cores ")[0] for line in tasks] == names
        settings = [dict(w.split("=", 1) for w in shlex.split(line) if "=" in w) for line in tasks]
        configs = [json.loads(each["TF_CONFIG"]) for each in settings]
        assert [f"{c['task']['type']}/{c['task']['index']}" for c in configs] == names
        assert all(c["cluster"] == configs[0]["cluster"] for c in configs)
        assert all(each["OMP_NUM_THREADS"] == "1" for each in settings)

    def test_one_ps_module_and_double_dash(self):
        result = self.invoke("--workers", "2", "--dry-run", "-m", "--", "my.train", "--", "x")
        command, *tasks = result.output.splitlines()
        assert command.endswith("module my.train -- x")
        assert [line.split(":")[0] for line in tasks] == NAMES

    def test_an_evaluator_besides(self):
        result = self.invoke("--workers", "2", "--evaluator", "--dry-run", "-m", "my.train")
        _, *tasks = result.output.splitlines()
        assert [line.split(":")[0] for line in tasks] == [*NAMES, "evaluator/0"]

    def test_workers_alone(self):
        result = self.invoke("--workers", "2", "--ps", "0", "--dry-run", "-m", "my.train")
        command, *tasks = result.output.splitlines()
        assert "--restarts 0" in command
        assert [line.split(":")[0] for line in tasks] == ["worker/0", "worker/1"]
        settings = [dict(w.split("=", 1) for w in shlex.split(line) if "=" in w) for line in tasks]
        for index, each in enumerate(settings):
            config = json.loads(each["TF_CONFIG"])
            assert config["task"] == {"type": "worker", "index": index}
            assert [*config["cluster"]] == ["worker"]

    @pytest.mark.parametrize(
        ("args", "words"),
        [
            (["train.py"], "or '--workers'"),
            (["-np", "2", "--restarts", "1", "train.py"], "--restarts is for the tasks"),
            (["-np", "2", "--workers", "2", "train.py"], "-np and --workers exclude each other"),
            (["-np", "2", "--ps", "1", "train.py"], "-np and --ps exclude each other"),
            (["--ps", "1", "train.py"], "--ps needs --workers"),
            (["-np", "2", "--evaluator", "train.py"], "--evaluator needs --workers"),
            (["--evaluator", "train.py"], "--evaluator needs --workers"),
            (["--workers"], "'--workers' requires an argument"),
            (["--workers", "train.py"], "'train.py' is not a valid integer"),
            (["--workers", "0", "train.py"], "0 is not in the range x>=1"),
            (["--workers", "1", "--ps", "-1", "train.py"], "-1 is not in the range x>=0"),
            (["--ps", "0", "train.py"], "--ps needs --workers"),
            (["--workers", "2", "--ps", "0", "--restarts", "1", "train.py"], "--restarts goes with ps"),
            (["--workers", "2", "--ps", "0", "--evaluator", "train.py"], "--evaluator goes with ps"),
            (["--workers", "1", "--controller", "mpi", "train.py"], "--controller is for ranks"),
            (["--workers", "1", "nowhere.py"], "there is no file 'nowhere.py'"),
            (["--workers", "1"], "Missing argument 'PROGRAM'"),
        ],
    )
    def test_usage(self, args, words):
        result = self.invoke(*args)
        assert result.exit_code == 2
        assert words in " ".join(result.output.split())
