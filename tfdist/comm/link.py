"""How fast the ranks' link is, and which bucket size suits a model on it.

A step's communication costs, for buckets b of S_b bytes on a link with latency L and bandwidth B:

    sum over b of (L + S_b / B)  +  sum over b with several rows of S_b / C

C being the speed of copying: a bucket of several rows is packed, a row that travels alone is not, and nothing is
copied when a bucket is taken apart. So small rows are better together (one L instead of many) and rows larger than
about L C are better alone. Given the length of the backward pass, a bucket starts when its last gradient is there
(taken as proportional to bytes), and only what goes on after the backward pass counts.

The formula leaves out that on a rank with one core the ring itself needs that core: without `backward_seconds` no
overlap is assumed, which is the right side to err on there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tfdist.comm.buckets import Bucket, Row, plan

if TYPE_CHECKING:
    from tfdist.comm.collective import Collective

MB = 1_000_000
# A larger bucket would spare latency of a few percent of its time, and start later in the backward pass.
_CANDIDATES = tuple(m * MB for m in (1, 2, 4, 8, 16))


@dataclass(frozen=True)
class Link:
    """What the slowest rank measured.

    Attributes:
      latency_s: seconds of an all-reduce of 4 kB.
      bandwidth_Bps: bytes of a tensor that are all-reduced per second, latency taken off.
      copy_Bps: bytes that packing copies per second.
    """

    latency_s: float
    bandwidth_Bps: float  # noqa: N815
    copy_Bps: float = 3e9  # noqa: N815

    def __str__(self) -> str:
        return f"link {self.bandwidth_Bps / 1e9:.2g} GB/s, {self.latency_s * 1e3:.1f} ms"


def choose_bucket_bytes(rows: Sequence[Row], link: Link, backward_seconds: float | None = None) -> tuple[int, str]:
    """The bucket limit in bytes with the lowest cost by the formula above, and a sentence that says why.

    Of equal costs the larger limit wins (fewer buckets).

    Args:
      rows: the model's gradients, in the order of its variables.
      link: as measured; the same on every rank.
      backward_seconds: length of the backward pass where it can overlap with communication, else None.
    """
    total = sum(row.nbytes for row in rows)
    limits = [c for c in _CANDIDATES if c < total]
    if total <= _CANDIDATES[-1]:
        limits.append(max(MB, -(-total // MB) * MB))  # one bucket, in whole megabytes
    best = min(reversed(limits), key=lambda limit: step_cost(plan(rows, limit), link, backward_seconds))
    count = len(plan(rows, best))
    return best, (
        f"buckets of {best // MB} MB ({count} a step): {total / MB:.3g} MB of gradients in {len(rows)} tensors, {link}"
    )


def step_cost(buckets: Sequence[Bucket], link: Link, backward_seconds: float | None = None) -> float:
    """Seconds of a step that communication adds, by the formula in the module's docstring."""
    backward = backward_seconds or 0.0
    total = sum(b.nbytes for b in buckets) or 1
    sent, ends, copying = 0, 0.0, 0.0
    for bucket in buckets:
        sent += bucket.nbytes
        ready = backward * sent / total
        ends = max(ready, ends) + link.latency_s + bucket.nbytes / link.bandwidth_Bps
        if len(bucket.rows) > 1:
            copying += bucket.nbytes / link.copy_Bps
    return max(ends - backward, 0.0) + copying


def measure(collective: Collective, small: int = 4_000, large: int = 4 * MB) -> Link:
    """Times a few all-reduces; all ranks call it and get the same answer (the slowest rank's). About 0.2 s."""
    import tensorflow as tf

    from tfdist.comm import fusion

    if collective.size == 1:
        return Link(0.0, float("inf"), float("inf"))
    tiny, big = tf.zeros([small // 4]), tf.zeros([large // 4])
    parts = [tf.zeros([large // 16])] * 4
    latency = _median(lambda: collective.all_reduce(tiny, "link.small"), 9)
    moving = _median(lambda: collective.all_reduce(big, "link.large"), 5)
    copying = _median(lambda: fusion.pack(parts), 5)
    mine = tf.constant([latency, moving, copying], tf.float64)
    latency, moving, copying = collective.all_reduce(mine, "link.agree", "max").numpy().tolist()
    return Link(latency, large / max(moving - latency, 1e-6), large / max(copying, 1e-6))


def _median(call: Callable[[], object], times: int) -> float:
    call()  # the first one sets things up
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[times // 2]
