"""BatchNormalization under a parameter server: what cannot work is refused by name."""

from __future__ import annotations

from typing import Any

import keras

from tfdist import private
from tfdist.ps.consistency import Consistency


def check(model: Any, consistency: Consistency, workers: int) -> None:
    """Refuses layers that would have to see the whole batch.

    Raises:
      ValueError: the model has a BatchNormalization(synchronized=True), and a batch is cut into shares.
    """
    if consistency.replicas(workers) == 1:
        return
    for layer in private.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                f"{layer.name!r} of {model.name!r} is BatchNormalization(synchronized=True), but under {consistency} "
                f"each of the {workers} workers sees its share of a batch alone. Leave synchronized out, so that each "
                "share is normalized by itself, or use RingAllReduceStrategy."
            )
