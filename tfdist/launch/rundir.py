"""The directory through which the processes of one run talk.

    events       named pipe, ranks -> supervisor: one JSON object per line, each under PIPE_BUF
    alive        named pipe that the supervisor holds open: end-of-file means that it is gone
    out-0 err-0  where rank 0 writes: a named pipe, or a link to a pseudo-terminal
    failure-0    JSON: the exception that ended rank 0's program, with its traceback
    patience-0   while it is there: seconds that rank 0's program may take to end (tfdist/patience.py)

In a parameter-server job the tasks take the place of the ranks, by their numbers (place.py).

Named pipes rather than the launcher's own pipes: Horovod's launcher and mpirun each prefix, split
and buffer output in their own way, and both would hide a terminal from the progress bar.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tfdist.launch.place import Place

# Every process of a run carries this variable, so that none is missed when a run is cleaned up,
# whoever its parent is by then.
MARK = "TFDIST_RUN_DIR"


@dataclass(frozen=True)
class Failure:
    """How the program of one rank failed.

    `at` is in seconds since the epoch. `kind` is the exception's class with its bases, most
    derived first; empty where the program ended without a Python exception. `signal` is the number
    of the signal that ended it, 0 for none. `told` means that the rank had been told to stop.
    `rank` is the number of the place, and `task` its task, empty for a rank.
    """

    rank: int
    host: str
    pid: int
    code: int
    at: float
    kind: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    signal: int = 0
    told: bool = False
    task: str = ""

    @classmethod
    def of_status(
        cls, place: Place, pid: int, status: int, at: float | None = None, told: bool = False
    ) -> Failure:
        """Of a process of this host that ended with a status, as `Popen.returncode` has it, and said no more."""
        return cls(
            rank=place.number,
            host=socket.gethostname(),
            pid=pid,
            code=status if status >= 0 else 128 - status,
            at=time.time() if at is None else at,
            signal=max(0, -status),
            told=told,
            task=place.task,
        )

    @property
    def who(self) -> str:
        """What messages call the rank or task."""
        return Place(self.rank, self.task).who


PREFIX = "tfdist-run-"
OLD_SECONDS = 600.0


def sweep(parent: Path) -> None:
    """Remove directories of runs that nobody supervises any more: all of their processes were killed at once."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            about = path.stat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < OLD_SECONDS:
                continue
            # Whoever supervises holds it open for reading; without a reader this fails.
            os.close(os.open(path / "alive", os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno == errno.ENXIO:
                shutil.rmtree(path, ignore_errors=True)


class RunDir:
    """Paths in a run's directory, and the few things that are written there."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.events = self.path / "events"
        self.alive = self.path / "alive"

    @classmethod
    def create(cls, ranks: int) -> RunDir:
        """Make the directory with the named pipes of `ranks` processes; `remove` it when the run is over."""
        return cls.create_for(range(ranks))

    @classmethod
    def create_for(cls, numbers: Iterable[int]) -> RunDir:
        """`create` for the processes with these numbers.

        What killed runs of this user have left is removed.
        """
        sweep(Path(tempfile.gettempdir()))
        run_dir = cls(tempfile.mkdtemp(prefix=PREFIX))
        for pipe in (run_dir.events, run_dir.alive):
            os.mkfifo(pipe, 0o600)
        for rank in numbers:
            os.mkfifo(run_dir.stream(rank, "out"), 0o600)
            os.mkfifo(run_dir.stream(rank, "err"), 0o600)
        return run_dir

    def stream(self, rank: int, name: str) -> Path:
        """Where `rank` writes its output; `name` is "out" or "err"."""
        return self.path / f"{name}-{rank}"

    def patience_file(self, rank: int) -> Path:
        """Where the program of `rank` asks for time to end in."""
        return self.path / f"patience-{rank}"

    def wait_alone(self) -> None:
        """Return when the supervisor is gone: it holds `alive` open, and nobody writes there."""
        try:
            # Opening it otherwise would wait for a supervisor that has gone already.
            alive = os.open(self.alive, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        os.set_blocking(alive, True)
        os.read(alive, 1)
        os.close(alive)

    def report(self, event: str, rank: int, **facts: Any) -> bool:
        """Send one short event to the supervisor; False where it is gone."""
        line = json.dumps({"event": event, "rank": rank, "at": time.time(), **facts}) + "\n"
        try:
            pipe = os.open(self.events, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO, ENOENT: nobody reads any more
            return False
        try:
            os.set_blocking(pipe, True)
            os.write(pipe, line.encode())
        except BrokenPipeError:
            return False
        finally:
            os.close(pipe)
        return True

    def write_failure(self, failure: Failure) -> None:
        """Store the record (whole or not at all), then tell the supervisor."""
        target = self.path / f"failure-{failure.rank}"
        draft = target.with_suffix(".tmp")
        try:
            draft.write_text(json.dumps(asdict(failure)))
            draft.replace(target)
        except FileNotFoundError:  # the run is over and its directory gone
            return
        self.report("failed", failure.rank)

    def read_failure(self, rank: int) -> Failure | None:
        """The record of `rank`, None where its program met no exception."""
        try:
            facts = json.loads((self.path / f"failure-{rank}").read_text())
        except FileNotFoundError:
            return None
        return Failure(**{**facts, "kind": tuple(facts["kind"])})

    def remove(self) -> None:
        """Delete the directory; nothing happens where it is gone."""
        shutil.rmtree(self.path, ignore_errors=True)
