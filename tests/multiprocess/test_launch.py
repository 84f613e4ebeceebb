"""`tfdist run` from outside: output, exit codes, failures and interrupts, with nothing left behind.

The programs tell the test where they are through files (a named pipe each), never by time. Those
that need no collective load no TensorFlow.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time
import tty
from pathlib import Path

import psutil
import pytest

from tests.helpers.cluster import QUIET, needs_mpi

ROOT = Path(__file__).parents[2]

HEAD = """
import os, signal, sys, threading
from tfdist.cluster import World
rank = World.from_env().rank
here = os.path.dirname(os.path.abspath(__file__))
def ready():
    with open(os.path.join(here, f"ready-{rank}"), "w") as pipe:
        pipe.write(str(os.getpid()))
def wait():
    threading.Event().wait()
"""


@pytest.fixture
def run(tmp_path):
    """Start `tfdist run`; `ranks` programs will call `ready`."""

    def start(body, *options, args=(), module=False, **kwargs):
        (tmp_path / "program.py").write_text(HEAD + textwrap.dedent(body))
        for rank in range(2):
            if not (tmp_path / f"ready-{rank}").exists():
                os.mkfifo(tmp_path / f"ready-{rank}")
        program = ["-m", "program"] if module else [str(tmp_path / "program.py")]
        env = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tfdist.cli.main", "run", *options, *program, *args]
        return subprocess.Popen(
            command,
            env=env,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **kwargs,
        )

    return start


def ready(tmp_path, *ranks):
    """Wait until these ranks have called `ready`; their pids."""
    return [int((tmp_path / f"ready-{rank}").read_text()) for rank in ranks]


def ended(process):
    """Wait for its end; (exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def gone(pids):
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            assert process.status() == psutil.STATUS_ZOMBIE, process
    return True


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=needs_mpi)])
def test_output_arguments_and_cores(run, tmp_path, controller):
    body = """
    print("args", *sys.argv[1:], __name__, sorted(os.sched_getaffinity(0)))
    print("half", end="")
    print("10 %\\r20 %" if rank else "", end="\\n")
    sys.stderr.write(f"threads {os.environ['TF_NUM_INTEROP_THREADS']}\\n")
    """
    options = ("-np", "2", "--controller", controller, "--cores-per-rank", "1")
    code, out, err = ended(run(body, *options, args=("--x", "a b", "-np", "3")))
    cores = sorted(os.sched_getaffinity(0))
    assert code == 0, err
    assert sorted(out.splitlines()) == sorted(
        [
            f"args --x a b -np 3 __main__ [{cores[0]}]",
            f"[1] args --x a b -np 3 __main__ [{cores[1 % len(cores)]}]",
            "half",
            "[1] 20 %10 %",
        ]
    )
    noise = [line for line in err.splitlines() if "share" not in line]
    assert sorted(noise) == ["[1] threads 2", "threads 2"]


def test_module_one_rank_and_more_ranks_than_cores(run):
    body = "print(World.from_env().size, sys.argv[1:], __spec__.name, sys.path[0] == os.getcwd())"
    assert ended(run(body, "-np", "1", module=True, args=("-m", "x")))[:2] == (
        0,
        "1 ['-m', 'x'] program True\n",
    )
    ranks = len(os.sched_getaffinity(0)) + 1
    code, out, err = ended(run("print(World.from_env().size)", "-np", str(ranks)))
    assert code == 0
    assert len(out.splitlines()) == ranks
    assert err == f"tfdist: {ranks} ranks share {ranks - 1} cores: they will slow each other.\n"


def test_the_script_is_main_as_under_python(run, tmp_path):
    """Worker processes that import `__main__`, and pickles of its classes, work."""
    body = """
    import multiprocessing, pickle
    class Thing: pass
    def square(x): return x * x
    if __name__ == "__main__":
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(square, [2, 3]))
    """
    code, out, err = ended(run(body, "-np", "1"))
    assert (code, out) == (0, "[4, 9]\n"), err


def test_the_first_failure_is_shown_last_and_gives_the_code(run, tmp_path):
    """R18: rank 1 raises at step 3, rank 0 waits in the all-reduce of step 3."""
    body = """
    import horovod.tensorflow as hvd
    import tensorflow as tf
    hvd.init()
    for step in range(1, 6):
        if rank == 1 and step == 3:
            ready()
            raise LookupError(f"no data at step {step}")
        hvd.allreduce(tf.ones(3), name=f"step{step}")
    """
    process = run(body, "-np", "2")
    pids = ready(tmp_path, 1)
    start = time.monotonic()
    code, out, err = ended(process)
    assert time.monotonic() - start < 10
    assert code == 1
    assert err.rstrip().endswith("LookupError: no data at step 3")
    assert any(
        line.endswith("failed: LookupError: no data at step 3") and "rank 1 on " in line
        for line in err.splitlines()
    )
    traceback = err[err.index("Traceback of rank 1:") :]
    assert "program.py" in traceback
    assert "tfdist/launch" not in traceback
    assert err.count("Traceback (most recent call last)") == 1
    assert gone(pids)


def test_a_killed_rank_in_an_all_reduce(run, tmp_path):
    """L3: SIGKILL from outside; the other waits for it in a collective, with workers of its own."""
    body = """
    import subprocess
    import horovod.tensorflow as hvd
    import tensorflow as tf
    hvd.init()
    hvd.allreduce(tf.ones(3), name="first")
    if rank == 0:
        worker = "import signal as s, threading; s.signal(15, s.SIG_IGN); "
        subprocess.Popen([sys.executable, "-c", worker + "threading.Event().wait()"])
    ready()
    if rank == 1:
        wait()
    hvd.allreduce(tf.ones(3), name="second")
    """
    process = run(body, "-np", "2")
    pids = ready(tmp_path, 0, 1)
    family = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
    os.kill(pids[1], signal.SIGKILL)
    start = time.monotonic()
    code, out, err = ended(process)
    assert time.monotonic() - start < 10
    assert code == 137
    assert f"(pid {pids[1]}) was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]
    assert "rank 1 on" in err.splitlines()[-1]
    assert gone(family)


@pytest.mark.parametrize(
    ("leave", "code", "words", "controller"),
    [
        ("sys.exit(3)", 3, "left with exit code 3.", "gloo"),
        ("sys.exit('no data')", 1, "left with exit code 1: no data.", "gloo"),
        ("os._exit(5)", 5, "ended with exit code 5", "gloo"),
        ("os.abort()", 134, "signal 6 (SIGABRT)", "gloo"),
        pytest.param("sys.exit(3)", 3, "left with exit code 3.", "mpi", marks=needs_mpi),
        pytest.param("os.abort()", 134, "signal 6 (SIGABRT)", "mpi", marks=needs_mpi),
    ],
)
def test_exit_codes(run, leave, code, words, controller):
    body = f"""
    if rank == 1:
        {leave}
    wait()
    """
    result, out, err = ended(run(body, "-np", "2", "--controller", controller))
    assert result == code
    assert words in err.splitlines()[-1]
    assert "rank 1 on" in err.splitlines()[-1]


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=needs_mpi)])
@pytest.mark.parametrize(
    ("signum", "code", "ignored"),
    [
        (signal.SIGINT, 130, "SIGTERM"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGKILL, -9, "SIGTERM"),
    ],
)
def test_a_signal_to_the_command_ends_all(run, tmp_path, signum, code, ignored, controller):
    """Even SIGKILL, which the command cannot pass on, and of ranks that ignore the signal."""
    body = f"""
    signal.signal(signal.{ignored}, signal.SIG_IGN)
    ready()
    wait()
    """
    process = run(body, "-np", "2", "--controller", controller)
    ready(tmp_path, 0, 1)
    family = psutil.Process(process.pid).children(recursive=True)
    start = time.monotonic()
    process.send_signal(signum)
    assert ended(process)[0] == code
    psutil.wait_procs(family, timeout=10)  # of SIGKILL the ranks hear by themselves
    assert time.monotonic() - start < 10
    assert gone(p.pid for p in family)


PATIENT = """
    from tfdist import patience
    patience.ask(100)
    signal.signal(signal.SIGTERM, lambda number, frame: {does})
    ready()
    wait()
"""


@pytest.mark.parametrize(
    ("does", "signals", "code", "words"),
    [
        ("sys.exit(75)", [signal.SIGTERM], 75, "left with exit code 75: start the job again to go on"),
        ("sys.exit(0)", [signal.SIGTERM], 0, ""),
        ("ready()", [signal.SIGTERM, signal.SIGTERM], 143, "ended by SIGTERM"),
        ("sys.exit(75)", [signal.SIGINT], 130, "ended by SIGINT"),
        ("sys.exit(3)", [signal.SIGTERM], 143, "ended by SIGTERM"),
    ],
)
def test_programs_that_asked_for_patience(run, tmp_path, does, signals, code, words):
    """They end as they mean to; where they do not, a second signal ends them, and Ctrl-C as ever."""
    process = run(PATIENT.format(does=does), "-np", "2")
    ready(tmp_path, 0, 1)
    process.send_signal(signals[0])
    for number in signals[1:]:
        ready(tmp_path, 0, 1)  # they have heard the first
        process.send_signal(number)
    found, _, err = ended(process)
    assert found == code and words in err


def test_patience_is_for_signals_only(run, tmp_path):
    """A rank fails: the other has ten seconds, whatever it has asked for."""
    body = """
    from tfdist import patience
    patience.ask(100)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready()
    if rank == 1:
        sys.exit(3)
    wait()
    """
    process = run(body, "-np", "2")
    ready(tmp_path, 0, 1)
    start = time.monotonic()
    assert ended(process)[0] == 3
    assert time.monotonic() - start < 10


def test_a_progress_bar_redraws_in_a_terminal(run):
    body = """
    import shutil
    if rank == 0:
        columns = shutil.get_terminal_size().columns
        sys.stdout.write(f"{sys.stdout.isatty()} {columns}\\b\\b\\r1/2\\b\\b\\b\\r2/2\\n")
    """
    controller, user_side = pty.openpty()
    tty.setraw(user_side)
    fcntl.ioctl(user_side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 97, 0, 0))
    command = run(body, "-np", "2")  # writes the program
    assert ended(command)[0] == 0
    process = subprocess.Popen(
        command.args,
        env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        stdout=user_side,
        stderr=subprocess.PIPE,
    )
    assert process.wait(timeout=60) == 0, process.stderr.read()
    process.stderr.close()
    shown = os.read(controller, 1000).decode()
    os.close(controller)
    os.close(user_side)
    assert shown == "True 97\b\b\r1/2\b\b\b\r2/2\n"


def test_fit_ends_with_nothing_left(run, tmp_path):
    """L1: Keras' own fit, with a PyDataset that has worker processes."""
    body = """
    import keras, numpy as np
    class Data(keras.utils.PyDataset):
        def __len__(self): return 4
        def __getitem__(self, i): return np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
    if __name__ == "__main__":
        import horovod.tensorflow as hvd
        hvd.init()
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        data = Data(workers=2, use_multiprocessing=True)
        history = model.fit(data, epochs=2, verbose=2 if rank == 0 else 0)
        ready()
        print("loss", len(history.history["loss"]))
    """
    process = run(body, "-np", "2")
    pids = ready(tmp_path, 0, 1)
    code, out, err = ended(process)
    assert code == 0, err
    assert "[1] loss 2" in out
    assert "outlived" not in err
    assert "absl::InitializeLog" not in "".join(li for li in err.splitlines(True) if li[0] == "[")
    assert gone(pids)
