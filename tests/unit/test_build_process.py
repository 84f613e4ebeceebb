import os
import select
import sys

import pytest

from tfdist.build import process


def run(tmp_path, argv, **options):
    values = {"log": tmp_path / "log", "env": dict(os.environ), "deadline": 30.0, "cwd": tmp_path}
    return process.run(argv, **{**values, **options})


def test_output_and_exit_code(tmp_path):
    (tmp_path / "log").write_text("before\n")
    code = run(
        tmp_path,
        ["sh", "-c", "echo out; echo err >&2; echo $VALUE; pwd; exit 3"],
        env={**os.environ, "VALUE": "from env"},
    )
    assert code == 3
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "before"
    assert lines[1].startswith("$ sh -c ")
    assert lines[2:] == ["out", "err", "from env", str(tmp_path)]


def test_nothing_is_read_from_the_terminal(tmp_path):
    assert run(tmp_path, ["cat"]) == 0


@pytest.mark.parametrize("stubborn", ["", "trap '' TERM; "], ids=["obedient", "ignores SIGTERM"])
def test_deadline_ends_the_grandchildren_too(tmp_path, stubborn, monkeypatch):
    monkeypatch.setattr(process, "_GRACE_SECONDS", 0.1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        script = f"{stubborn}exec 3>fifo; sleep 600 & wait"
        assert run(tmp_path, ["sh", "-c", script], deadline=1.0) is None
        # Whoever still lives holds the other end open; hang-up says that all are gone.
        poll = select.poll()
        poll.register(reader, select.POLLHUP)
        assert poll.poll(10_000)
    finally:
        os.close(reader)
    assert "not done after 1 s, killed" in (tmp_path / "log").read_text()


def test_interrupt_ends_the_child(tmp_path, monkeypatch):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    popen = process.subprocess.Popen

    class Interrupted(popen):
        """Its first wait ends as by Ctrl-C, after the child has started."""

        interrupted = False

        def wait(self, timeout=None):
            if not self.interrupted:
                self.interrupted = True
                select.select([reader], [], [], 10)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(process.subprocess, "Popen", Interrupted)
    try:
        code = "import time; f = open('fifo', 'w'); f.write('x'); f.flush(); time.sleep(600)"
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, [sys.executable, "-c", code])
        assert os.read(reader, 10) == b"x"
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)
