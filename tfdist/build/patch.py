"""tfdist's patch of Horovod 0.28.1, as exact replacements of text. Pure but for `apply`.

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


_PROCESS_SET = (
    "  device_attr.ai_family = AF_UNSPEC;\n"
    "  auto dev = CreateDevice(device_attr);\n"
    "\n"
    "  global_ctx = global_context.ctx;\n"
)

EDITS: tuple[Edit, ...] = (
    Edit(
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        why="leave out the XLA operations: they exist for GPUs only, and their includes no longer "
        "compile since TensorFlow moved its XLA headers",
    ),
    Edit(
        file="horovod/common/gloo/gloo_context.cc",
        # The lines after it tell this place from two others, where the own name is right.
        old="  device_attr.iface = gloo_iface_;\n" + _PROCESS_SET,
        new="  device_attr.iface = global_context.gloo_iface_;\n" + _PROCESS_SET,
        why="let a process set use the network interface that was asked for; its own is empty, so "
        "Gloo resolves the host name, often to 127.0.1.1, and several hosts cannot connect",
    ),
    Edit(
        file="horovod/common/common.h",
        old="#include <memory>\n#include <string>\n#include <unordered_map>\n",
        new="#include <memory>\n#include <stdexcept>\n#include <string>\n"
        "#include <unordered_map>\n",
        why="include what is used: gcc 13 and later no longer bring <stdexcept> along",
    ),
    Edit(
        file="horovod/common/group_table.h",
        old="#include <queue>\n#include <unordered_map>\n#include <vector>\n",
        new="#include <queue>\n#include <string>\n#include <unordered_map>\n#include <vector>\n",
        why="include what is used: gcc 13 and later no longer bring <string> along",
    ),
    Edit(
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which as find_executable\n",
        why="let horovodrun start on Python 3.12 and later, which have no distutils",
    ),
)


def fingerprint(edits: Sequence[Edit] = EDITS) -> str:
    """A short hash of what the edits do; their explanations are left out of it."""
    text = json.dumps([astuple(edit)[:3] for edit in edits])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def apply(root: Path, edits: Sequence[Edit] = EDITS) -> None:
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
