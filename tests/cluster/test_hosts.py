"""Jobs over several hosts: network namespaces with an sshd each, whose own names lead to 127.0.1.1."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers import hosts as testing

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why := testing.missing()), reason=why or "-")]

ROOT = Path(__file__).parents[2]
TRAIN = str(Path(__file__).with_name("train.py"))
BIN = Path(sys.executable).parent
TFDIST = [sys.executable, "-m", "tfdist.cli.main"]
# Each rank of such a job has a core's threads only.
ENV = {
    **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT),
    "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "PATH": f"{BIN}:{os.environ['PATH']}",
}  # fmt: skip


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """Two hosts whose network interfaces have different names, and one each that leads nowhere."""
    with testing.Hosts(2, tmp_path_factory.mktemp("hosts"), spare_network=True) as made:
        yield made


@pytest.fixture(scope="module")
def alone():
    """What one process says of the weights."""
    done = subprocess.run([sys.executable, TRAIN], env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def tfdist(hosts, *words, **options):
    """`tfdist run` on the first host."""
    return hosts.run(0, [*TFDIST, "run", "-i", str(hosts.key), *words], env=ENV, cwd=ROOT, **options)


def script(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


class TestRing:
    def test_over_two_hosts(self, hosts, alone):
        """Rank 0 on the other host; the same weights as one process."""
        done = tfdist(hosts, "-H", "beta:1,alpha:1", TRAIN)
        assert done.returncode == 0, done.stderr
        assert "tfdist: 2 processes on beta (198.18.0.2, lan1), alpha (198.18.0.1, eth0)" in done.stderr
        assert alone in done.stdout.splitlines()
        assert f"[1] {alone}" in done.stdout.splitlines()

    def test_from_tf_config(self, hosts, alone):
        """No ssh, no launcher: worker 0 hosts the rendezvous at its own name, which is 127.0.1.1 to itself."""
        by_tf_config(hosts, alone)

    @pytest.mark.parametrize("count", [2, 4])
    def test_by_plain_horovodrun(self, tmp_path, alone, count):
        """Which wants interfaces of one name: its own search finds them. With four, the ways without it too."""
        with testing.Hosts(count, tmp_path, same_names=True) as hosts:
            names = ",".join(f"{name}:1" for name in hosts.names)
            words = ["horovodrun", "--gloo", "-np", str(count), "-H", names, "-i", str(hosts.key)]
            done = hosts.run(0, [*words, sys.executable, TRAIN], timeout=200, env=ENV, cwd=ROOT)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count(alone) == count, done.stdout
            if count == 4:
                by_tf_config(hosts, alone)
                done = tfdist(hosts, "-H", names, TRAIN, timeout=200)
                assert done.returncode == 0, done.stderr
                assert done.stdout.count(alone) == count, done.stdout


class TestParameterServer:
    def test_over_two_hosts(self, hosts):
        done = tfdist(hosts, "-H", "alpha:2,beta:2", "--ps", "1", "--workers", "2", TRAIN)
        assert done.returncode == 0, done.stderr
        assert "[worker/1] serving as worker/1" in done.stdout
        assert done.stdout.splitlines()[-1].startswith("total ")

    def test_from_tf_config(self, hosts):
        cluster = {"chief": ["alpha:2222"], "ps": ["beta:2222"], "worker": ["beta:2223"]}
        tasks = [(1, "ps"), (1, "worker"), (0, "chief")]
        started = []
        for host, job in tasks:
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
            started.append(hosts.popen(host, [sys.executable, TRAIN], env={**ENV, "TF_CONFIG": config}, cwd=ROOT))
        for process in started:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
        assert out.splitlines()[-1].startswith("total ")


class TestWhatIsWrong:
    """L5: before anything is started, with the host and the remedy."""

    def failed(self, hosts, *words):
        done = tfdist(hosts, *words, TRAIN)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        return done.stderr

    def test_an_unknown_host(self, hosts):
        said = self.failed(hosts, "-H", "alpha:1,omega:1")
        assert "omega cannot be reached by ssh" in said
        assert "Correct the name, or add it to DNS or /etc/hosts. The command was: ssh -T" in said

    def test_a_wrong_port(self, hosts):
        assert "beta cannot be reached by ssh" in (said := self.failed(hosts, "-H", "beta:1", "-p", "2299"))
        assert "Connection refused" in said
        assert "choose its port by -p" in said

    def test_a_key_that_is_not_known_there(self, hosts, tmp_path):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
        words = [*TFDIST, "run", "-i", str(tmp_path / "other"), "-H", "beta:1", TRAIN]
        done = hosts.run(0, words, env=ENV, cwd=ROOT)
        assert done.returncode == 1
        assert "beta cannot be reached by ssh" in done.stderr
        assert "authorized_keys" in done.stderr

    def test_interfaces_that_no_host_shares(self, hosts):
        said = self.failed(hosts, "-H", "alpha:1,beta:1", "--network-interfaces", "eth0")
        assert "beta has of the interfaces eth0 none with an IPv4 address; it has lan1 (198.18.0.2)" in said
        said = self.failed(hosts, "-H", "alpha:1,beta:1", "--network-interfaces", "docker0")
        assert "cannot connect to alpha at any of 198.19.0.1 (docker0)" in said

    def test_a_program_that_is_not_there(self, hosts, tmp_path):
        """On one host only it cannot be tried here: they share their files. So: gone in between."""
        gone = tmp_path / "gone.py"
        done = tfdist(hosts, "-H", "beta:1", str(gone))
        assert done.returncode == 2
        assert "there is no file" in done.stderr


class TestEnds:
    def test_environment_code_and_output(self, hosts, tmp_path):
        """The environment goes along, each rank has its place and log files, the first exit code counts."""
        text = """
import os, socket, sys
names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
print(socket.gethostname(), os.environ["MINE"], *(os.environ["HOROVOD_" + n] for n in names), sys.argv[1:])
sys.exit(3 * (os.environ["HOROVOD_RANK"] == "2"))
"""
        words = ["-H", "alpha:1,beta:2", "--log-dir", str(tmp_path / "logs"), script(tmp_path, text), "a b", "$c"]
        env = {**ENV, "MINE": "a 'b' \"c\""}
        done = hosts.run(0, [*TFDIST, "run", "-i", str(hosts.key), *words], env=env, cwd=ROOT)
        assert done.returncode == 3
        said = [
            "alpha a 'b' \"c\" 0 3 0 1 0 2 ['a b', '$c']",
            "beta a 'b' \"c\" 1 3 0 2 1 2 ['a b', '$c']",
            "beta a 'b' \"c\" 2 3 1 2 0 1 ['a b', '$c']",
        ]
        assert sorted(line.removeprefix("[1] ").removeprefix("[2] ") for line in done.stdout.splitlines()) == said
        assert "rank 2 on beta" in done.stderr
        assert "left with exit code 3" in done.stderr
        assert (tmp_path / "logs" / "rank-2.out").read_text() == said[2] + "\n"
        assert f"its whole output is in {tmp_path}/logs/rank-2.err" in done.stderr

    def test_rank_0_has_a_terminal_where_the_command_has_one(self, hosts, tmp_path):
        text = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty(), os.environ['HOROVOD_RANK'], flush=True)"
        words = [*TFDIST, "run", "-i", str(hosts.key), "-H", "beta:1,alpha:1", script(tmp_path, text)]
        done = hosts.run(0, ["script", "-qec", shlex.join(words), "/dev/null"], env=ENV, cwd=ROOT)
        assert done.returncode == 0, done.stdout
        assert "True True 0" in done.stdout
        assert "[1] False False 1" in done.stdout

    @pytest.mark.parametrize("victim", ["rank", "launcher", "ssh", "agent"])
    def test_whoever_is_killed(self, hosts, tmp_path, victim):
        """L3: the job ends, and nothing is left on any host."""
        text = "import os, threading; print('pid', os.getpid(), os.getppid(), flush=True); threading.Event().wait()"
        words = [*TFDIST, "run", "-i", str(hosts.key), "-H", "alpha:1,beta:1", script(tmp_path, text)]
        process = hosts.popen(0, words, env=ENV, cwd=ROOT)
        pids = {}
        while len(pids) < 2:
            line = process.stdout.readline().split()
            assert line, process.stderr.read()
            pids["beta" if line[0] == "[1]" else "alpha"] = int(line[-2]), int(line[-1])
        victims = {
            "rank": pids["beta"][0],
            "launcher": hosts.processes("tfdist.cli.main", "alpha:1,beta:1")[0],
            "ssh": hosts.processes("ssh", "-T", "beta")[0],
            "agent": psutil.Process(pids["beta"][1]).ppid(),
        }
        os.kill(victims[victim], signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        if victim == "launcher":
            assert process.returncode != 0
        else:
            assert process.returncode in (1, 128 + signal.SIGKILL), err
            assert "rank 1 on beta" in err
        if victim == "rank":
            assert "was killed by signal 9 (SIGKILL)" in err
        elif victim != "launcher":
            assert "the host was lost" in err
        gone(hosts, [pid for pair in pids.values() for pid in pair])

    def test_sigterm_ends_all(self, hosts, tmp_path):
        text = "import threading; print('up', flush=True); threading.Event().wait()"
        words = [*TFDIST, "run", "-i", str(hosts.key), "-H", "alpha:1,beta:1", script(tmp_path, text)]
        process = hosts.popen(0, words, env=ENV, cwd=ROOT)
        for _ in range(2):
            assert "up" in process.stdout.readline()
        os.kill(hosts.processes("tfdist.cli.main", "alpha:1,beta:1")[0], signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert "ended by SIGTERM; no process is left" in err

    @pytest.mark.parametrize("job", [["-H", "beta:1,alpha:1"], ["-H", "alpha:2,beta:1", "--ps", "1", "--workers", "1"]])
    def test_preemption(self, hosts, tmp_path, job):
        """SIGTERM: ranks and chief are told of, also on other hosts, and have the time that a checkpoint takes."""
        kept = tmp_path / "kept"
        words = [*TFDIST, "run", "-i", str(hosts.key), *job, TRAIN, "60", str(kept)]
        process = hosts.popen(0, words, env=ENV, cwd=ROOT)
        while (line := process.stdout.readline()) and line != "epoch 12\n":
            pass
        assert line, process.stderr.read()
        os.kill(hosts.processes("tfdist.cli.main")[0], signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == os.EX_TEMPFAIL, err
        assert f"tfdist: leaving with exit code 75 (SIGTERM); {kept}/0000" in out
        assert "left with exit code 75: start the job again to go on" in err
        assert len(list(kept.iterdir())) == 1

    def test_a_host_is_cut_off_in_mid_epoch(self, hosts):
        """L3: the rest ends within seconds, the host is named; its own processes end without a word from here."""
        words = [*TFDIST, "run", "-i", str(hosts.key), "-H", "alpha:1,beta:1", TRAIN, "3", "stay"]
        process = hosts.popen(0, words, env=ENV, cwd=ROOT)
        try:
            while (line := process.stdout.readline()) and line != "epoch 1\n":
                pass
            assert line, process.stderr.read()
            hosts.cut_off(1)
            began = time.monotonic()
            out, err = process.communicate(timeout=90)
            assert process.returncode == 1
            assert time.monotonic() - began < 45
            assert "rank 1 on beta" in err
            assert "nothing was heard of it for 15 s" in err
            ends = time.monotonic() + 60
            while left := agents(hosts):
                assert time.monotonic() < ends, left
                time.sleep(0.5)
        finally:
            hosts.plug_in(1)


def by_tf_config(hosts, alone):
    """The ring of one worker a host, each started with its own TF_CONFIG, rank 0 last."""
    cluster = {"worker": [f"{name}:2222" for name in hosts.names]}
    started = []
    for i in reversed(range(len(hosts.names))):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})
        started.append(hosts.popen(i, [sys.executable, TRAIN], env={**ENV, "TF_CONFIG": config}, cwd=ROOT))
    ended = [(*process.communicate(timeout=200), process.returncode) for process in started]
    for out, err, code in ended:
        assert code == 0, err
        assert out.splitlines()[-1] == alone


def gone(hosts, pids):
    """Wait until these have ended, and all agents."""
    ends = time.monotonic() + 40
    while left := [pid for pid in pids if psutil.pid_exists(pid)] + agents(hosts):
        assert time.monotonic() < ends, left
        time.sleep(0.1)


def agents(hosts):
    """Agents that run."""
    return hosts.processes("tfdist.launch.agent")
