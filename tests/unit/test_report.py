"""RunReport under a parameter server: its line, and its curves for TensorBoard."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.report import _Server, describe_updates

RESULT = {
    "workers": 2,
    "ps": 1,
    "steps_a_call": 10,
    "updates": 200,
    "late": {0: 100, 1: 50, 2: 30, 3: 10, 5: 10},
    "dropped": 0,
    "bytes_held": [6_680_000],
    "updates_per_s": 61.3,
    "samples_per_s": 3923.2,
}


class Session:
    def lateness(self):
        return {0: 6, 2: 3}, 4


def test_the_line():
    assert describe_updates(RESULT) == (
        "2 workers, 1 ps: 3,923 samples/s, 61.3 updates/s; 200 updates, 10 a call; "
        "other updates between pull and push: 0: 50%, 1: 25%, 2: 15%, 3: 5%, more: 5%; the ps hold 6.68 MB"
    )
    assert "; 7 gradients dropped as late; " in describe_updates({**RESULT, "dropped": 7})


def test_curves_for_tensorboard(tmp_path):
    server = _Server(Session(), tmp_path)
    server.epoch(3)
    found = {}
    for file in tmp_path.iterdir():
        for record in tf.data.TFRecordDataset(str(file)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                plugin = value.metadata.plugin_data.plugin_name
                found[value.tag] = event.step, plugin, tf.make_ndarray(value.tensor)
    assert {tag: (step, plugin) for tag, (step, plugin, _) in found.items()} == {
        "staleness": (3, "histograms"),
        "staleness/mean": (3, "scalars"),
        "staleness/dropped": (3, "scalars"),
    }
    np.testing.assert_array_equal(found["staleness"][2], [[-0.5, 0.5, 6], [0.5, 1.5, 0], [1.5, 2.5, 3]])
    assert found["staleness/mean"][2] == pytest.approx(6 / 9)
    assert found["staleness/dropped"][2] == 4


def test_a_plain_model_is_refused():
    with pytest.raises(ValueError, match="RunReport needs a distributed model"):
        tfdist.RunReport().set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="Checkpoint is for models of one of tfdist's strategies"):
        tfdist.Checkpoint("somewhere").set_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="seconds is 0, expected a number above 0"):
        tfdist.Checkpoint("somewhere", seconds=0)
