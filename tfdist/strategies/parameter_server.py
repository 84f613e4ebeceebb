"""Parameters on ps tasks, steps on workers, `fit` on the chief: as a `tf.distribute.Strategy`."""

from __future__ import annotations

import itertools
from typing import Any

import tensorflow as tf

from tfdist.ps.chief import RECOVER, START, Chief
from tfdist.ps.consistency import Consistency, parse
from tfdist.strategies.one_process import OneProcessStrategy
from tfdist.tasks.serving import serve_as
from tfdist.tf_config import Cluster, from_env, need_chief
from tfdist.trainers import ps as mixing
from tfdist.trainers.models import check_backend


class ParameterServerStrategy(OneProcessStrategy):
    """Data parallel training with the parameters on ps tasks, asynchronous unless `consistency` says otherwise.

    One script for every task; `TF_CONFIG` (chief, worker, ps) tells a process its role. In a worker or ps task this
    constructor serves until the chief is done and raises SystemExit(0), so what follows it runs on the chief alone. In
    an evaluator task it gives an `EvaluatorStrategy`, whose `fit` evaluates what the chief trains.
    On the chief Keras' `fit` reads batches and hands them to workers; a worker pulls the parameters from the ps tasks,
    computes the gradient of one batch, and each ps applies its part with its part of the optimizer (Dean et al.,
    Large Scale Distributed Deep Networks, 2012; Li et al., Scaling Distributed Machine Learning with the Parameter
    Server, 2014).

    ```python
    strategy = tfdist.ParameterServerStrategy()
    with strategy.scope():
        model = strategy.distribute(build_model())
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64)
    ```

    Args:
      consistency: how workers keep in step: `tfdist.Async()`, the default, `tfdist.Bounded(staleness=4)`,
        `tfdist.Sync(backup_workers=0)`, `tfdist.LocalSGD(steps=8)`; "async" and "sync" for the first and the third.
      cluster: a `tfdist.LocalCluster`, for all tasks on this machine from one script; None: as TF_CONFIG says.
      start_seconds: to wait for all tasks to come up.
      recover_seconds: to wait for a ps task that ended to be started again, by whoever watches the tasks.

    Raises:
      SystemExit: in a worker or ps task, when the job is over.
      ValueError: TF_CONFIG is missing or wrong (the message names the key), the consistency is unknown or does not fit
        the number of workers, or Keras' backend is not TensorFlow.
      RuntimeError: tasks did not come up in time, or the process has such a strategy already.
    """

    def __new__(cls, **options: Any) -> ParameterServerStrategy:
        if cls is ParameterServerStrategy and options.get("cluster") is None:
            found = from_env()
            if found is not None and found[1].job == "evaluator":
                from tfdist.strategies.ps_evaluator import EvaluatorStrategy

                return super().__new__(EvaluatorStrategy)
        return super().__new__(cls)

    def __init__(
        self,
        *,
        consistency: Consistency | str = "async",
        cluster: Any = None,
        start_seconds: float = START,
        recover_seconds: float = RECOVER,
    ) -> None:
        check_backend()
        self.consistency = parse(consistency)
        tasks = cluster.cluster if cluster is not None else _from_tf_config()
        self.consistency.check(len(tasks.workers))
        self.chief = Chief(tasks, start_seconds)
        self.recover_seconds = recover_seconds
        self.models = itertools.count()
        super().__init__("/job:chief/replica:0/task:0/device:CPU:0")

    @property
    def num_replicas_in_sync(self) -> int:
        """Into how many shares a batch of `fit` is cut: the number of workers under `Sync`, else 1."""
        return self.consistency.replicas(self.chief.workers)

    def status(self) -> list[dict[str, Any]]:
        """Each worker and ps task now: see `tfdist.ps.chief.Chief.status`."""
        return self.chief.status()

    def distribute_datasets_from_function(self, dataset_fn: Any, options: Any = None) -> Any:
        """The dataset of `dataset_fn(input_context)`: there is one pipeline, the chief's, and its batches are whole.

        `fit(dataset_fn)` does the same.

        Raises:
          ValueError: it returns something else than a `tf.data.Dataset`.
        """
        dataset = dataset_fn(tf.distribute.InputContext())
        if not isinstance(dataset, tf.data.Dataset):
            raise ValueError(f"The dataset_fn returned {type(dataset).__name__}, expected a batched tf.data.Dataset.")
        return dataset

    def distribute(self, model: Any) -> Any:
        """Makes a Keras model train on the workers; returns the same object, still of its own class.

        Args:
          model: a `keras.Model`, compiled or not, or a function without arguments that builds one (called inside
            the scope).

        Raises:
          ValueError: something else, such as a tf_keras model.
        """
        return mixing.distribute(model, self)


def _from_tf_config() -> Cluster:
    """The cluster, on the chief; other tasks serve and leave here."""
    found = from_env()
    if found is None:
        raise ValueError(
            "ParameterServerStrategy() found no TF_CONFIG, which names the tasks. Start the script with "
            "`tfdist run --ps 1 --workers 2 train.py`, or pass cluster=tfdist.LocalCluster(workers=2, ps=1)."
        )
    cluster, task = found
    need_chief(cluster)
    if not task.is_chief:
        raise SystemExit(serve_as(cluster, task))
    return cluster
