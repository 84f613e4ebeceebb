"""What the ranks tell each other before `fit`: that they mean the same, and from which random state they start."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import private
from tfdist.comm import watch
from tfdist.comm.collective import Collective


def compare(comm: Collective, what: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Checks that every rank gave the same facts; returns rank 0's.

    Keys that begin with an underscore are told, not compared.

    Raises:
        ValueError: on every rank, naming the first fact that differs, with each rank's value.
    """
    told = told_by_all(comm, what, facts)
    for key in sorted(told[0].keys() | facts.keys()):
        values = [t.get(key) for t in told]
        if not key.startswith("_") and any(v != values[0] for v in values):
            shown = "; ".join(f"rank {r} ({comm.hosts[r]}): {v}" for r, v in enumerate(values))
            raise ValueError(f"{what} was called with a different {key} on each rank: {shown}. Call it alike on all.")
    return told[0]


def told_by_all(comm: Collective, what: str, value: Any) -> list[Any]:
    """The values, which are fit for JSON, of all ranks, by rank."""
    text = json.dumps(value, sort_keys=True, default=str).encode()
    with watch.waiting(what):
        lengths = comm.all_gather(tf.constant([len(text)], tf.int64), f"hello/{what}/length").numpy()
        whole = bytes(comm.all_gather(tf.constant(np.frombuffer(text, np.uint8)), f"hello/{what}").numpy())
    ends = np.cumsum(lengths)
    return [json.loads(whole[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def agree_on_global_seed(comm: Collective) -> None:
    """Sets TensorFlow's global seed from rank 0 where no rank has one, so that `Dataset.shuffle` agrees.

    A seed that the user set is left alone, here and on the other ranks.
    """
    mine = private.global_seed()
    known = comm.all_gather(tf.constant([mine is not None], tf.int32), "hello/seeded").numpy()
    drawn = tf.constant(random.SystemRandom().randrange(2**31), tf.int64)
    agreed = int(comm.broadcast(drawn, 0, "hello/seed"))
    if not known.any():
        tf.random.set_seed(agreed)


@contextmanager
def seed_of_root(seed: int | None) -> Iterator[None]:
    """Builds a pipeline under rank 0's global seed, whatever this rank's is."""
    mine = private.global_seed()
    if seed is None or seed == mine:
        yield
        return
    tf.random.set_seed(seed)
    try:
        yield
    finally:
        tf.random.set_seed(mine) if mine is not None else None


def share_python_random(comm: Collective) -> None:
    """Rank 0's state of `random` and `numpy.random` on every rank.

    Keras shuffles the batches of a PyDataset with the first, and generators draw from either: copies of one
    pipeline must draw the same to be cut into shares of the same batches.
    """
    kind, numbers, gauss = random.getstate()
    got = comm.broadcast(tf.constant(numbers, tf.int64), 0, "hello/random").numpy()
    name, keys, place, has_gauss, cached = np.random.get_state()
    packed = np.concatenate([keys.astype(np.int64), [place]])
    numpy_got = comm.broadcast(tf.constant(packed), 0, "hello/numpy").numpy()
    if comm.rank != 0:
        random.setstate((kind, tuple(int(n) for n in got), gauss))
        np.random.set_state((name, numpy_got[:-1].astype(np.uint32), int(numpy_got[-1]), has_gauss, cached))
