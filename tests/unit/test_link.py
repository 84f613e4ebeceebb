"""The bucket size chosen for measured links and models, against the costs written out by hand."""

from __future__ import annotations

import math

import pytest

from tfdist.comm.buckets import Row, plan
from tfdist.comm.collective import Alone
from tfdist.comm.link import MB, Link, choose_bucket_bytes, measure, step_cost
from tfdist.comm.threaded import Threaded

TCP = Link(latency_s=0.0018, bandwidth_Bps=0.55e9, copy_Bps=3e9)


def rows(shapes):
    return [Row(f"v{i}", s, "float32", 4 * math.prod(s)) for i, s in enumerate(shapes)]


DEEP = rows([(128, 128), (128,)] * 102)
MLP = rows([(784, 2048), (2048,), (2048, 2048), (2048,), (2048, 10), (10,)])


def test_many_small_tensors_travel_together():
    size, why = choose_bucket_bytes(DEEP, TCP)
    assert len(plan(DEEP, size)) == 1
    assert why == "buckets of 7 MB (1 a step): 6.74 MB of gradients in 204 tensors, link 0.55 GB/s, 1.8 ms"


def test_large_tensors_travel_alone():
    size, why = choose_bucket_bytes(MLP, TCP)
    assert size == 4 * MB  # measured best too: 14.2 steps/s against 10.8 in one bucket
    large = [b for b in plan(MLP, size) if b.nbytes > MB]
    assert all(len(b.rows) == 1 for b in large)
    assert "(4 a step): 23.3 MB of gradients in 6 tensors" in why


def test_no_bucket_above_16_mb_unless_one_tensor_is():
    many = rows([(256, 1024)] * 100)
    size, _ = choose_bucket_bytes(many, TCP)
    assert size <= 16 * MB


def test_cost_by_hand():
    three = rows([(250_000,), (250_000,), (500_000,)])  # 1, 1 and 2 MB; packed from the end
    link = Link(0.001, 1e9, 4e9)
    # Three buckets of their own: three latencies, 4 ms on the wire, nothing copied.
    assert step_cost(plan(three, 1), link) == pytest.approx(3 * 0.001 + 0.004)
    # One bucket: one latency, the same wire, 4 MB packed.
    assert step_cost(plan(three, 10 * MB), link) == pytest.approx(0.001 + 0.004 + 0.001)
    # A backward pass of 8 ms: ready at 4, 6, 8 ms; ends at 7, 9, 11 ms; 3 ms stick out.
    assert step_cost(plan(three, 1), link, 0.008) == pytest.approx(0.003)


def test_overlap_prefers_smaller_buckets():
    alone, _ = choose_bucket_bytes(DEEP, TCP)
    overlapped, _ = choose_bucket_bytes(DEEP, TCP, backward_seconds=0.1)
    assert overlapped < alone


def test_measure():
    assert measure(Alone()).latency_s == 0.0
    assert choose_bucket_bytes(MLP, measure(Alone()))[0] > 0
    links = Threaded.run(2, measure)
    assert links[0] == links[1]
    assert links[0].latency_s > 0
    assert links[0].bandwidth_Bps > 0
