"""The report of a split model's plan: of one in training, or of one that is only thought of."""

from __future__ import annotations

from typing import Any

from tfdist import private
from tfdist.planner.outlook import Report
from tfdist.planner.plan import Plan
from tfdist.split import planning, profile, survey
from tfdist.split.network import Network
from tfdist.split.planning import Wishes
from tfdist.trainers.split import SplitTrainer, optimizers_of, slots_of
from tfdist.trainers.swap import has


def report(model: Any, wishes: Wishes, batch: int | None = None, plan: Plan | None = None) -> Report:
    """What the plan in use brings, or that which `distribute` would make.

    Args:
      model: Sequential or functional, distributed or not; it stays as it is.
      wishes: of the strategy.
      batch: samples of a batch; None: those of `wishes`, else of the last `fit`, else `profile.UNKNOWN` a micro-batch.
      plan: the one meant, where it is known.

    Raises:
      ValueError: as `ModelParallelStrategy.distribute`.
    """
    state = model._tfdist_split if has(model, SplitTrainer) else None
    network = Network(model) if state is None else state.network
    plan = plan or (planning.plan(network, wishes) if state is None else state.plan)
    measured = None if state is None else state.pace.measured()
    if batch is None:
        seen = None if state is None else state.pace.batch
        batch = wishes.batch_size or seen or profile.UNKNOWN * wishes.microbatches
    return survey.report(network, plan, wishes, batch, slot_bytes(model), measured, placed=state is not None)


def slot_bytes(model: Any) -> dict[int, int] | None:
    """Bytes of the optimizer's slots by id of their variable; None where there is no built optimizer."""
    optimizers = optimizers_of(model)
    if not optimizers or not optimizers[-1].built:
        return None
    optimizer = optimizers[-1]  # the one inside where that scales the loss
    variables = private.trained_by(optimizer)
    rows = slots_of(optimizer)
    return {id(v): sum(survey.nbytes(s.value) for s in row.values()) for v, row in zip(variables, rows, strict=True)}
