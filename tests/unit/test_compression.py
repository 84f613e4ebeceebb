"""fp16 on the wire: exact for powers of two, bounded for all, no overflow, Inf and NaN kept."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.comm.compression import FP16, resolve


def summed(parts):
    """The ranks' float32 vectors, compressed, added in float16 as the ring does, and decompressed."""
    largest = []
    for part in parts:  # what the all-reduce of the maximum gives
        FP16().compress(tf.constant(part), len(parts), lambda x: largest.append(x) or x)
    agreed = tf.reduce_max(tf.stack(largest), axis=0)
    wires = [FP16().compress(tf.constant(p), len(parts), lambda x: agreed) for p in parts]
    assert {w[0].dtype for w in wires} == {tf.float16}
    total = wires[0][0].numpy()
    with np.errstate(all="ignore"):
        for wire, _ in wires[1:]:
            total = total + wire.numpy()
    return FP16().decompress(tf.constant(total), wires[0][1]).numpy()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("power", [-120, -20, 0, 17, 100])
def test_powers_of_two_are_exact(ranks, power):
    data = np.float32(2.0**power) * np.array([1, 0.5, -2, 0], np.float32)
    np.testing.assert_array_equal(summed([data] * ranks), data * ranks)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(-30, 30), st.sampled_from([1.0, 1e-3, 1e-6]))
def test_error_bound(ranks, seed, magnitude, spread):
    random = np.random.default_rng(seed)
    parts = (random.standard_normal((ranks, 64)) * 10.0**magnitude).astype(np.float32)
    parts[:, 32:] *= np.float32(spread)
    exact = parts.astype(np.float64).sum(axis=0)
    # A rounding of each part and of each partial sum (2^-11, half a unit in the last place of 11 bits), and
    # float16's smallest step (2^-25, half of it) at the scale that puts n times the maximum above 2^13.
    sizes = np.abs(parts.astype(np.float64)).sum(axis=0)
    floor = 2.0**-25 * ranks * 2 * np.abs(parts).max() * 2.0 ** (np.ceil(np.log2(ranks))) / 2.0**14
    bound = sizes * 2.0**-11 * (ranks + 1) + floor * ranks
    assert (np.abs(summed(list(parts)) - exact) <= bound).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
@pytest.mark.parametrize("value", [1e30, 3.4e38, 65504.0, 65505.0, 7e4, 2e-38])
def test_no_overflow(ranks, value):
    got = summed([np.array([value, -value, 0], np.float32)] * ranks)
    exact = np.array([value, -value, 0]) * ranks
    with np.errstate(over="ignore"):
        representable = np.isfinite(exact.astype(np.float32))
    assert np.isfinite(got[representable]).all()
    close = np.isclose(got, exact, rtol=2e-3 * ranks, atol=0)
    assert close[representable].all()


def test_inf_and_nan_stay_and_spoil_nothing_else():
    got = summed([np.array([np.inf, -np.inf, np.nan, 1.5, 1e-3], np.float32), np.ones(5, np.float32)])
    assert got[0] == np.inf
    assert got[1] == -np.inf
    assert np.isnan(got[2])
    assert got[3] == 2.5
    assert abs(got[4] - 1.001) < 1e-3


def test_resolve():
    class Own:
        def compress(self, flat, n_ranks, agree_max):
            return flat, None

        def decompress(self, wire, context):
            return wire

    own = Own()
    assert resolve(None) is None
    assert resolve(own) is own
    assert isinstance(resolve("fp16"), FP16)
    with pytest.raises(ValueError, match="known are None, 'fp16'"):
        resolve("bf16")
    with pytest.raises(ValueError, match="needs the methods"):
        resolve(3)
    with pytest.raises(ValueError, match="instance, not a class"):
        resolve(Own)
