"""What a call returns, packed by element type and taken apart again."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfdist.ps.form import Form

RESULT = {
    "metrics": [np.arange(6, dtype="float32").reshape(2, 3), np.int64(2**40), np.float32(1.5), np.zeros(0, "float32")],
    "logs": {"loss": np.float32(0.25), "b": {"y": np.int32(3), "x": np.float64(2.5)}, "a": np.array([True, False])},
    "facts": np.arange(4, dtype="int64"),
}


def test_there_and_back():
    form = Form()
    packed = tf.function(lambda: form.packed(tf.nest.map_structure(tf.constant, RESULT)))()
    assert set(packed) == {"facts", "float32", "int64", "int32", "float64", "bool"}
    found = form.taken_apart({name: value.numpy() for name, value in packed.items()})
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(RESULT), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
    tf.nest.assert_same_structure(found, RESULT)


def test_any_number_of_facts():
    form = Form()
    work = tf.function(lambda facts: form.packed({"metrics": [], "logs": {"loss": tf.ones([])}, "facts": facts}))
    for count in (1, 7):
        found = form.taken_apart(work(tf.range(count)))
        assert found["facts"].tolist() == list(range(count))
        assert found["logs"] == {"loss": 1.0}


def test_a_value_for_each_sample_is_refused():
    form = Form()
    work = tf.function(
        lambda x: form.packed({"logs": {"each": x}, "metrics": [], "facts": x}),
        input_signature=[tf.TensorSpec([None], tf.float32)],
    )
    with pytest.raises(ValueError, match="logs need static shapes. Return scalars"):
        work(tf.ones(3))
