"""Runs one command of the build: output into a log, a deadline, no process left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_GRACE_SECONDS = 5.0


def run(
    argv: Sequence[str], *, log: Path, env: Mapping[str, str], deadline: float, cwd: Path
) -> int | None:
    """Run `argv` with its output appended to `log`.

    Args:
        argv: the command.
        log: file that gets the command line and its output.
        env: its whole environment.
        deadline: seconds after which it and all it started are killed.
        cwd: directory to run in; not the caller's, whose files could shadow packages.

    Returns:
        the exit code, None if the deadline passed.
    """
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(argv)}\n")
        file.flush()
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            # A group of its own: pip's grandchildren (make, the compiler) end with it.
            start_new_session=True,
        )
        try:
            return child.wait(timeout=deadline)
        except subprocess.TimeoutExpired:
            _end_group(child)
            file.write(f"\nnot done after {deadline:.0f} s, killed\n")
            return None
        except BaseException:
            _end_group(child)
            raise


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child, which was not waited for yet, with all it started."""
    os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=_GRACE_SECONDS)
    # The rest of the group goes as well, whether or not it was the child that held out.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
