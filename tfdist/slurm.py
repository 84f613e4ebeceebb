"""Slurm: which tasks a step of `srun` has, and which of them this process is. Pure.

`srun` starts the same command on every node and tells each process its place by variables. Those of the
step are read, not those of the job: a batch script and its single processes are no ring. What the
variables mean: https://slurm.schedmd.com/srun.html, OUTPUT ENVIRONMENT VARIABLES.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

STEP, JOB = "SLURM_STEP_ID", "SLURM_JOB_ID"
RANK, SIZE = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
LOCAL_RANK, NODE = "SLURM_LOCALID", "SLURM_NODEID"
NODES, COUNTS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"

PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections


@dataclass(frozen=True)
class Step:
    """One task of a step.

    Attributes:
        rank, size: this task, and the number of tasks.
        local_rank: this task among those on its node.
        node: index of its node.
        nodes: their names.
        counts: number of tasks on each.
        port: from job and step, so that all tasks compute the same.
    """

    rank: int
    size: int
    local_rank: int
    node: int
    nodes: tuple[str, ...]
    counts: tuple[int, ...]
    port: int


def in_step(env: Mapping[str, str]) -> bool:
    """Whether `srun` has started this process, alone or with others."""
    return STEP in env and SIZE in env


def read(env: Mapping[str, str]) -> Step | None:
    """The place of this process in its step; None outside of one.

    Raises:
        ValueError: a variable is missing, malformed or contradicts the others. The message names it, what
            it holds and what was expected.
    """
    if not in_step(env):
        return None
    size = _number(env, SIZE, 1, None)
    nodes, counts = expand(_text(env, NODES), NODES), repeat(_text(env, COUNTS), COUNTS)
    if len(nodes) != len(counts):
        raise _error(NODES, env[NODES], f"{len(counts)} names, as {COUNTS}={env[COUNTS]!r} has numbers")
    if sum(counts) != size:
        raise _error(COUNTS, env[COUNTS], f"numbers with the sum {size}, as {SIZE} says")
    node = _number(env, NODE, 0, len(nodes))
    local = _number(env, LOCAL_RANK, 0, counts[node])
    job, step = _number(env, JOB, 0, None), _number(env, STEP, 0, None)
    port = PORTS[(job * 31 + step) % len(PORTS)]
    return Step(_number(env, RANK, 0, size), size, local, node, nodes, counts, port)


def expand(text: str, name: str = NODES) -> tuple[str, ...]:
    """The names in a list of hosts.

    >>> expand("login,gpu[1-2,07]")
    ('login', 'gpu1', 'gpu2', 'gpu07')
    """
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        pieces = re.split(r"\[([0-9,-]+)\]", part)  # text and ranges in turn
        if not part or any(c in piece for piece in pieces[::2] for c in "[],"):
            raise _error(name, text, "a list of hosts such as 'gpu[01-04],login'")
        choices = [[piece] if i % 2 == 0 else _range(piece, name, text) for i, piece in enumerate(pieces)]
        names += ["".join(words) for words in itertools.product(*choices)]
    return tuple(names)


def repeat(text: str, name: str = COUNTS) -> tuple[int, ...]:
    """Numbers with their repetitions written out.

    >>> repeat("2(x3),1")
    (2, 2, 2, 1)
    """
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if found is None:
            raise _error(name, text, "numbers such as '2(x3),1'")
        numbers += [int(found[1])] * int(found[2] or 1)
    return tuple(numbers)


def _range(piece: str, name: str, text: str) -> list[str]:
    words: list[str] = []
    for part in piece.split(","):
        low, dash, high = part.partition("-")
        if not low or (dash and (not high or "-" in high or int(high) < int(low))):
            raise _error(name, text, "ranges such as [01-04,07] in it")
        last = int(high) if dash else int(low)
        words += [str(number).zfill(len(low)) for number in range(int(low), last + 1)]
    return words


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise _error(name, env.get(name), "what `srun` sets")
    return env[name]


def _number(env: Mapping[str, str], name: str, low: int, end: int | None) -> int:
    text = env.get(name)
    expected = f"an integer >= {low}" if end is None else f"an integer from {low} to {end - 1}"
    if text is None or not re.fullmatch("[0-9]{1,18}", text) or int(text) < low:
        raise _error(name, text, expected)
    if end is not None and int(text) >= end:
        raise _error(name, text, expected)
    return int(text)


def _error(name: str, value: str | None, expected: str) -> ValueError:
    found = "is not set" if value is None else f"is {value!r}"
    return ValueError(
        f"{name} {found}, expected {expected}. `srun` sets it: start the script by `srun python train.py`, or "
        f"unset {STEP} to run alone."
    )
