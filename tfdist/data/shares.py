"""Shares of a global batch, as plain numbers. Pure: no TensorFlow, no communication.

A global batch of `n` samples is cut into contiguous shares whose sizes differ by one at most::

    n = 10, size = 3      rank 0       rank 1       rank 2
                         [0 .. 3)     [3 .. 6)     [6 .. 10)
    weight of the rank      3/10         3/10         4/10

so that the weighted sum of the ranks' mean gradients is the mean gradient of the batch. When a last
batch has fewer samples than there are ranks, some shares are empty; such a rank computes on a sample
of its neighbour with weight 0 (a *ghost*), because it must still take part in every reduction.
"""

from __future__ import annotations


def bounds(n: int, rank: int, size: int) -> tuple[int, int]:
    """Rows `[low, high)` of a batch of `n` rows that belong to `rank`; `n` may be a tensor as well."""
    return n * rank // size, n * (rank + 1) // size


def has_ghosts(samples: int, batch: int, size: int) -> bool:
    """Whether the last of the batches of `samples` samples leaves some rank without a sample."""
    return 0 < samples % batch < size


def check_batch(batch: int, size: int, what: str = "batch_size") -> None:
    """Refuses a global batch that does not give every rank a sample.

    Raises:
        ValueError: when `batch` is below the number of ranks.
    """
    if batch < size:
        raise ValueError(
            f"{what} is {batch}, but it is the global batch (samples per update over all ranks) and there are "
            f"{size} ranks: each needs at least one sample. Pass at least {size}, "
            f"for example `batch_size=32 * strategy.num_replicas_in_sync`."
        )


def describe(batch: int, size: int) -> str:
    """The line that `fit` prints: `global batch 128 = 2 x 64`."""
    sizes = sorted({high - low for low, high in (bounds(batch, r, size) for r in range(size))})
    if len(sizes) == 1:
        return f"global batch {batch} = {size} x {sizes[0]}"
    large = batch - size * sizes[0]
    return f"global batch {batch} = {large} x {sizes[1]} + {size - large} x {sizes[0]}"
