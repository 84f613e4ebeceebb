"""TF_CONFIG: what is read from it, what is written into it, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tf_config import ADDRESSES, CLUSTER, WORKER, config, refused
from tfdist.tf_config import JOBS, Cluster, Task, check_job, from_env, need_chief, need_workers, parse

ROOT = Path(__file__).parents[2]

def test_a_cluster_is_read():
    assert parse(config()) == (CLUSTER, Task("worker", 1))


@pytest.mark.parametrize(
    "text",
    ["", "  \n", "{}", '{"cluster": {}}', '{"cluster": {}, "task": {"type": "ps"}}', '{"task": 1}'],
)
def test_a_process_alone(text):
    assert parse(text) is None
    assert from_env({"TF_CONFIG": text}) is None


def test_the_environment(monkeypatch):
    assert from_env({}) is None
    assert from_env({"TF_CONFIG": config()}) == (CLUSTER, Task("worker", 1))
    monkeypatch.setenv("TF_CONFIG", config())
    assert from_env() == (CLUSTER, Task("worker", 1))
    monkeypatch.delenv("TF_CONFIG")
    assert from_env() is None


def test_tasks():
    cluster = Cluster("a:1", ("b:1", "c:1"), ("d:1",), ("e:1",))
    names = [task.name for task in cluster.tasks()]
    assert names == ["chief/0", "ps/0", "worker/0", "worker/1", "evaluator/0"]
    assert [cluster.address(task) for task in cluster.tasks()] == [
        "a:1",
        "d:1",
        "b:1",
        "c:1",
        "e:1",
    ]
    assert [task.is_chief for task in cluster.tasks()] == [True, False, False, False, False]


def test_spec_has_neither_evaluators_nor_empty_jobs():
    assert Cluster("a:1", ("b:1", "c:1"), ("d:1",), ("e:1",)).spec() == ADDRESSES
    assert Cluster(None, ("b:1",)).spec() == {"worker": ["b:1"]}


def test_written_evaluators_only_if_there_are_any():
    written = json.loads(Cluster("a:1", ("b:1",), (), ("e:1",)).tf_config(Task("chief", 0)))
    assert written == {
        "cluster": {"chief": ["a:1"], "worker": ["b:1"], "evaluator": ["e:1"]},
        "task": {"type": "chief", "index": 0},
    }
    written = json.loads(CLUSTER.tf_config(Task("evaluator", 0)))
    assert written == {"cluster": ADDRESSES, "task": {"type": "evaluator", "index": 0}}


@st.composite
def clusters(draw):
    """A valid cluster and one of its tasks, or the evaluator that it does not list."""
    counts = [draw(st.integers(0, most)) for most in (1, 4, 3, 2)]
    if not any(counts):
        counts[draw(st.integers(0, 3))] = 1
    hosts = draw(
        st.sampled_from(
            [["localhost"], ["127.0.0.1", "[::1]"], ["a", "b-1.svc", "10.0.0.1", "[fe80::2]"]]
        )
    )
    ports = draw(
        st.lists(st.integers(1, 65535), min_size=sum(counts), max_size=sum(counts), unique=True)
    )
    rest = iter([f"{draw(st.sampled_from(hosts))}:{port}" for port in ports])
    chief, workers, ps, evaluators = (tuple(next(rest) for _ in range(count)) for count in counts)
    cluster = Cluster(chief[0] if chief else None, workers, ps, evaluators)
    tasks = cluster.tasks() + (() if evaluators else (Task("evaluator", 0),))
    return cluster, draw(st.sampled_from(tasks))


@given(clusters())
def test_round_trip(drawn):
    cluster, task = drawn
    assert parse(cluster.tf_config(task)) == (cluster, task)


class TestJson:
    def test_single_quotes(self):
        text = '{"cluster":\n {\'worker\': ["b:1"]}}'
        refused(text, "line 2 column 3", f"near {text!r}", "single quotes", "json.dumps")

    def test_quotes_that_a_shell_removed(self):
        refused(
            "{cluster: {worker: [b:1]}}", "line 1 column 2", "'{cluster: {worker: [b'", "a shell"
        )

    @pytest.mark.parametrize("text", ["[]", "null", '"worker"', "1"])
    def test_no_object(self, text):
        refused(text, "the value is", repr(json.loads(text)), "a JSON object")

    @pytest.mark.parametrize("cluster", [["b:1"], None, "b:1", 0])
    def test_cluster_is_no_object(self, cluster):
        refused(config(cluster), f"cluster is {cluster!r}", "a JSON object")


class TestJobs:
    @pytest.mark.parametrize(
        ("job", "meant"),
        [
            ("ps_hosts", "ps"),
            ("parameter_server", "ps"),
            ("worker_hosts", "worker"),
            ("workers", "worker"),
            ("Worker", "worker"),
            ("master_hosts", "chief"),
        ],
    )
    def test_misnamed(self, job, meant):
        refused(
            config({job: ["b:1"]}), f"cluster.{job} is no known job", f"Write '{meant}' instead"
        )
        refused(
            config(task={"type": job, "index": 0}),
            f"task.type is '{job}'",
            f"Write '{meant}' instead",
        )

    def test_unknown(self):
        refused(
            config({"gpu": ["b:1"]}),
            "cluster.gpu",
            "one of chief, worker, ps, evaluator",
            "remove it",
        )

    def test_master_is_the_chief(self):
        cluster = {**ADDRESSES, "master": ["a:1"]}
        del cluster["chief"]
        for name in ("master", "chief"):
            assert parse(config(cluster, {"type": name, "index": 0})) == (CLUSTER, Task("chief", 0))
        assert parse(config(task={"type": "master", "index": 0})) == (CLUSTER, Task("chief", 0))

    def test_master_in_messages(self):
        refused(config({"master": ["a"]}), "cluster.master[0] is 'a'")

    def test_master_beside_chief(self):
        for order in (["master", "chief"], ["chief", "master"]):
            cluster = {name: [f"{name}:1"] for name in order}
            refused(config(cluster), "cluster.master", "cluster.chief", "one of the two")

    @pytest.mark.parametrize("name", ["chief", "master"])
    def test_two_chiefs(self, name):
        refused(config({name: ["a:1", "b:1"]}), f"cluster.{name} is ['a:1', 'b:1']", "one address")

    def test_no_chief_and_empty_jobs(self):
        cluster, task = parse(config({"worker": ["b:1", "c:1"], "ps": [], "chief": []}))
        assert (cluster, task) == (Cluster(None, ("b:1", "c:1")), Task("worker", 1))


class TestTask:
    def test_missing(self):
        refused('{"cluster": {"worker": ["b:1"]}}', "task is missing", '"task": {"type"')

    @pytest.mark.parametrize("task", [None, "worker", ["worker", 0]])
    def test_no_object(self, task):
        refused(config(task=task), f"task is {task!r}", "a JSON object")

    def test_type_or_index_missing(self):
        refused(config(task={"index": 0}), "task.type is missing")
        refused(config(task={"type": "worker"}), "task.index is missing")

    @pytest.mark.parametrize("job", ["gpu", "", None, 1, ["worker"]])
    def test_unknown_type(self, job):
        refused(
            config(task={"type": job, "index": 0}),
            f"task.type is {job!r}",
            "chief, worker, ps, evaluator",
        )

    @pytest.mark.parametrize("index", ["1", True, False, -1, 1.0, None, [0]])
    def test_index_is_no_number(self, index):
        refused(
            config(task={"type": "worker", "index": index}),
            f"task.index is {index!r}",
            "without quotes",
        )

    def test_index_out_of_range(self):
        refused(
            config(task={"type": "worker", "index": 2}),
            "task.index is 2",
            "worker has 2 addresses",
            "0 to 1",
        )
        refused(
            config(task={"type": "ps", "index": 1}),
            "task.index is 1",
            "ps has 1 address,",
            "expected 0.",
        )
        alone = config({"worker": ["b:1"]}, {"type": "ps", "index": 0})
        refused(
            alone,
            "task.index is 0",
            "cluster.ps has 0 addresses",
            "another task.type",
            "cluster.ps",
        )

    def test_task_of_another_cluster(self):
        for method in (CLUSTER.address, CLUSTER.tf_config):
            with pytest.raises(
                ValueError, match=r"TF_CONFIG: task.index is 2, but cluster.worker has 2 addresses"
            ):
                method(Task("worker", 2))


class TestEvaluator:
    def test_listed_for_every_task(self):
        cluster, task = parse(
            config({**ADDRESSES, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 0})
        )
        assert cluster.address(task) == "e:1"
        assert parse(config({**ADDRESSES, "evaluator": ["e:1"]}))[0] == cluster

    def test_not_listed(self):
        cluster, task = parse(config(task={"type": "evaluator", "index": 0}))
        assert (cluster, task) == (CLUSTER, Task("evaluator", 0))
        with pytest.raises(
            ValueError, match=r"TF_CONFIG: cluster.evaluator is not given.*works without"
        ):
            cluster.address(task)

    def test_not_listed_has_index_0_only(self):
        refused(
            config(task={"type": "evaluator", "index": 1}),
            "task.index is 1",
            "0 addresses",
            "expected 0.",
        )

    def test_listed_out_of_range(self):
        cluster = {**ADDRESSES, "evaluator": ["e:1"]}
        refused(
            config(cluster, {"type": "evaluator", "index": 1}),
            "task.index is 1",
            "evaluator has 1 address,",
        )


def test_other_keys_are_ignored():
    task = {**WORKER, "trial": "1"}
    assert parse(config(task=task, environment="cloud", rpc_layer="grpc", job={})) == parse(
        config()
    )


@pytest.mark.parametrize("layer", ["grpc+verbs", "", None])
def test_other_rpc_layers(layer):
    refused(config(rpc_layer=layer), f"rpc_layer is {layer!r}", "'grpc'")


def test_long_values_are_cut_in_messages():
    with pytest.raises(ValueError, match=r"\.\.\.") as error:
        parse(config({"worker": "b:1," * 1000}))
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("cluster", "found", "missing"),
    [
        (
            Cluster(None, ("b:1", "c:1"), ("d:1",)),
            "0 chief, 2 worker, 1 ps",
            "under cluster.chief in",
        ),
        (Cluster("a:1", (), ("d:1",)), "1 chief, 0 worker, 1 ps", "under cluster.worker in"),
        (Cluster("a:1", ("b:1",)), "1 chief, 1 worker, 0 ps", "under cluster.ps in"),
        (
            Cluster(None, ("b:1",)),
            "0 chief, 1 worker, 0 ps",
            "under cluster.chief and cluster.ps in",
        ),
        (
            Cluster(None, ()),
            "0 chief, 0 worker, 0 ps",
            "cluster.chief and cluster.worker and cluster.ps",
        ),
    ],
)
def test_what_a_parameter_server_job_needs(cluster, found, missing):
    need_chief(CLUSTER)
    with pytest.raises(
        ValueError, match=r"TF_CONFIG: cluster has .*a parameter-server job needs"
    ) as error:
        need_chief(cluster)
    assert found in str(error.value)
    assert missing in str(error.value)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (Cluster(None, ("a:1", "b:1"), ("c:1",)), "cluster.ps has 1, expected none"),
        (Cluster(None, ("a:1",), evaluators=("c:1",)), "cluster.evaluator has 1, expected none"),
        (Cluster("a:1", ()), "cluster.worker is not given, expected 1 worker or more"),
    ],
)
def test_what_one_models_stages_need(cluster, words):
    with pytest.raises(ValueError, match=r"^TF_CONFIG: .*, expected .+\. [A-Z]") as error:
        need_workers(cluster)
    assert words in str(error.value)
    need_workers(Cluster("a:1", ("b:1",)))
    check_job(Cluster(None, ("a:1", "b:1")))
    check_job(CLUSTER)
    with pytest.raises(ValueError, match="1 chief"):
        check_job(Cluster(None, ("a:1",), ("c:1",)))


def test_the_first_task_runs_the_program():
    assert CLUSTER.first == Task("chief", 0)
    assert Cluster(None, ("a:1", "b:1")).first == Task("worker", 0)
    assert Cluster(None, ("a:1", "b:1")).tasks()[0] == Task("worker", 0)


def test_jobs_are_those_of_a_task():
    assert [Task(job, 0).job for job in JOBS] == ["chief", "worker", "ps", "evaluator"]
    assert len({Task("worker", 0), Task("worker", 0), Task("worker", 1)}) == 2


def test_imports_without_tensorflow():
    script = (
        "import sys, tfdist.tf_config\n"
        "print([name for name in ('tensorflow', 'keras', 'horovod') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
