"""`tfdist run --workers` from outside: the tasks of a job, by programs without TensorFlow.

The programs tell the test where they are, and wait for it, by named pipes, never by time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.cluster import QUIET
from tests.multiprocess.test_launch import ended, gone

ROOT = Path(__file__).parents[2]
TASKS = ("chief-0", "ps-0", "worker-0", "worker-1")

HEAD = """
import os, signal, subprocess, sys, threading
from tfdist import tf_config
cluster, task = tf_config.from_env()
here = os.path.dirname(os.path.abspath(__file__))
def pipe(what):
    return os.path.join(here, f"{what}-{task.job}-{task.index}")
def ready():
    with open(pipe("ready"), "w") as file:
        file.write(str(os.getpid()))
def told():
    open(pipe("go")).read()
def wait():
    threading.Event().wait()
"""


@pytest.fixture
def run(tmp_path):
    """Start `tfdist run` with one ps and two workers, or with the options given."""
    for task in TASKS:
        os.mkfifo(tmp_path / f"ready-{task}")
        os.mkfifo(tmp_path / f"go-{task}")

    def start(body, *options, args=(), module=False, **env):
        (tmp_path / "program.py").write_text(HEAD + textwrap.dedent(body))
        program = ["-m", "program"] if module else [str(tmp_path / "program.py")]
        options = options or ("--ps", "1", "--workers", "2", "--restarts", "0")
        return subprocess.Popen(
            [sys.executable, "-m", "tfdist.cli.main", "run", *options, *program, *args],
            env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **env},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def ready(tmp_path):
    """Wait until these tasks have called `ready`; their pids."""
    return lambda *tasks: [int((tmp_path / f"ready-{task}").read_text()) for task in tasks]


@pytest.fixture
def tell(tmp_path):
    """Let a task go on that has called `told`."""
    return lambda task: (tmp_path / f"go-{task}").write_text("")


def family(process):
    return psutil.Process(process.pid).children(recursive=True)


def without_core_warning(err):
    return [line for line in err.splitlines() if "share" not in line]


def test_output_arguments_and_environment(run):
    body = """
    print(task.name, cluster.address(task), *sys.argv[1:], __name__)
    print(sorted(name for name in os.environ if name.startswith(("HOROVOD_", "PMI_"))))
    print("cores", len(os.sched_getaffinity(0)))
    sys.stderr.write(os.environ["GRPC_FAIL_FAST"] + os.environ["TF_NUM_INTEROP_THREADS"] + chr(10))
    """
    options = ("--ps", "1", "--workers", "2", "--cores-per-rank", "1")
    outer = {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "PMI_RANK": "0"}
    code, out, err = ended(run(body, *options, args=("--x", "a b", "--ps", "3"), **outer))
    assert code == 0, err
    lines = out.splitlines()
    first = [line.split() for line in lines if "127.0.0.1" in line]
    assert sorted(words[0] for words in first) == ["[ps/0]", "[worker/0]", "[worker/1]", "chief/0"]
    for words in first:
        *label, name, address = words[:-6]
        assert label in ([], [f"[{name}]"])
        assert address.startswith("127.0.0.1:")
        assert words[-6:] == ["--x", "a", "b", "--ps", "3", "__main__"]
    assert len({words[-7] for words in first}) == 4
    rest = sorted(line for line in lines if "127.0.0.1" not in line)
    assert rest == sorted(
        f"{label}{text}"
        for label in ("", "[ps/0] ", "[worker/0] ", "[worker/1] ")
        for text in ("[]", "cores 1")
    )
    said = ["[ps/0] use_caller2", "[worker/0] use_caller2", "[worker/1] use_caller2"]
    assert sorted(without_core_warning(err)) == [*said, "use_caller2"]


def test_module_and_one_ps_by_default(run):
    body = "print(task.name, sys.argv[1:], __spec__.name) if task.is_chief else None"
    code, out, err = ended(run(body, "--workers", "1", module=True, args=("-m", "x")))
    assert (code, out) == (0, "chief/0 ['-m', 'x'] program\n"), err


@pytest.mark.parametrize(
    ("task", "leave", "code", "words"),
    [
        ("chief/0", "sys.exit(3)", 3, "left with exit code 3."),
        ("chief/0", "os.abort()", 134, "signal 6 (SIGABRT)"),
        ("worker/1", "os._exit(5)", 5, "ended with exit code 5"),
        ("ps/0", "os.kill(os.getpid(), signal.SIGKILL)", 137, "signal 9 (SIGKILL)"),
    ],
)
def test_exit_codes(run, ready, tell, task, leave, code, words):
    process = run(f"ready()\nif task.name == {task!r}:\n    told()\n    {leave}\nwait()")
    pids = ready(*TASKS)
    start = time.monotonic()
    tell(task.replace("/", "-"))
    result, _, err = ended(process)
    assert result == code
    assert time.monotonic() - start < 10
    assert words in err.splitlines()[-1]
    assert f"{task} on " in err.splitlines()[-1]
    assert gone(pids)


@pytest.mark.parametrize("task", ["chief/0", "worker/1"])
def test_the_first_failure_is_shown_last(run, ready, tell, task):
    """The chief loses a worker and fails as well, and the others ignore SIGTERM."""
    body = f"""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    if task.name == {task!r}:
        told()
        raise LookupError("no data")
    if task.is_chief:
        told()
        class UnavailableError(Exception): pass
        raise UnavailableError("failed to connect to all addresses")
    wait()
    """
    process = run(body)
    pids = ready(*TASKS)
    start = time.monotonic()
    tell(task.replace("/", "-"))
    if task != "chief/0":
        tell("chief-0")
    code, _, err = ended(process)
    assert time.monotonic() - start < 10
    assert code == 1
    lines = err.rstrip().splitlines()
    assert lines[-1] == "LookupError: no data"
    traceback = err[err.index(f"Traceback of {task}:") :]
    assert "program.py" in traceback
    assert "tfdist/launch" not in traceback
    assert err.count("Traceback (most recent call last)") == 1
    assert any(f"{task} on " in line and "LookupError: no data" in line for line in lines)
    assert gone(pids)


def test_a_worker_that_is_done_ends_nothing(run, ready, tell):
    body = """
    ready()
    told()
    if task.is_chief:
        print("still there")
    """
    process = run(body)
    watchers = [psutil.Process(pid).parent() for pid in ready(*TASKS)]
    tell("worker-0")
    tell("worker-1")
    assert not psutil.wait_procs(watchers[2:], 30)[1]
    assert all(watcher.is_running() for watcher in watchers[:2])
    tell("chief-0")
    tell("ps-0")
    code, out, err = ended(process)
    assert (code, out, without_core_warning(err)) == (0, "still there\n", [])


def test_after_the_chief_the_rest_has_ten_seconds(run, ready, tell):
    """One ends by itself with an error, one at SIGTERM, one ignores that."""
    body = """
    if task.name == "ps/0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    if task.is_chief:
        told()
        sys.exit()
    if task.name == "worker/0":
        told()
        raise LookupError("too late")
    wait()
    """
    process = run(body)
    pids = ready(*TASKS)
    watcher = psutil.Process(pids[0]).parent()
    tell("chief-0")
    watcher.wait(30)  # it has reported the chief's end
    start = time.monotonic()
    tell("worker-0")
    code, _, err = ended(process)
    assert code == 0
    assert 9 < time.monotonic() - start < 20
    late, lingering = without_core_warning(err)
    assert late.startswith("tfdist: after the chief had ended, worker/0 on ")
    assert late.endswith("failed: LookupError: too late")
    assert lingering == "tfdist: ps/0, worker/1 had not ended 10 s after the chief, and was ended."
    assert gone(pids)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_signal_to_the_command_ends_all(run, ready, signum, code):
    """Even SIGKILL, which it cannot pass on, and of tasks and children that ignore SIGTERM."""
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if task.name == "worker/1":
        child = "import signal as s, threading; s.signal(15, s.SIG_IGN); "
        subprocess.Popen([sys.executable, "-c", child + "threading.Event().wait()"])
    ready()
    wait()
    """
    process = run(body)
    ready(*TASKS)
    all_ = family(process)
    start = time.monotonic()
    process.send_signal(signum)
    result, _, err = ended(process)
    assert result == code
    psutil.wait_procs(all_, timeout=10)  # of SIGKILL the tasks hear by themselves
    assert time.monotonic() - start < 10
    assert gone(p.pid for p in all_)
    if signum != signal.SIGKILL:
        assert err.splitlines()[-1].endswith("no process is left.")


def test_a_killed_task_is_started_again_as_often_as_allowed(run):
    body = "if task.name == 'ps/0':\n    os.kill(os.getpid(), signal.SIGKILL)\nwait()"
    code, _, err = ended(run(body, "--workers", "1", "--restarts", "2"))
    assert code == 137
    assert err.count("[ps/0] tfdist: ended by SIGKILL; started again") == 2
    assert "was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]


def test_a_task_that_ends_by_an_error_is_not_started_again(run):
    code, _, err = ended(run("if task.name == 'ps/0':\n    raise OSError('full')\nwait()", "--workers", "1"))
    assert code == 1
    assert "started again" not in err
    assert "OSError: full" in err


@pytest.mark.parametrize(
    ("victim", "task"),
    [
        ("program", "worker-1"),
        ("watcher", "worker-1"),
        ("watcher", "chief-0"),
        ("launcher", "chief-0"),
    ],
)
def test_a_killed_process_ends_all(run, ready, victim, task):
    """Whichever of the processes between the command and a task's program it is."""
    body = """
    if not task.is_chief:
        child = "import signal as s, threading; s.signal(15, s.SIG_IGN); "
        subprocess.Popen([sys.executable, "-c", child + "threading.Event().wait()"])
    ready()
    wait()
    """
    process = run(body)
    pids = dict(zip(TASKS, ready(*TASKS), strict=True))
    all_ = family(process)
    chain = {"program": psutil.Process(pids[task])}
    chain["watcher"] = chain["program"].parent()
    chain["launcher"] = chain["watcher"].parent()
    start = time.monotonic()
    chain[victim].kill()
    code, _, err = ended(process)
    assert time.monotonic() - start < 10
    assert code == 137
    if victim != "launcher":
        last = err.splitlines()[-1]
        assert last.startswith(f"tfdist: {task.replace('-', '/')} on ")
        assert f"(pid {chain[victim].pid}) was killed by signal 9 (SIGKILL)" in last
    assert gone(p.pid for p in all_)
