"""A job as a Compose file: who is there, what each is told, and that docker/ holds what `tfdist render` writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tfdist import tf_config
from tfdist.cli.main import main
from tfdist.render import compose
from tfdist.render.wanted import Wanted

ROOT = Path(__file__).parents[2]
TRAIN = ("python", "train.py", "--epochs", "3")

# What wrote the files in docker/. After a change of tfdist/render run these again, from the repository's root.
READY = [
    "compose --ps 1 --workers 2 -o docker/compose.ps.yml examples/parameter_server.py",
    "compose --ring 2 -o docker/compose.ring.yml examples/ring.py",
    "compose --ring 2 --ssh -o docker/compose.ring-ssh.yml examples/ring.py",
    "k8s --ps 1 --workers 2 -o docker/k8s.ps.yml examples/parameter_server.py",
    "k8s --ring 2 -o docker/k8s.ring.yml examples/ring.py",
    "k8s --ring 2 --ssh -o docker/k8s.ring-ssh.yml examples/ring.py",
]


def services(*args, **options):
    return yaml.safe_load(compose.render(Wanted(TRAIN, *args, **options)))["services"]


def render(*args):
    return CliRunner().invoke(main, ["render", *args])


@pytest.mark.parametrize("line", READY, ids=lambda line: line.split("-o ")[1].split()[0])
def test_docker_holds_what_render_writes(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docker").mkdir()
    done = render(*line.split())
    assert done.exit_code == 0, done.output
    (written,) = (tmp_path / "docker").iterdir()
    there = ROOT / "docker" / written.name
    assert written.read_text() == there.read_text(), f"write it again: tfdist render {line}"


class TestComposeFile:
    def test_a_parameter_server_job_is_a_service_a_task(self):
        found = services(2, 1, evaluator=True)
        assert list(found) == ["chief", "ps-0", "worker-0", "worker-1", "evaluator"]
        for name, each in found.items():
            cluster, task = tf_config.parse(each["environment"]["TF_CONFIG"])
            assert cluster.address(task) == f"{name}:2222"
            assert cluster.workers == ("worker-0:2222", "worker-1:2222")

    @pytest.mark.parametrize("options", [{}, {"ps": 1}, {"ps": 2, "evaluator": True}], ids=str)
    def test_the_first_task_alone_ends_the_job(self, options):
        first, *others = services(3, **options).values()
        assert first["command"] == list(TRAIN)
        for each in others:
            assert (each["command"][:2], each["command"][3:]) == (["sh", "-c"], ["sh", *TRAIN])
            assert each["command"][2].endswith("wait $$! && exec sleep infinity\n")

    def test_a_ring_is_workers_alone(self):
        found = services(3)
        assert list(found) == ["worker-0", "worker-1", "worker-2"]
        told = json.loads(found["worker-2"]["environment"]["TF_CONFIG"])
        assert set(told["cluster"]) == {"worker"}
        assert told["task"] == {"type": "worker", "index": 2}

    def test_nothing_is_published_and_no_task_has_privileges(self):
        for found in (services(2, 1), services(2), services(2, ssh=True)):
            for each in found.values():
                assert not each.keys() & {"ports", "network_mode", "privileged", "user"}
                assert (each["cap_drop"], each["security_opt"]) == (["ALL"], ["no-new-privileges:true"])

    def test_keys_are_made_in_memory_before_the_hosts_that_need_them(self):
        whole = yaml.safe_load(compose.render(Wanted(TRAIN, 2, ssh=True)))
        found = whole["services"]
        assert list(found) == ["keys", "host-0", "host-1", "launcher"]
        assert whole["volumes"]["keys"]["driver_opts"]["type"] == "tmpfs"
        assert list(found["host-1"]["depends_on"]) == ["keys"]
        assert list(found["launcher"]["depends_on"]) == ["host-0", "host-1"]
        assert "-np 2 -H host-0:1,host-1:1 " in found["launcher"]["command"][2]
        assert found["launcher"]["command"][4:] == list(TRAIN)

    def test_every_worker_has_gpus_of_its_own(self):
        found = services(2, 1, image="mine", gpus=2)
        ids = [
            each["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
            for name, each in found.items()
            if name.startswith("worker")
        ]
        assert ids == [["0", "1"], ["2", "3"]]
        assert "deploy" not in found["chief"]
        assert "deploy" not in found["ps-0"]
        with_ssh = services(2, image="mine", gpus=1, ssh=True)
        assert [name for name, each in with_ssh.items() if "deploy" in each] == ["host-0", "host-1"]

    def test_a_dollar_of_the_program_is_no_variable_of_composes(self):
        found = yaml.safe_load(compose.render(Wanted(("python", "train.py", "$HOME"), 2, 1)))
        assert found["services"]["chief"]["command"][-1] == "$$HOME"
        assert found["services"]["worker-1"]["command"][-1] == "$$HOME"

    def test_volumes_are_for_tasks_and_not_for_who_makes_keys(self):
        found = yaml.safe_load(compose.render(Wanted(TRAIN, 2, ssh=True), ("./out:/work/out",)))["services"]
        assert found["keys"]["volumes"] == ["keys:/keys"]
        assert found["launcher"]["volumes"] == found["host-0"]["volumes"] == ["keys:/keys", "./out:/work/out"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers is 0, expected 1 or more"),
        ({"workers": 2, "ps": -1}, "ps is -1, expected 0 or more"),
        ({"workers": 2, "gpus": 1}, "gpus is 1 without an image, expected one with CUDA"),
        ({"workers": 2, "ps": 1, "ssh": True}, "ssh with 1 ps, expected a ring"),
        ({"workers": 2, "evaluator": True}, "an evaluator without ps"),
        ({"workers": 2, "command": ()}, "the command is empty"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Wanted(**{"command": TRAIN, **options})


class TestStaying:
    """The shell around the tasks that are not the first."""

    def start(self, script):
        return subprocess.Popen(["sh", "-c", compose._STAY, "sh", sys.executable, "-c", script], stdout=subprocess.PIPE)

    def test_a_failure_is_passed_on(self):
        with self.start("raise SystemExit(7)") as shell:
            assert shell.wait(60) == 7

    def test_a_signal_reaches_the_program_which_has_time_to_end(self):
        handle = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved'), exit(0)))"
        with self.start(f"{handle}; print('ready', flush=True); time.sleep(60)") as shell:
            assert shell.stdout.readline() == b"ready\n"
            shell.terminate()
            assert shell.stdout.read() == b"saved\n"
            shell.wait(60)

    def test_success_is_no_end(self):
        with self.start("print('done', flush=True)") as shell:
            assert shell.stdout.readline() == b"done\n"
            with pytest.raises(subprocess.TimeoutExpired):
                shell.wait(1)
            shell.terminate()
            assert shell.wait(60) != 0


class TestCommand:
    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("compose train.py", "Missing option '--ring'"),
            ("compose --ring 2 --workers 2 train.py", "--ring and --workers exclude each other"),
            ("compose --ring 2 --ps 1 train.py", "--ps goes with --workers"),
            ("compose --ring 2 --evaluator train.py", "--evaluator goes with --workers"),
            ("compose --workers 2 --ssh train.py", "--ssh and --workers exclude each other"),
            ("compose --workers 2 --ps 0 --evaluator train.py", "an evaluator without ps"),
            ("compose --ring 2 --gpus 1 train.py", "gpus is 1 without an image"),
            ("compose --ring 1 train.py", "1 is not in the range x>=2"),
            ("compose --ring 2", "Missing argument 'PROGRAM'"),
            ("k8s --ring 2 --name Big train.py", "the name is 'Big', expected"),
            ("kubernetes --ring 2 train.py", "No such command 'kubernetes'"),
        ],
    )
    def test_a_wrong_choice_is_said(self, line, words):
        done = render(*line.split())
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())

    def test_a_module_and_its_own_options(self):
        done = render("compose", "--workers", "1", "-m", "my.train", "--ps", "7", "-v", "x")
        assert done.exit_code == 0, done.output
        found = yaml.safe_load(done.output)["services"]
        assert list(found) == ["chief", "ps-0", "worker-0"]
        assert found["chief"]["command"] == ["python", "-m", "my.train", "--ps", "7", "-v", "x"]

    def test_workers_alone(self):
        found = yaml.safe_load(render("compose", "--ps", "0", "--workers", "2", "train.py").output)
        assert list(found["services"]) == ["worker-0", "worker-1"]
