"""Hosts, ssh's command and failures, preflight: pure plans of jobs over several hosts."""

from __future__ import annotations

import os
import shlex
import tempfile

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cli.run import run as verb
from tfdist.launch import hosts_plan, links, preflight, ssh
from tfdist.launch.hosts import Host, parse_hostfile, parse_hosts, seats
from tfdist.launch.hosts_plan import HostsJob
from tfdist.launch.logs import LogFiles
from tfdist.launch.output import Lines
from tfdist.launch.place import Place
from tfdist.launch.plan import Program
from tfdist.launch.preflight import Facts
from tfdist.launch.rundir import RunDir
from tfdist.launch.ssh import Ssh
from tfdist.new_cluster import cluster_of, task_names

TWO = parse_hosts("a:2,me@b:2")
SCRIPT = Program("script", "train.py", ("--lr", "0.1 "))


class TestHosts:
    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("a:2,b:1", [("a", 2, ""), ("b", 1, "")]),
            ("a", [("a", 1, "")]),
            ("localhost:4", [("localhost", 4, "")]),
            ("me@10.0.0.1:3, n-2.lan", [("10.0.0.1", 3, "me"), ("n-2.lan", 1, "")]),
        ],
    )
    def test_read(self, text, hosts):
        assert [(h.name, h.slots, h.user) for h in parse_hosts(text)] == hosts

    @pytest.mark.parametrize("text", ["", "a:", "a:x", ":2", "a b", "a,,b", "a:2:3", "-oProxyCommand=x y", "a;b"])
    def test_malformed(self, text):
        with pytest.raises(ValueError, match="-H: .* is no host, expected a name or IPv4 address such as 'host1:2'"):
            parse_hosts(text)

    def test_no_slots_and_twice(self):
        with pytest.raises(ValueError, match="host 'a' has 0 slots"):
            parse_hosts("a:0")
        with pytest.raises(ValueError, match="-H names the host 'a' twice"):
            parse_hosts("a:1,b:1,a:1")

    def test_a_file_as_horovod_and_open_mpi_write_it(self):
        text = "# cluster\na slots=2\n\nme@b:3  # big\nc\n"
        assert [(h.target, h.slots) for h in parse_hostfile(text, "f")] == [("a", 2), ("me@b", 3), ("c", 1)]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "f names no host"),
            ("a slot=2", "f, line 1: 'slot=2' after 'a', expected slots=NUMBER"),
            ("a\nb slots=x", "f, line 2: 'slots=x'"),
            ("a:2 slots=2", "'slots=2' after 'a:2'"),
            ("a b", "'b' after 'a'"),
        ],
    )
    def test_a_wrong_file(self, text, message):
        with pytest.raises(ValueError, match=message):
            parse_hostfile(text, "f")

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
    def test_seats_are_those_that_horovod_deals_out(self, slots, data):
        """Host after host; local and cross ranks against a count by hand."""
        hosts = [Host(f"h{i}", n) for i, n in enumerate(slots)]
        count = data.draw(st.integers(1, sum(slots)))
        found = seats(hosts, count)
        assert [seat.number for seat in found] == list(range(count))
        flat = [h for h, n in enumerate(slots) for _ in range(n)][:count]
        assert [seat.host for seat in found] == flat
        for seat in found:
            assert seat.local_rank == flat[: seat.number].count(seat.host)
            assert seat.local_size == flat.count(seat.host)
            level = [other.host for other in found if other.local_rank == seat.local_rank]
            assert (seat.cross_rank, seat.cross_size) == (level.index(seat.host), len(level))

    def test_too_many(self):
        with pytest.raises(ValueError, match="5 processes were asked for, and the hosts a:2,b:2 have 4 slots"):
            seats(TWO, 5)


class TestSsh:
    def test_the_command_never_asks(self):
        words = Ssh(2222, "/k", 7).command(TWO[1])
        assert words == [
            "ssh", "-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=7", "-p", "2222", "-i", "/k", "--",
            "me@b",
        ]  # fmt: skip

    def test_a_line_for_the_shell_there(self):
        line = ssh.remote_shell("/my dir", "/v/python", ["-m", "x"], "/a:/b c")
        assert shlex.split(line) == ["cd", "/my dir", "&&", "exec", "env", "PYTHONPATH=/a:/b c", "/v/python", "-m", "x"]

    def test_what_belongs_to_a_login_stays_here(self):
        kept = {"PATH": "/b", "MY_KEY": "s", "CUDA_VISIBLE_DEVICES": "", "TFDIST_DEADLINE": "9", "TERMINAL": "x"}
        own = dict.fromkeys(
            ("HOME", "USER", "PWD", "SSH_AUTH_SOCK", "XDG_RUNTIME_DIR", "HOROVOD_RANK", "OMPI_COMM_WORLD_SIZE",
             "TF_CONFIG", "TFDIST_RUN_DIR", "TERM", "_", "BASH_FUNC_x%%", "SLURM_STEP_ID", "TMPDIR"), "1",
        )  # fmt: skip
        assert ssh.forwarded({**kept, **own}) == kept

    @pytest.mark.parametrize(
        ("code", "said", "words"),
        [
            (255, "ssh: connect to host b port 22: Connection refused", ("cannot be reached", "Start sshd", "-p")),
            (255, "Host key verification failed.", ("without BatchMode",)),
            (255, "me@b: Permission denied (publickey).", ("authorized_keys", "-i")),
            (255, "ssh: Could not resolve hostname b: Name or service not known", ("Correct the name",)),
            (255, "ssh: connect to host b port 22: Connection timed out", ("host is up",)),
            (1, "/v/python: No module named tfdist", ("b has no tfdist for /v/python",)),
            (1, "/v/python: Error while finding module specification for 'tfdist.launch.agent' "
                "(ModuleNotFoundError: No module named 'tfdist')", ("b has no tfdist for /v/python",)),
            (127, "bash: /v/python: No such file or directory", ("b has no /v/python", "at the same path")),
            (1, "bash: line 1: cd: /w: No such file or directory", ("lacks the directory",)),
            (9, "", ("could not start /v/python (exit code 9)",)),
        ],
    )  # fmt: skip
    def test_failures_name_the_host_and_the_remedy(self, code, said, words):
        text = ssh.failure(TWO[1], ["ssh", "b"], code, said, "/v/python")
        assert text.startswith("b ")
        for word in words:
            assert word in text
        assert ("The command was: ssh b" in text) == (code == 255)


def facts(**changes):
    versions = {"tfdist": "0.1.0", "tensorflow": "2.21.0", "keras": "3.15.1", "horovod": "0.28.1+x"}
    base = {
        "python": "3.11.7", "versions": versions, "controllers": ("gloo",),
        "addresses": (("eth0", "10.0.0.1"),), "program": True,
    }  # fmt: skip
    return Facts(**{**base, **changes})


class TestPreflight:
    def test_equal_hosts_are_fine(self):
        assert preflight.differences(TWO, [facts(), facts()], "t.py", ring=True) == []

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"python": "3.12.1"}, "b has Python 3.12.1, and a 3.11.7"),
            ({"versions": {**facts().versions, "keras": "3.9.0"}}, "b has keras 3.9.0, and a 3.15.1"),
            ({"versions": {**facts().versions, "tensorflow": ""}}, "b has tensorflow (none), and a 2.21.0"),
            ({"controllers": None}, "b has no Horovod that tfdist has built"),
            ({"controllers": ("mpi",)}, "b has a Horovod without Gloo"),
            ({"program": False}, "b has no file t.py: copy it there"),
        ],
    )
    def test_what_differs_is_said(self, changes, words):
        (line,) = preflight.differences(TWO, [facts(), facts(**changes)], "t.py", ring=True)
        assert line.startswith(words)

    def test_crowded_hosts_are_told_of(self):
        job = HostsJob(SCRIPT, TWO, ranks=3, cores_per_rank=2)
        assert preflight.crowded(TWO, [facts(cores=4), facts(cores=1)], job) == [
            "1 process x 2 cores share 1 core of b: they will slow each other."
        ]

    def test_tasks_need_no_horovod(self):
        without = facts(controllers=None, versions={**facts().versions, "horovod": ""})
        assert preflight.differences(TWO, [facts(), without], "t.py", ring=False) == []

    def test_interfaces_by_choice(self):
        both = facts(addresses=(("eth0", "10.0.0.1"), ("ib0", "10.1.0.1")))
        other = facts(addresses=(("ens3", "10.0.0.2"),))
        assert preflight.candidates(TWO, [both, other], ())[0] == [list(both.addresses), list(other.addresses)]
        found, wrong = preflight.candidates(TWO, [both, other], ("ib0", "ens3"))
        assert (found, wrong) == ([[("ib0", "10.1.0.1")], [("ens3", "10.0.0.2")]], [])
        _, wrong = preflight.candidates(TWO, [both, other], ("ib0",))
        assert wrong == ["b has of the interfaces ib0 none with an IPv4 address; it has ens3 (10.0.0.2)."]

    def test_the_network_that_all_reach(self):
        hosts = parse_hosts("a,b,c")
        offered = [[("docker0", "172.17.0.1"), ("eth0", "10.0.0.1")], [("eth1", "10.0.0.2")], [("e", "10.0.0.3")]]
        a, b, c = (0, "10.0.0.1"), (1, "10.0.0.2"), (2, "10.0.0.3")
        reached = [{b, c}, {a, c}, {a, b}]
        chosen, wrong = preflight.common_network(hosts, offered, reached)
        assert (chosen, wrong) == ([("eth0", "10.0.0.1"), ("eth1", "10.0.0.2"), ("e", "10.0.0.3")], [])

    def test_a_host_that_is_not_reached(self):
        offered = [[("eth0", "10.0.0.1")], [("eth0", "10.0.0.2")]]
        _, wrong = preflight.common_network(TWO, offered, [{(1, "10.0.0.2")}, set()])
        assert wrong == [
            "b cannot connect to a at any of 10.0.0.1 (eth0): see that they share a network, and that no firewall is "
            "between them (any port above 1023)."
        ]

    def test_no_one_network(self):
        hosts = parse_hosts("a,b,c")
        offered = [[("x", "10.0.0.1"), ("y", "10.1.0.1")], [("x", "10.0.0.2")], [("y", "10.1.0.3")]]
        everywhere = {(1, "10.0.0.2"), (2, "10.1.0.3")}
        reached = [everywhere, {(0, "10.0.0.1"), *everywhere}, {(0, "10.1.0.1"), *everywhere}]
        _, wrong = preflight.common_network(hosts, offered, reached)
        assert len(wrong) == 1
        assert "a has no one address that all other hosts reach (it has 10.0.0.1 (x), 10.1.0.1 (y))" in wrong[0]


class TestPlan:
    def test_the_command_line_is_read_as_it_was_written(self):
        job = HostsJob(
            SCRIPT, TWO, task_names(1, 1, True), 0, 2, 3, Ssh(2222, "/my key", 20), ("eth0", "lan1"), 40.0
        )
        process = hosts_plan.plan_hosts(job, "/run", "py", {"PATH": "/b"})
        assert hosts_plan.parse(process.argv[3:]) == (job, "/run", "")
        ring = HostsJob(Program("module", "m"), TWO, ranks=3, ssh=Ssh(connect_seconds=30))
        process = hosts_plan.plan_hosts(ring, "/run", "py", {}, None, (["out", "err"], bytes([24, 0, 80, 0])))
        assert hosts_plan.parse(process.argv[3:]) == (ring, "/run", "18005000:out,err")

    def test_tasks_fill_the_hosts_in_order(self):
        job = HostsJob(SCRIPT, TWO, task_names(1, 2, False))
        assert [place.who for place in job.places] == ["chief/0", "ps/0", "worker/0", "worker/1"]
        assert [seat.host for seat in job.seats] == [0, 0, 1, 1]
        cluster = cluster_of(job.tasks, ["a:1", "a:2", "b:1", "b:2"])
        assert (cluster.chief, cluster.ps, cluster.workers) == ("a:1", ("a:2",), ("b:1", "b:2"))
        envs = hosts_plan.task_envs(job, cluster, {})
        assert '"task": {"type": "worker", "index": 1}' in envs[3]["TF_CONFIG"]
        assert {env["GRPC_FAIL_FAST"] for env in envs} == {"use_caller"}

    def test_a_host_without_a_process_is_not_used(self):
        assert [host.name for host in HostsJob(SCRIPT, TWO, ranks=2).used] == ["a"]

    def test_ranks_find_horovods_variables(self):
        job = HostsJob(SCRIPT, TWO, ranks=3)
        envs = hosts_plan.rank_envs(job, [("eth0", "10.0.0.1"), ("lan1", "10.0.0.2")], "10.0.0.1", 99)
        assert [env["HOROVOD_GLOO_IFACE"] for env in envs] == ["eth0", "eth0", "lan1"]
        assert {env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] for env in envs} == {"10.0.0.1"}
        assert [env["HOROVOD_HOSTNAME"] for env in envs] == ["a", "a", "b"]

    def test_restarts_go_with_ps(self):
        with pytest.raises(ValueError, match="restarts is 1, expected 0"):
            HostsJob(SCRIPT, TWO, ranks=2, restarts=1)


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-np", "2", "--ssh-port", "22"], "--ssh-port needs the hosts"),
            (["-np", "2", "--network-interfaces", "eth0"], "--network-interfaces needs the hosts"),
            (["-H", "a:1", "--hostfile", "x"], "-H and --hostfile exclude each other"),
            (["--hostfile", "/no/such"], "No such file"),
            (["-H", "a:b"], "is no host"),
            (["-H", "a:1,b:1", "-np", "3"], "3 processes were asked for"),
            (["-H", "a:1", "--workers", "2"], "4 processes were asked for"),
            (["-H", "no-such-host:2", "--controller", "mpi"], "mpirun -np 2 -H no-such-host:2 python"),
        ],
    )
    def test_what_is_refused(self, words, message):
        done = CliRunner().invoke(verb, [*words, __file__])
        assert done.exit_code == 2
        assert message in " ".join(done.output.replace("│", " ").split())

    def test_dry_run_shows_who_is_where(self, tmp_path):
        file = tmp_path / "hosts"
        file.write_text("no-such-a slots=1\nme@no-such-b slots=2\n")
        done = CliRunner().invoke(verb, ["--hostfile", str(file), "-p", "2222", "--dry-run", __file__, "x"])
        assert done.exit_code == 0, done.output
        lines = done.output.splitlines()
        assert lines[0].startswith("no-such-a: rank 0: ssh -T")
        assert lines[1].startswith("no-such-b: rank 1, rank 2: ssh -T")
        assert "-p 2222 -- me@no-such-b 'cd " in lines[1]
        assert "-m tfdist.launch.agent'" in lines[1]

    def test_this_machine_alone_needs_no_ssh(self):
        """L4."""
        done = CliRunner().invoke(verb, ["-H", "localhost:4", "--dry-run", __file__])
        assert done.exit_code == 0
        assert "ssh" not in done.output
        assert "-np 4 -H localhost:4" in done.output


def test_what_a_login_shell_prints_is_no_message():
    assert links.message_of('{"say": "facts"}') == {"say": "facts"}
    for line in ("welcome", "42", "[1]", '{"a": 1}', "", '"say"', "{"):
        assert links.message_of(line) is None


def test_a_line_without_end_does_not_grow_for_ever():
    lines = Lines(limit=10)
    assert lines.feed(b"0123456789") == []
    assert lines.feed(b"abc") == ["0123456789abc"]
    assert lines.feed(b"10 %\r20 %\r30 %") == []
    assert lines.feed(b"\n") == ["30 %"]
    assert Lines().feed(b"x" * 100) == []


def test_what_killed_runs_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, alive, fresh, other = (RunDir.create(1) for _ in range(4))
    held = os.open(alive.alive, os.O_RDWR)
    (tmp_path / "tfdist-run-file").write_text("")
    for run_dir in (left, alive):
        os.utime(run_dir.path, (0, 0))
    os.utime(tmp_path / "tfdist-run-file", (0, 0))
    other.remove()
    RunDir.create(1)
    os.close(held)
    assert not left.path.exists()
    assert alive.path.exists()
    assert fresh.path.exists()
    assert (tmp_path / "tfdist-run-file").exists()


class TestLogs:
    def test_each_has_its_files(self, tmp_path):
        logs = LogFiles(tmp_path / "a" / "b", [Place(0), Place(1, "worker/3")])
        logs.write(0, "out", b"1\n")
        logs.write(1, "err", b"2\n")
        logs.write(1, "err", b"3\n")
        logs.close()
        files = {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()}
        assert files == {"rank-0.out": b"1\n", "rank-0.err": b"", "worker-3.out": b"", "worker-3.err": b"2\n3\n"}

    def test_a_full_disk_ends_no_job(self, tmp_path):
        logs = LogFiles(tmp_path, [Place(0)])
        with open("/dev/full", "wb", buffering=0) as full:
            logs._files[0, "out"].close()
            logs._files[0, "out"] = full
            logs.write(0, "out", b"x")
            logs.write(0, "out", b"y")
        assert logs.problem.endswith("rank-0.out: No space left on device")
