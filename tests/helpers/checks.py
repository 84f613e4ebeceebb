"""Many small checks on the same ranks: starting two TensorFlow processes costs more than most checks.

A test module registers checks, functions of a `Ring`, that every rank runs in the same order::

    CHECKS = Checks(__name__)

    @CHECKS
    def r3_early_stopping(ring): ...

    test_callbacks = CHECKS.tests()      # one pytest case for each check, all run in one spawn

A check that fails alike on all ranks costs only itself; after one that fails on some, the rest is not run.
"""

from __future__ import annotations

import importlib
import pickle
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import cluster

NOT_RUN = "not run: a check before it failed on some ranks only"


@dataclass
class Ring:
    """What a check gets: the strategy, this rank, and a directory that all ranks see, empty at first."""

    strategy: Any
    rank: int
    size: int
    path: Path

    def everywhere(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank; returns when all have come here."""
        import numpy as np

        import tfdist

        data = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = tfdist.all_gather(np.array([len(data)]))
        whole = bytes(tfdist.all_gather(data))
        ends = lengths.cumsum()
        return [pickle.loads(whole[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


class Checks(dict):
    """The checks of a module by name."""

    def __init__(
        self,
        module: str,
        ranks: int = 2,
        env: Mapping[str, str] | None = None,
        prepare: Callable[[], None] = lambda: None,  # in each rank, before it uses TensorFlow
    ) -> None:
        super().__init__()
        self.prepare = prepare
        self.module, self.ranks = module, ranks
        # A check that fails on one rank must not keep the other for a minute.
        self.env = {"TFDIST_DEADLINE": "20", **(env or {})}

    def __call__(self, check: Callable[[Ring], None]) -> Callable[[Ring], None]:
        self[check.__name__] = check
        return check

    def run(self, path: Path, names: list[str] | None = None) -> dict[str, tuple[str, float]]:
        """(what went wrong, seconds) by check; the text is empty where all is well."""
        chosen = names or list(self)
        call = (self.module, chosen, str(path))
        told = cluster.run(run_all, self.ranks, deadline=240, env=self.env, args=call)
        joined = {}
        for name in chosen:
            texts = [t.get(name, (NOT_RUN, 0.0)) for t in told]
            wrong = [f"rank {r}: {text}" for r, (text, _) in enumerate(texts) if text]
            joined[name] = ("\n".join(wrong), texts[0][1])
        return joined

    def tests(self) -> Callable[..., None]:
        """A pytest test with one case a check."""
        kept: dict[str, tuple[str, float]] = {}

        @pytest.mark.parametrize("check", list(self))
        def test(check: str, tmp_path_factory: pytest.TempPathFactory, request: Any) -> None:
            wanted = {i.callspec.params["check"] for i in request.session.items if _same(i, test)}
            if check not in kept:
                path, chosen = tmp_path_factory.mktemp("checks"), [n for n in self if n in wanted]
                try:
                    kept.update(self.run(path, chosen))
                except Exception:  # such as the deadline's: once is enough
                    kept.update(dict.fromkeys(chosen, (traceback.format_exc(), 0.0)))
            assert not kept[check][0], kept[check][0]

        return test


def _same(item: Any, test: Any) -> bool:
    return getattr(item, "obj", None) is test


def run_all(module: str, names: list[str], path: str) -> dict[str, tuple[str, float]]:
    """On a rank: runs the checks, returns what went wrong and how long each took."""
    import keras

    import tfdist

    checks = importlib.import_module(module).CHECKS
    checks.prepare()
    strategy = tfdist.RingAllReduceStrategy(bucket_mb=0.001)
    told: dict[str, tuple[str, float]] = {}
    for name in names:
        here = Path(path) / name
        here.mkdir(exist_ok=True)
        ring = Ring(strategy, tfdist.rank(), tfdist.size(), here)
        keras.utils.set_random_seed(7)
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        began, wrong = time.monotonic(), ""
        try:
            checks[name](ring)
        except BaseException:
            wrong = traceback.format_exc()
        told[name] = (wrong, time.monotonic() - began)
        try:
            failed = ring.everywhere(bool(wrong))
        except BaseException:
            if not wrong:
                told[name] = (traceback.format_exc(), time.monotonic() - began)
            break
        if any(failed) and not all(failed):
            break
    return told
