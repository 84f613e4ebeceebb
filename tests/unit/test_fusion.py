"""Packing and unpacking against numpy, and that nothing is copied that need not be."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.comm import fusion
from tfdist.comm.buckets import ALIGNMENT

SHAPES = [(2, 3), (), (4,), (0, 5), (1, 1, 2)]


def values(dtype):
    return [np.arange(np.prod(s, dtype=int)).reshape(s).astype(dtype) + i for i, s in enumerate(SHAPES)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool"])
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "graph"])
def test_there_and_back(dtype, wrap):
    arrays = values(dtype)

    def both(*tensors):
        flat = fusion.pack(tensors)
        return flat, fusion.unpack(flat, SHAPES)

    flat, back = wrap(both)(*map(tf.constant, arrays))
    assert flat.dtype.size * len(flat) % ALIGNMENT == 0
    np.testing.assert_array_equal(flat.numpy()[flat.numpy() != 0], np.concatenate([a[a != 0].ravel() for a in arrays]))
    for got, want in zip(back, arrays, strict=True):
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)


def test_parts_without_a_gap_share_the_memory_of_the_whole():
    shapes = [(2, 16), (10,), (32,)]
    flat = fusion.pack([tf.ones(s) for s in shapes])
    start = np.asarray(memoryview(flat)).ctypes.data
    parts = [np.asarray(memoryview(part)).ctypes.data - start for part in fusion.unpack(flat, shapes)]
    assert (parts[0], parts[2]) == (0, 48 * 4)


def test_one_tensor_is_only_reshaped():
    def both(x):
        return fusion.unpack(fusion.pack([x]), [(2, 3)])

    graph = tf.function(both).get_concrete_function(tf.TensorSpec((2, 3))).graph
    assert {op.type for op in graph.get_operations()} <= {"Placeholder", "Const", "Reshape", "Identity"}
