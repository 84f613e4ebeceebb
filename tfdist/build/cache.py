"""Wheels that were built before, by key: `<root>/wheels/<key>/<wheel>`, beside sdist and logs.

An entry counts only with its `build.json`, which is written last and names the wheel and its
SHA-256, so a build that was cut off, or a damaged file, is a miss and is built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

RECORD = "build.json"


def root(env: Mapping[str, str] | None = None) -> Path:
    """Where tfdist caches: TFDIST_CACHE, else XDG_CACHE_HOME/tfdist, else ~/.cache/tfdist."""
    env = os.environ if env is None else env
    if env.get("TFDIST_CACHE"):
        return Path(env["TFDIST_CACHE"]).expanduser()
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tfdist"


def sha256(path: Path) -> str:
    """The file's SHA-256 in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def replace_file(source: Path, target: Path) -> None:
    """Copy `source` to `target` so that nobody ever sees half of it."""
    _publish(target, lambda file: shutil.copyfile(source, file))


def _publish(target: Path, write: Callable[[Path], object]) -> None:
    """Have `write` fill a file beside `target` and put it in its place in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        write(Path(name))
        # mkstemp's files are the owner's alone; a cache may be shared.
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class WheelCache:
    """The wheels under one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def get(self, key: str) -> Path | None:
        """The wheel for `key`, None where there is none or it is not what was put there."""
        folder = self._directory / key
        try:
            record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            wheel = folder / record["wheel"]
            return wheel if sha256(wheel) == record["sha256"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: str, wheel: Path, facts: Mapping[str, object]) -> Path:
        """Keep `wheel` under `key`, with `facts` (for a reader of the cache); the kept path."""
        folder = self._directory / key
        kept = folder / wheel.name
        replace_file(wheel, kept)
        record = {"wheel": wheel.name, "sha256": sha256(kept), **facts}
        text = json.dumps(record, indent=1)
        _publish(folder / RECORD, lambda file: file.write_text(text, encoding="utf-8"))
        return kept

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the key, so that two builds of one wheel follow each other.

        The lock is the kernel's (flock): it goes when its holder dies, so none is ever stale.

        Args:
            key: whose wheel.
            on_wait: called once if somebody else holds it, before the wait.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / f"{key}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
