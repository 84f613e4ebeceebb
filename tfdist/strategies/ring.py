"""Horovod's ring all-reduce as a `tf.distribute.Strategy`: one replica a process, Keras' own `fit`."""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import devices
from tfdist.cluster import World
from tfdist.comm import collective
from tfdist.comm import compression as compressions
from tfdist.comm.reducer import GradientReducer
from tfdist.data import pipelines
from tfdist.data.share import Share
from tfdist.trainers import distribute as mixing
from tfdist.trainers.gathering import Seen
from tfdist.trainers.handshake import agree_on_global_seed
from tfdist.trainers.models import check_backend
from tfdist.trainers.step import current
from tfdist.trainers.switchboard import DEFAULT_BUCKET

REDUCE_OPS = ("mean", "sum", "adasum")


class RingAllReduceStrategy(tf.distribute.Strategy):
    """Synchronous data parallel training by ring all-reduce, one process (rank) a replica.

    Every rank holds the whole model and computes the gradient of its share of each global batch; the sum over
    ranks is the gradient of the batch (ring all-reduce: Patarasuk and Yuan 2009; Horovod: Sergeev and Del Balso,
    arXiv 1802.05799). Gradients travel in buckets, the last layers' first, while the backward pass goes on (Li et
    al., arXiv 2006.15704).

    ```python
    strategy = tfdist.RingAllReduceStrategy()
    with strategy.scope():
        model = strategy.distribute(build_model())
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64 * strategy.num_replicas_in_sync)
    ```

    Args:
        bucket_mb: the most megabytes (2**20 bytes) that travel as one tensor, or "auto": chosen from the model and
            a short measurement of the link, and printed.
        compression: None, "fp16" (16 bits a number on the wire), or an object, see `tfdist.comm.compression`.
        reduce_op: "mean": the gradient of the joined batch, whatever the ranks' shares; "sum": the sum of the
            ranks' own gradients; "adasum" (Maleki et al., arXiv 2006.02924), where Horovod was built with MPI.

    Raises:
        ValueError: an argument that is not one of these, or a Keras backend other than TensorFlow.
        RuntimeError: Horovod is missing although several processes were started.
    """

    def __init__(
        self,
        *,
        bucket_mb: float | str = "auto",
        compression: Any = None,
        reduce_op: str = "mean",
    ) -> None:
        check_backend()
        if reduce_op not in REDUCE_OPS:
            raise ValueError(f"reduce_op is {reduce_op!r}; known are {', '.join(map(repr, REDUCE_OPS))}.")
        if bucket_mb != "auto" and not (isinstance(bucket_mb, (int, float)) and bucket_mb > 0):
            raise ValueError(f'bucket_mb is {bucket_mb!r}; expected a positive number of megabytes, or "auto".')
        compression = compressions.resolve(compression)
        self._claim(collective.place())
        comm = collective.get()
        super().__init__(RingExtended(self, comm, bucket_mb, compression, reduce_op))
        if comm.size > 1:
            agree_on_global_seed(comm)

    def _claim(self, world: World) -> None:
        """Takes this rank's device, before TensorFlow starts."""
        device = devices.claim(world)
        gpus = len(tf.config.list_physical_devices("GPU"))
        if gpus and device is None and world.is_chief:
            print(
                f"tfdist: training on the CPU: {gpus} GPUs for {world.local_size} ranks on {world.host} "
                f"({devices.VARIABLE}={os.environ.get(devices.VARIABLE, 'auto')})",
                flush=True,
            )

    def distribute(self, model: Any) -> Any:
        """Makes a Keras model train over all ranks; returns the same object, still of its own class.

        Args:
            model: a `keras.Model`, compiled or not, or a function without arguments that builds one (called
                inside the scope).

        Raises:
            ValueError: something else, such as a tf_keras model.
        """
        distributed = mixing.distribute(model, self)
        self.extended.distributed.add(distributed)
        return distributed

    def run(self, fn, args=(), kwargs=None, options=None):
        mixing.refuse_undistributed(fn, type(self).__name__)
        self.extended.align_weights()
        return super().run(fn, args=args, kwargs=kwargs, options=options)


class RingExtended(tf.distribute.StrategyExtended):
    """What Keras and custom loops call through the strategy.

    Attributes:
        comm: the ranks. bucket_mb, compression, reduce_op: as given. link: its measurement, once it was made.
    """

    def __init__(self, strategy: Any, comm: Any, bucket_mb: Any, compression: Any, reduce_op: str) -> None:
        super().__init__(strategy)
        self.comm = comm
        self.bucket_mb = bucket_mb
        self.compression = compression
        self.reduce_op = reduce_op
        self.link: Any = None
        self.silent = False
        self.models = itertools.count()
        self.distributed: weakref.WeakSet = weakref.WeakSet()
        self.dataset_batch: int | None = None  # of the dataset that was shared last for training
        self._feed: str | None = None
        self._seen: Seen | None = None
        self._calls = itertools.count()
        self._depth = 0
        self._late = itertools.count()
        self._graphs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._reducer: GradientReducer | None = None

    @property
    def inside_run(self) -> bool:
        """Whether the caller is inside `strategy.run`."""
        return self._depth > 0

    @contextmanager
    def feeding(self, way: str, quiet: bool) -> Iterator[Any]:
        """How datasets are handed out meanwhile: "share" (with counts), "predict" (recorded), "local" (as is)."""
        before = self._feed, self._seen, self.silent
        self._feed, self._seen, self.silent = way, Seen(), quiet
        try:
            yield self._seen
        finally:
            self._feed, self._seen, self.silent = before

    # -- data ------------------------------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset, options):
        if self.comm.size == 1 or self._feed == "local" or isinstance(dataset.element_spec, Share):
            return dataset
        if self._feed is None:
            return pipelines.plain_share(dataset, self.comm.rank, self.comm.size)
        predicting = self._feed == "predict"
        plan = pipelines.share(dataset, self.comm, label=not predicting, by_file=not predicting)
        if not self.silent and self.comm.rank == 0:
            print(f"tfdist: {plan.sentence}", flush=True)
        if not predicting:
            self.dataset_batch = self.dataset_batch or plan.batch
            return plan.dataset
        self._seen.dataset, self._seen.together = plan.dataset, plan.together
        return self._seen

    def _distribute_datasets_from_function(self, dataset_fn, options):
        context = tf.distribute.InputContext(self.comm.size, self.comm.rank, self.comm.size)
        mine = dataset_fn(context)
        choice = tf.data.Options()
        choice.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return mine.with_options(choice)

    def _experimental_distribute_values_from_function(self, value_fn):
        return value_fn(tf.distribute.experimental.ValueContext(self.comm.rank, self.comm.size))

    def align_weights(self) -> None:
        """In a custom loop, before the first `run`: gives every rank rank 0's weights of the distributed models."""
        if self.comm.size == 1 or self._feed is not None or self._depth:
            return
        for model in sorted(self.distributed, key=mixing.key_of):
            with tf.init_scope():
                if tf.executing_eagerly():
                    mixing.align_once(model)

    # -- running ---------------------------------------------------------------------------------------------

    def call_for_each_replica(self, fn, args=(), kwargs=None):
        strategy = self._container_strategy()
        if self._depth == 0:
            self._calls = itertools.count()
        self._depth += 1
        try:
            with strategy.scope(), RingReplicaContext(strategy, replica_id_in_sync_group=self.comm.rank):
                return fn(*args, **(kwargs or {}))
        finally:
            self._depth -= 1

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        flat = tf.nest.flatten(value)
        if self.comm.size == 1:
            return value
        step = current()
        name = step.name("sync") if step is not None else f"run/{next(self._calls)}"
        several = len(flat) > 1 or isinstance(flat[0], tf.IndexedSlices)
        if several and reduce_op == tf.distribute.ReduceOp.SUM:
            names = [f"value {i}" for i in range(len(flat))]
            reduced, _ = self._bucketed().reduce(flat, names, name)
        else:
            op = "sum" if reduce_op == tf.distribute.ReduceOp.SUM else "mean"
            reduced = [self.comm.all_reduce(tf.convert_to_tensor(t), f"{name}/{i}", op) for i, t in enumerate(flat)]
        return tf.nest.pack_sequence_as(value, reduced)

    def _bucketed(self) -> GradientReducer:
        if self._reducer is None:
            size = DEFAULT_BUCKET if self.bucket_mb == "auto" else int(self.bucket_mb * 2**20)
            self._reducer = GradientReducer(self.comm, size, self.compression, "sum")
        return self._reducer

    def _reduce_to(self, reduce_op, value, destinations, options):
        op = "sum" if reduce_op == tf.distribute.ReduceOp.SUM else "mean"
        return self.comm.all_reduce(tf.convert_to_tensor(value), self.name_call("reduce"), op)

    def _gather_to_implementation(self, value, destinations, axis, options):
        value = tf.convert_to_tensor(value)
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        back = [order.index(i) for i in range(value.shape.rank)]
        gathered = self.comm.all_gather(tf.transpose(value, order), self.name_call("gather"))
        return tf.transpose(gathered, back)

    def name_call(self, what: str) -> str:
        """By position: in a graph by the number of calls before, else one name, used in turn."""
        if tf.executing_eagerly():
            return f"{what}/eager"
        counts = self._graphs.setdefault(tf.compat.v1.get_default_graph(), itertools.count())
        return f"{what}/{next(counts)}"

    # -- variables -------------------------------------------------------------------------------------------

    def _create_variable(self, next_creator, **kwargs):
        if self._depth and self.comm.size > 1:
            # Built late, inside a step: too late for the comparison before the first step.
            kwargs["initial_value"] = self._of_root(kwargs["initial_value"])
        return next_creator(**kwargs)

    def _of_root(self, initial: Any) -> Any:
        """An initial value that is rank 0's on every rank; constants (an optimizer's slots) need no asking."""
        if not callable(initial):
            return initial
        with tf.init_scope():
            if not tf.executing_eagerly():
                return initial
            own = np.asarray(initial())
            if own.dtype.kind != "f" or own.size < 2 or (own == own.flat[0]).all():
                return initial
            return self.comm.broadcast(tf.constant(own), 0, f"late/{next(self._late)}").numpy()

    def _update(self, var, fn, args, kwargs, group):
        with tf.device(var.device):
            return fn(var, *args, **kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        """Every variable of the process will do, also of a model built before the scope."""

    def _local_results(self, value):
        return (value,)

    def value_container(self, value):
        return value

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return 0

    def _in_multi_worker_mode(self):
        return False

    def _use_merge_call(self):
        return False

    @property
    def _num_replicas_in_sync(self):
        # Inside a distributed model's step the weights of the losses do what Keras would do by dividing.
        return 1 if current() is not None else self.comm.size

    @property
    def worker_devices(self):
        return (_device(),)

    @property
    def parameter_devices(self):
        return (_device(),)


class RingReplicaContext(tf.distribute.ReplicaContext):
    """The replica context of a rank: a ghost adds nothing to what layers sum over ranks, and learns nothing from it.

    Here, in front of the reduction and its gradient (which is a reduction too): a ghost's sample must neither enter
    the statistics of a synchronized BatchNormalization nor get a gradient through them.
    """

    def all_reduce(self, reduce_op, value, options=None):
        step = current()
        if step is not None and step.ghost is not None:
            value = tf.nest.map_structure(lambda t: step.silenced(tf.convert_to_tensor(t)), value)
        return super().all_reduce(reduce_op, value, options)


def _device() -> str:
    return "/GPU:0" if tf.config.list_logical_devices("GPU") else "/CPU:0"


