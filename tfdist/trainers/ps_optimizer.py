"""The optimizer of a model on a parameter server: in a worker's step it clips and hands over its gradients."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.comm import sparse
from tfdist.ps.work import current


class PSOptimizer:
    """Mixed into the optimizer that `compile` gave the model."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        collected = current()
        if collected is None:
            return super().apply(grads, trainable_variables)
        if collected.optimizer is not self:
            raise ValueError(
                f"The model's step applies {self.name!r}, but compile() was given {collected.optimizer.name!r}. A "
                "parameter server trains by the one optimizer of compile(); train a model of several with "
                "RingAllReduceStrategy."
            )
        if collected.gradients is not None:
            raise ValueError(
                f"The model's train_step applies {self.name!r} twice in one step. A step is one update on a parameter "
                "server: apply all gradients in one call."
            )
        variables = list(trainable_variables if trainable_variables is not None else self._trainable_variables)
        grads, variables = self._filter_empty_gradients(list(grads), variables)
        if self.loss_scale_factor is not None:
            grads = [sparse.on_values(g, lambda values: values / self.loss_scale_factor) for g in grads]
        collected.variables = list(variables)
        if collected.share is not None:  # the joined batch's gradient is clipped, by the ps tasks together
            collected.gradients = grads
            return None
        # Rows of a table are clipped as what they are a part of: the rows that are not there are zero.
        slices = [sparse.deduplicate(g) if isinstance(g, tf.IndexedSlices) else None for g in grads]
        clipped = self._clip_gradients([g if s is None else s.values for g, s in zip(grads, slices, strict=True)])
        collected.gradients = [
            g if s is None else tf.IndexedSlices(g, s.indices, s.dense_shape)
            for g, s in zip(clipped, slices, strict=True)
        ]
        return None
