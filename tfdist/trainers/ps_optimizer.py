"""The optimizer of a model on a parameter server: in a worker's step it clips and hands over its gradients."""

from __future__ import annotations

from typing import Any

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
            grads = [g / self.loss_scale_factor for g in grads]
        collected.gradients, collected.variables = list(self._clip_gradients(list(grads))), list(variables)
        return None
