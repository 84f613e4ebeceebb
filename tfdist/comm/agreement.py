"""Checks that every rank describes the same thing, and says on every rank where it does not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.comm.collective import Collective

# Name, shape (None where there is none), element type (or "none", "sparse float32", ...).
Described = tuple[str, "tuple[int | None, ...] | None", str]
SAME_MODEL = "Every rank has to build the same model and optimizer"


def agree(
    collective: Collective, rows: Sequence[Described], what: str, hint: str = SAME_MODEL, name: str | None = None
) -> None:
    """Returns when all ranks gave the same rows; costs one gather of 32 bytes a rank. Eager; all ranks call it.

    Args:
      rows: (name, shape, element type) of each variable or gradient, in order.
      what: their name in the message and in the roll call, such as "variables of 'sequential'".
      hint: what to do, the last sentence of the message.
      name: under which the ranks meet, where `what` may itself differ between them; `what` by default.

    Raises:
      ValueError: on every rank, naming the first difference: the variable, both descriptions and their ranks.
    """
    if collective.size == 1:
        return
    meet = name or what
    text = json.dumps([list(row) for row in rows]).encode()
    with tf.init_scope():
        digest = np.frombuffer(hashlib.sha256(text).digest(), np.uint8)
        digests = collective.all_gather(tf.constant(digest[None]), f"{meet}: digest").numpy()
        if (digests == digests[0]).all():
            return
        lengths = collective.all_gather(tf.constant([len(text)]), f"{meet}: length").numpy()
        whole = collective.all_gather(tf.constant(np.frombuffer(text, np.uint8)), f"{meet}: table").numpy()
    ends = np.cumsum(lengths)
    tables = [json.loads(bytes(whole[end - n : end])) for end, n in zip(ends.tolist(), lengths.tolist(), strict=True)]
    raise ValueError(f"{difference(tables, collective.hosts, what)}. {hint}")


def difference(tables: Sequence[Sequence[Sequence[object]]], hosts: Sequence[str], what: str) -> str:
    """A message that names the first row in which the ranks' tables differ, with each version and its ranks."""
    for index in range(max(map(len, tables))):
        versions: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            row = _shown(table[index]) if index < len(table) else "nothing (its list ends before)"
            versions.setdefault(row, []).append(rank)
        if len(versions) > 1:
            shown = "; ".join(f"{_ranks(ranks, hosts)}: {row}" for row, ranks in versions.items())
            return f"{what}: the ranks differ at position {index}: {shown}"
    return f"{what}: the ranks agree"


def _shown(row: Sequence[object]) -> str:
    name, shape, dtype = row
    return f"{name!r} {dtype}" + ("" if shape is None else str(shape).replace("None", "any"))


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    named = ", ".join(f"{r} ({hosts[r]})" for r in ranks)
    return f"rank{'s' if len(ranks) > 1 else ''} {named}"
