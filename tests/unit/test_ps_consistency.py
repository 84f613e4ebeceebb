"""Consistency as plain values: what is taken, and what is refused by name."""

from __future__ import annotations

import pytest

from tfdist.ps.consistency import Async, Bounded, LocalSGD, Sync, parse


def test_what_is_taken():
    assert parse("async") == Async() == Async(None, 0.04)
    assert parse("sync") == Sync(0)
    for value in (Async("scale"), Async("dc", 0.1), Bounded(0), Sync(backup_workers=2), LocalSGD(steps=1)):
        assert parse(value) is value


@pytest.mark.parametrize("value", ["bounded", "ASYNC", 3, None, Sync, ["sync"]])
def test_anything_else_is_refused(value):
    with pytest.raises(ValueError, match=r"^consistency is .*, expected tfdist\.Async\(\).*\"async\" and \"sync\""):
        parse(value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Async("decay"), r"Async: correction is 'decay', expected None or one of 'scale', 'dc'"),
        (lambda: Async("dc", 0), "Async: strength is 0, expected a number above 0"),
        (lambda: Async("dc", float("nan")), "Async: strength is nan"),
        (lambda: Bounded(-1), "Bounded: staleness is -1, expected an integer >= 0"),
        (lambda: Bounded(1.5), "Bounded: staleness is 1.5"),
        (lambda: Bounded(True), "Bounded: staleness is True"),
        (lambda: Sync(-1), "Sync: backup_workers is -1, expected an integer >= 0"),
        (lambda: Sync("1"), "Sync: backup_workers is '1'"),
        (lambda: LocalSGD(0), "LocalSGD: steps is 0, expected an integer >= 1"),
        (lambda: LocalSGD(2.0), "LocalSGD: steps is 2.0"),
    ],
)
def test_values_that_make_no_sense(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_with_a_number_of_workers():
    for consistency in (Async(), Bounded(), LocalSGD()):
        consistency.check(1)
        assert consistency.replicas(3) == 1
    Sync(2).check(3)
    assert Sync(2).replicas(3) == 3
    with pytest.raises(ValueError, match="backup_workers is 1, but the cluster has 1 worker: .* at most 0"):
        Sync(1).check(1)
    with pytest.raises(ValueError, match="backup_workers is 4, but the cluster has 3 workers: .* at most 2"):
        Sync(4).check(3)
