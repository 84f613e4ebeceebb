"""Cutting a batch of tensors into a rank's share."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.share import cut, cut_rows, fingerprint, rows


def batch(n):
    dense = np.arange(n * 2).reshape(n, 2)
    return {"dense": tf.constant(dense), "ragged": tf.RaggedTensor.from_row_lengths(range(n), [1] * n)}


@pytest.mark.parametrize(("n", "size"), [(10, 3), (6, 2), (2, 3), (1, 4)])
def test_shares_join_to_the_batch(n, size):
    shares = [cut(batch(n), rank, size) for rank in range(size)]
    assert sum(int(s.count) for s in shares) == n
    assert all(int(s.total) == n for s in shares)
    kept = [s for s in shares if not s.ghost]
    np.testing.assert_array_equal(np.concatenate([s.data["dense"] for s in kept]), batch(n)["dense"])
    assert sum((s.data["ragged"].to_list() for s in kept), []) == [[i] for i in range(n)]
    for ghost in (s for s in shares if s.ghost):
        assert int(ghost.count) == 0
        assert int(rows(ghost.data)) == 1  # a stand-in: an empty batch would make means NaN


def test_sparse_rows_and_scalars():
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0]])
    part, scalar, nothing = cut_rows((sparse, tf.constant(5), ()), 1, 3)
    np.testing.assert_array_equal(tf.sparse.to_dense(part), [[0, 2], [3, 0]])
    assert int(scalar) == 5 and nothing == ()
    assert int(rows((tf.constant(1), sparse))) == 3


def test_batch_without_rows():
    with pytest.raises(ValueError, match="cannot be shared among ranks"):
        rows({"a": tf.constant(1)})


def test_fingerprint_depends_on_targets_and_their_order():
    x, y = tf.zeros((4, 2)), tf.constant([1, 2, 3, 4])
    mark = float(fingerprint((x, y)))
    assert 0 <= mark < 1
    assert mark == float(fingerprint((x + 1, y)))
    assert mark != float(fingerprint((x, tf.reverse(y, [0]))))
    for other in (tf.constant([1.5, 2, 3, 4]), tf.constant(["a", "b"]), tf.constant([True, False])):
        assert 0 <= float(fingerprint((x, other))) < 1
