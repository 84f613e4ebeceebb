"""Files are written once, by rank 0, and appear whole: under another name first, then renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from tfdist.comm import watch

# Keras' callbacks that write files: they stay with rank 0.
WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)


def keep_for(rank: int, callbacks: Any) -> Any:
    """The callbacks of this rank: all on rank 0, those that write no files elsewhere.

    Accepts what `fit` accepts: None, a callback, a list, or a `CallbackList` (which is changed in place).
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if rank != 0:
            callbacks.callbacks = [c for c in callbacks.callbacks if not isinstance(c, WRITERS)]
        return callbacks
    if callbacks is None:
        return []
    listed = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
    return listed if rank == 0 else [c for c in listed if not isinstance(c, WRITERS)]


@contextmanager
def whole(path: Any, what: str) -> Iterator[Any]:
    """Yields a path to write to; what was written there takes the place of `path` when the block succeeds.

    Paths that are no local files (a URL, an open file, a sharded set of weights) are yielded as they are.
    """
    with watch.busy(f"{what} {path}"):
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if text is None or "://" in text or text.endswith(".json"):
            yield path
            return
        final = Path(text)
        partial = final.with_name(f".tfdist-{os.getpid()}-{final.name}")
        try:
            yield str(partial)
            if partial.is_dir() and final.is_dir():
                shutil.rmtree(final)
            os.replace(partial, final)
        finally:
            if partial.is_dir():
                shutil.rmtree(partial, ignore_errors=True)
            else:
                partial.unlink(missing_ok=True)


def must_ask(path: Any, overwrite: bool) -> bool:
    """Whether Keras should be asked before an existing file is replaced."""
    return not overwrite and isinstance(path, (str, os.PathLike)) and Path(path).exists()
