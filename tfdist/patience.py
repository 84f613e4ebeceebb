"""How a program asks the launcher that started it for time: to write a checkpoint before it ends.

The launcher names a file in `VARIABLE`; as long as that is there, it holds the seconds that the program may take after
it was told to stop. Without a launcher nothing happens.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TFDIST_PATIENCE"


def ask(seconds: float) -> None:
    """From now on."""
    if path := os.environ.get(VARIABLE):
        put(Path(path), str(seconds))


def ask_no_longer() -> None:
    """The program may be ended as any other."""
    if path := os.environ.get(VARIABLE):
        put(Path(path), "")


def put(path: Path, text: str) -> None:
    """Makes a program's file have this text, whole or not at all; without text there is no file."""
    if not text:
        path.unlink(missing_ok=True)
        return
    draft = Path(f"{path}.tmp")
    draft.write_text(text)
    draft.replace(path)


def asked(path: Path) -> float:
    """Seconds that the program of a file asks for, 0 for none."""
    try:
        return float(path.read_text())
    except FileNotFoundError:
        return 0.0
