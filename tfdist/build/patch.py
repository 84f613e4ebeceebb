"""Changes of a source tree as exact replacements of text; Horovod's stand in `edits`. Pure but for `apply`.

Written as data rather than as a diff: each change says why it is there, no `patch` program is
needed, and a source in which a text is not found, or found twice, is refused instead of fuzzed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tfdist.build.errors import BuildError


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which must stand in `file` exactly once, by `new`."""

    file: str
    old: str
    new: str
    why: str

    def on(self, text: str) -> str:
        """`text` with the replacement made.

        Raises:
            BuildError: `old` is not there, or more than once.
        """
        count = text.count(self.old)
        if count != 1:
            raise BuildError(
                f"Horovod's source does not look as expected: {self.file} holds {count} times, and "
                f"should hold once:\n{self.old.strip()}\nThe change was meant to do this: "
                f"{self.why}. Build from the unchanged Horovod 0.28.1 sdist from PyPI."
            )
        return text.replace(self.old, self.new)


def fingerprint(edits: Sequence[Edit]) -> str:
    """A short hash of what the edits do; their explanations are left out of it."""
    text = json.dumps([astuple(edit)[:3] for edit in edits])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def apply(root: Path, edits: Sequence[Edit]) -> None:
    """Make `edits` to the unpacked source under `root`; nothing is written if one does not fit.

    Raises:
        BuildError: a file is missing, or its text is not the expected one.
    """
    texts: dict[str, str] = {}
    for edit in edits:
        if edit.file not in texts:
            try:
                texts[edit.file] = (root / edit.file).read_text(encoding="utf-8")
            except FileNotFoundError:
                raise BuildError(
                    f"Horovod's source does not look as expected: {edit.file} is missing. "
                    "Build from the unchanged Horovod 0.28.1 sdist from PyPI."
                ) from None
        texts[edit.file] = edit.on(texts[edit.file])
    for file, text in texts.items():
        (root / file).write_text(text, encoding="utf-8")
