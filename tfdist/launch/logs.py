"""What each rank or task prints, in files of its own: `tfdist run --log-dir`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tfdist.launch.place import Place

NAMES = ("out", "err")


class LogFiles:
    """Two files a process in `directory`, such as rank-0.out and rank-0.err.

    An earlier run's are overwritten, or gone on with (`again`).

    Attributes:
        problem: why nothing is written any more, "" while it is: a full disk does not end a job.

    Raises:
        OSError: the directory or a file in it cannot be made.
    """

    def __init__(self, directory: Path, places: Sequence[Place], again: bool = False):
        directory.mkdir(parents=True, exist_ok=True)
        self.problem = ""
        self.paths = {(p.number, name): directory / f"{file_name(p)}.{name}" for p in places for name in NAMES}
        self._files: dict[tuple[int, str], IO[bytes]] = {}
        for key, path in self.paths.items():
            self._files[key] = path.open("ab" if again else "wb", buffering=0)

    def write(self, number: int, name: str, data: bytes) -> None:
        """Append what process `number` has written to its "out" or "err"."""
        if self.problem:
            return
        try:
            self._files[number, name].write(data)
        except OSError as error:
            self.problem = f"{self.paths[number, name]}: {error.strerror or error}"

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()


def file_name(place: Place) -> str:
    """"rank-1", "worker-0"."""
    return place.task.replace("/", "-") if place.task else f"rank-{place.number}"
