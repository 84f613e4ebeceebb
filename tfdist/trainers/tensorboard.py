"""Curves for TensorBoard, written by TensorFlow alone: `tf.summary.scalar` and its like need TensorBoard's package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

SCALAR, TENSOR = 1, 2  # of TensorBoard's enum DataClass


def scalar(name: str, value: float, step: int) -> None:
    """A point of a curve, to the writer that is the default."""
    tf.summary.write(name, np.float32(value), step=step, metadata=_metadata("scalars", SCALAR))


def histogram(name: str, counts: Mapping[int, int], step: int) -> None:
    """How often whole numbers occurred, to the writer that is the default: a bin around each."""
    bins = np.array([(n - 0.5, n + 0.5, counts.get(n, 0)) for n in range(max(counts, default=0) + 1)], np.float64)
    tf.summary.write(name, bins, step=step, metadata=_metadata("histograms", TENSOR))


def _metadata(plugin: str, kind: int) -> Any:
    metadata = tf.compat.v1.SummaryMetadata
    return metadata(plugin_data=metadata.PluginData(plugin_name=plugin), data_class=kind)
