"""Where a sum is put when Horovod has NCCL: read from the traced graph, which needs no GPU."""

import pytest
import tensorflow as tf

from tfdist.comm.horovod import HorovodCollective


class Library:
    """Horovod's operations for one rank, as graph nodes of their names."""

    @staticmethod
    def horovod_allgather(tensor, name, **_options):
        return tf.identity(tensor, name=name)

    @staticmethod
    def horovod_allreduce(tensor, name, **_options):
        return tf.identity(tensor, name=name)


class Horovod:
    """What `HorovodCollective` takes of horovod.tensorflow.mpi_ops."""

    Sum, Min, Max, Product, Adasum = range(5)
    MPI_LIB = Library

    def __init__(self, nccl):
        self._nccl = nccl

    def rank(self):
        return 0

    def size(self):
        return 1

    local_rank, local_size = rank, size

    def nccl_built(self):
        return self._nccl

    def shutdown(self):
        pass


def collective(monkeypatch, nccl=22707, gpus=1):
    real = tf.config.list_logical_devices
    fake = [tf.config.LogicalDevice(f"/device:GPU:{i}", "GPU") for i in range(gpus)]
    monkeypatch.setattr(
        tf.config, "list_logical_devices", lambda kind=None: fake if kind == "GPU" else real(kind)
    )
    return HorovodCollective(Horovod(nccl))


def place(group, op="sum", dtype=tf.float32):
    """The device that the traced reduction asks for."""
    graph = tf.function(lambda x: group.all_reduce(x, "grads", op)).get_concrete_function(
        tf.TensorSpec([8], dtype)
    )
    nodes = [node for node in graph.graph.as_graph_def().node if node.name.endswith("tfdist.grads")]
    if not nodes:  # custom_gradient may put them into a function of its own
        library = graph.graph.as_graph_def().library.function
        nodes = [node for f in library for node in f.node_def if node.name.endswith("tfdist.grads")]
    (node,) = nodes
    return tf.DeviceSpec.from_string(node.device).device_type


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.float64, tf.bfloat16])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_sums_stay_on_the_gpu(monkeypatch, op, dtype):
    assert place(collective(monkeypatch), op, dtype) == "GPU"


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("max", tf.float32), ("min", tf.float32), ("product", tf.float32), ("sum", tf.int32), ("sum", tf.int64)],
)
def test_the_rest_goes_through_the_host(monkeypatch, op, dtype):
    assert place(collective(monkeypatch), op, dtype) == "CPU"


@pytest.mark.parametrize("have", [{"nccl": 0}, {"gpus": 0}, {"gpus": 2}], ids=str)
def test_without_nccl_or_one_gpu_all_goes_through_the_host(monkeypatch, have):
    assert place(collective(monkeypatch, **have)) == "CPU"


def test_one_rank_without_a_gpu_takes_all_off_theirs(monkeypatch):
    def from_a_rank_without(tensor, name, **_options):
        return tf.zeros_like(tensor, name=name) if name == "tfdist.nccl" else tf.identity(tensor, name=name)

    monkeypatch.setattr(Library, "horovod_allreduce", staticmethod(from_a_rank_without))
    assert place(collective(monkeypatch)) == "CPU"
