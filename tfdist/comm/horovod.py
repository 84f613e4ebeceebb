"""The group of processes that Horovod's launcher started. The only file that imports Horovod.

Horovod pairs tensors of the ranks by the name of the graph node. So every node here gets the given name, and
`ignore_name_scope` drops what enclosing functions put before it. Outside a `tf.function` TensorFlow would drop the
name instead, and pair whatever two ranks call at the same time; so there each collective runs as a small graph.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist.comm import watch, wire
from tfdist.comm.collective import check_op

if TYPE_CHECKING:
    from tfdist.cluster import World

# Set before Horovod starts, where the user has not set them.
DEFAULTS = {
    "HOROVOD_FUSION_THRESHOLD": "0",  # tfdist packs; packing twice copies twice
    # With tfdist's build Horovod starts when a tensor comes; ms between its looks for other ranks' while none does.
    "HOROVOD_IDLE_CYCLE_TIME": "50",
    "HOROVOD_CYCLE_TIME": "0.3",  # ms between looks in any other build; each costs some 70 us of CPU time
    # tfdist.comm.watch names missing ranks long before; these end a user's own tf.function, which it cannot see.
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "120",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "900",
}

# What TensorFlow's error says when Horovod broke a collective off.
_LOST = (
    "Horovod has been shut down",
    "Horovod has not been initialized",
    "Horovod background loop",
)


# Of a user's tf.function AutoGraph must leave these alone: there is nothing to convert, and much to get wrong.
_as_written = tf.autograph.experimental.do_not_convert


def connect(world: World) -> HorovodCollective:
    """Joins the other ranks; returns when all are there.

    Raises:
      RuntimeError: Horovod is not built for this TensorFlow, or the ranks cannot reach each other.
    """
    if "HOROVOD_CYCLE_TIME" in os.environ:
        os.environ.setdefault("HOROVOD_IDLE_CYCLE_TIME", "0")  # whoever sets a cycle means it
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
    where = f"rank {world.rank} of {world.size} on {world.host}"
    try:
        from horovod.tensorflow import mpi_ops
    except Exception as error:
        raise RuntimeError(
            f"{where}: Horovod does not load with TensorFlow {tf.__version__} ({error}). Build it with "
            "`tfdist build-horovod`; `tfdist doctor` shows what is there"
        ) from error
    try:
        mpi_ops.init()
    except Exception as error:
        raise RuntimeError(
            f"{where}: Horovod could not connect the ranks ({error}). Start the script with `tfdist run -np "
            f"{world.size}` or `horovodrun -np {world.size}`; `tfdist doctor` shows which controllers are built, "
            "and on several hosts each must reach the others (--network-interfaces)"
        ) from error
    if mpi_ops.size() != world.size:
        raise RuntimeError(
            f"{where}: Horovod counts {mpi_ops.size()} ranks, the environment says {world.size}. Its launcher and "
            "its controller do not match: start with `horovodrun --gloo` (or `--mpi`), see `tfdist doctor`"
        )
    return HorovodCollective(mpi_ops)


class HorovodCollective:
    """`tfdist.comm.collective.Collective` by Horovod's operations.

    All take and give memory of the host but for one: where Horovod is built with NCCL and every rank has taken one
    GPU, sums of floating point stay on the GPUs. (A rank with several, of a split model, has no one place for them.)
    """

    def __init__(self, mpi_ops: Any) -> None:
        self._hvd, self._lib = mpi_ops, mpi_ops.MPI_LIB
        self.rank, self.size = mpi_ops.rank(), mpi_ops.size()
        self.local_rank, self.local_size = mpi_ops.local_rank(), mpi_ops.local_size()
        self._reductions = {
            "sum": mpi_ops.Sum, "min": mpi_ops.Min, "max": mpi_ops.Max,
            "product": mpi_ops.Product, "adasum": mpi_ops.Adasum,
        }  # fmt: skip
        self._closing, self._closed = threading.Lock(), False
        # Two threads in Horovod's shutdown at once never return: ours is the only way there.
        atexit.unregister(mpi_ops.shutdown)
        atexit.register(self._leave)
        with tf.init_scope(), tf.device("/CPU:0"):
            self._zero = tf.Variable(0, trainable=False, name="tfdist_zero")
        self._graphs: dict[tuple[Any, ...], Any] = {}
        self._nccl = False
        self.hosts = ("?",) * self.size
        mine = tf.io.decode_raw(socket.gethostname() + "\n", tf.uint8)
        joined = bytes(self.all_gather(mine, "hosts").numpy()).decode()
        self.hosts = tuple(joined.splitlines())
        # Horovod refuses a sum that is on the GPU of one rank and on the CPU of another.
        mine = bool(mpi_ops.nccl_built()) and len(tf.config.list_logical_devices("GPU")) == 1
        self._nccl = bool(self.all_reduce(tf.constant(int(mine)), "nccl", "min").numpy())

    @_as_written
    def all_reduce(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        check_op(op)
        if op == "adasum":
            self.check_adasum()

        def refused(upstream: tf.Tensor) -> tf.Tensor:
            raise ValueError(f"all_reduce {name!r} with {op!r} has no gradient; 'sum' and 'mean' have")

        if tf.executing_eagerly():
            if op in ("sum", "mean"):
                return self._named("all_reduce", tensor, name, op)
            # Under a tape a graph builds its gradient at once; this one is not to be built before it is asked for.
            hidden = tf.custom_gradient(lambda x: (self._named("all_reduce", tf.stop_gradient(x), name, op), refused))
            return hidden(tensor)

        @tf.custom_gradient
        def reduced(x: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                if op not in ("sum", "mean"):
                    return refused(upstream)
                return self.all_reduce(upstream, f"{name}.gradient", op)

            sent, back = wire.for_reduction(x, op, name)
            result = back(self._reduce(sent, name, "sum" if op == "mean" else op))
            return (result / self.size if op == "mean" else result), gradient

        return reduced(tf.convert_to_tensor(tensor))

    @_as_written
    def all_gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        if tf.executing_eagerly():
            return self._named("all_gather", tensor, name)

        @tf.custom_gradient
        def gathered(x: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                total = self.all_reduce(upstream, f"{name}.gradient")
                rows = self.all_gather(tf.shape(x)[:1], f"{name}.rows")
                start = tf.reduce_sum(rows[: self.rank])
                return total[start : start + rows[self.rank]]

            sent, back = wire.for_move(x, name)
            with tf.device("/CPU:0"):
                result = self._lib.horovod_allgather(self._opaque(sent), name=_node(name), ignore_name_scope=True)
            return back(result), gradient

        tensor = tf.convert_to_tensor(tensor)
        if tensor.shape.rank == 0:
            raise ValueError(f"all_gather {name!r}: got a scalar; it needs at least one axis to join along")
        return gathered(tensor)

    @_as_written
    def broadcast(self, tensor: tf.Tensor, root: int, name: str) -> tf.Tensor:
        if not 0 <= root < self.size:
            raise ValueError(f"broadcast {name!r}: root is {root}; ranks are 0 to {self.size - 1}")
        if tf.executing_eagerly():
            return self._named("broadcast", tensor, root, name)

        @tf.custom_gradient
        def sent_to_all(x: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                total = self.all_reduce(upstream, f"{name}.gradient")
                # Plain zeros would let the graph optimizer drop the reduction, on these ranks only.
                return tf.where(self._opaque(tf.constant(self.rank == root)), total, tf.zeros_like(total))

            sent, back = wire.for_move(x, name)
            with tf.device("/CPU:0"):
                result = self._lib.horovod_broadcast(
                    self._opaque(sent), name=_node(name), root_rank=root, ignore_name_scope=True
                )
            return back(result), gradient

        return sent_to_all(tf.convert_to_tensor(tensor))

    @_as_written
    def reduce_scatter(self, tensor: tf.Tensor, name: str, op: str = "sum") -> tf.Tensor:
        check_op(op)
        if tf.executing_eagerly():
            return self._named("reduce_scatter", tensor, name, op)
        tensor = tf.convert_to_tensor(tensor)
        if tensor.shape.rank == 0:
            raise ValueError(f"reduce_scatter {name!r}: got a scalar; it needs at least one axis to split")
        if op not in ("sum", "mean"):  # Horovod scatters sums only
            whole = self.all_reduce(tensor, name, op)
            start, stop = _part(tf.shape(whole)[0], self.rank, self.size)
            return whole[start:stop]

        @tf.custom_gradient
        def scattered(x: tf.Tensor) -> Any:
            def gradient(upstream: tf.Tensor) -> tf.Tensor:
                whole = self.all_gather(upstream, f"{name}.gradient")
                return whole / self.size if op == "mean" else whole

            sent, back = wire.for_reduction(x, op, name)
            with tf.device("/CPU:0"):
                result = self._lib.horovod_reducescatter(
                    self._opaque(sent), name=_node(name), reduce_op=self._hvd.Sum,
                    prescale_factor=1.0, postscale_factor=1.0, ignore_name_scope=True,
                )  # fmt: skip
            result = back(result)
            return (result / self.size if op == "mean" else result), gradient

        return scattered(tensor)

    def abort(self) -> None:
        with self._closing:
            self._close()

    def lost(self, error: BaseException) -> bool:
        """Whether `error` says that a collective broke off because a rank left or aborted."""
        return isinstance(error, tf.errors.OpError) and any(t in str(error) for t in _LOST)

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._hvd.shutdown()

    def _leave(self) -> None:
        # At exit. Another thread may be stuck in shutdown because a peer is; do not wait for it.
        if not self._closing.acquire(timeout=10.0):
            os._exit(1)
        try:
            self._close()
        finally:
            self._closing.release()

    def check_adasum(self) -> None:
        """Raises RuntimeError where Horovod has no Adasum for CPU tensors, saying what it needs."""
        have = []
        if not self._hvd.mpi_built():
            have.append("Horovod was built without MPI (install MPI, then `tfdist build-horovod`)")
        elif not self._hvd.mpi_enabled():
            have.append("the ranks are connected by Gloo (start with `--mpi`)")
        if self.size & (self.size - 1):
            have.append(f"there are {self.size} ranks")
        if have:
            raise RuntimeError(
                f"rank {self.rank} on {self.hosts[self.rank]}: Adasum needs MPI and 2, 4, 8, ... ranks, but "
                + " and ".join(have)
                + "; or use reduce_op='mean'"
            )

    def _named(self, kind: str, tensor: tf.Tensor, *args: Any) -> tf.Tensor:
        """Runs a collective as a graph of its own, kept for the next call of the same name."""
        tensor = tf.convert_to_tensor(tensor)
        key = (kind, args, tensor.dtype, tensor.shape.rank)
        if key not in self._graphs:
            spec = tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype)
            method = getattr(self, kind)
            graph = tf.function(lambda t: method(t, *args), input_signature=[spec], autograph=False)
            self._graphs[key] = graph.get_concrete_function()
        name = next(a for a in args if isinstance(a, str))
        device = self._device(args[-1], tensor.dtype) if kind == "all_reduce" else "/CPU:0"
        with watch.waiting(f"{kind} {name!r}"), tf.device(device):
            return self._graphs[key](tensor)

    def _device(self, op: str, dtype: tf.DType) -> str:
        """Where a reduction is done."""
        return "/GPU:0" if self._nccl and op in ("sum", "mean") and dtype.is_floating else "/CPU:0"

    def _reduce(self, tensor: tf.Tensor, name: str, op: str) -> tf.Tensor:
        with tf.device(self._device(op, tensor.dtype)):
            return self._lib.horovod_allreduce(
                self._opaque(tensor), name=_node(name), reduce_op=self._reductions[op],
                prescale_factor=1.0, postscale_factor=1.0, ignore_name_scope=True,
            )  # fmt: skip

    def _opaque(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor, not copied, in a form that the graph optimizer cannot compute.

        Horovod's operations do not say that they have side effects, so TensorFlow would run a collective of
        constants while it optimizes a graph, and put the result in its place: on a rank that traces again, alone.
        """
        if tensor.shape.rank == 0:
            return tf.reshape(self._opaque(tf.reshape(tensor, [1])), [])
        opaque = tensor[self._zero :]
        opaque.set_shape(tensor.shape)
        return opaque


def _node(name: str) -> str:
    """A legal node name without a scope: Horovod keeps what follows the last '/'."""
    return "tfdist." + re.sub(r"[^A-Za-z0-9_.\-]", "_", name)


def _part(rows: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Rows [start, stop) of `rank` when `rows` are split as Horovod's reduce-scatter splits them."""
    share, longer = rows // size, rows % size
    start = share * rank + tf.minimum(rank, longer)
    return start, start + share + tf.cast(rank < longer, start.dtype)
