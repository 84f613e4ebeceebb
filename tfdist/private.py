"""Every private name of TensorFlow and Keras that tfdist leans on, in one place.

Nothing public does these jobs (each entry says which). `check()` looks every name up, so that a new
version that moves one fails in `tests/unit/test_private.py`, not in a user's training run. Besides the
functions here, the trainers override or read the private *methods* and *attributes* listed in `METHODS`.
What is done to a variable, and to an optimizer's lists of variables, is in `private_variables`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

# Modules and the names that the functions below import from them.
NAMES: dict[str, tuple[str, ...]] = {
    # The order in which Keras feeds arrays; its conversions of pandas, SciPy and ragged input.
    "keras.src.trainers.data_adapters.array_data_adapter": ("ArrayDataAdapter", "can_convert_arrays"),
    "keras.src.trainers.data_adapters.array_slicing": (
        "convert_to_sliceable",
        "train_validation_split",
        "TensorflowSparseWrapper",
        "slice_tensorflow_sparse_wrapper",
    ),
    # The mask that a layer leaves on its output, and how Keras' losses apply it.
    "keras.src.backend": ("get_keras_mask", "set_keras_mask"),
    # The graph of a model's operations.
    "keras.src.models.functional": ("Functional",),
    "keras.src.losses.loss": ("apply_mask", "squeeze_or_expand_to_same_rank"),
    "keras.src.trainers.compile_utils": ("CompileLoss", "CompileMetrics"),
    "keras.src.saving.serialization_lib": ("SerializableDict",),
    # A variable made inside a graph, for the task that will run it.
    "tensorflow.python.ops.resource_variable_ops": ("BaseResourceVariable",),
    # Whether a global seed was set: tf.random offers a setter only.
    "tensorflow.python.eager.context": ("global_seed", "context", "get_server_def"),
}

# class -> methods that a mixin overrides, so that they must exist and be called under this name.
METHODS: dict[str, tuple[str, ...]] = {
    "keras.Model": (
        "_maybe_symbolic_build",
        "_symbolic_build",
        "_get_metrics_result_or_logs",
        "_flatten_layers",
        "_resolve_auto_jit_compile",
    ),
    "keras.layers.Layer": ("_get_own_losses",),
    "keras.Variable": (
        "_initialize",
        "_serialize_to_tensors",
        "_restore_from_tensors",
        "_export_to_saved_model_graph",
    ),
    "keras.optimizers.Optimizer": (
        "_clip_gradients",
        "_all_reduce_sum_gradients",
        "_filter_empty_gradients",
        "_get_current_learning_rate",
        "_use_weight_decay",
        "_var_key",
        "_overwrite_model_variables_with_average_value",
        "_update_model_variables_moving_average",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_backend_reset_gradient_accumulators",
    ),
    "keras.optimizers.LossScaleOptimizer": ("check_finite", "scale_loss", "_stateful_handle_finite_grads"),
    "tensorflow.Operation": ("_add_control_inputs",),
    "tensorflow.distribute.StrategyExtended": (
        "_create_variable",
        "_experimental_distribute_dataset",
        "_distribute_datasets_from_function",
        "_experimental_distribute_values_from_function",
        "_replica_ctx_all_reduce",
        "_reduce_to",
        "_gather_to_implementation",
        "_update",
        "_local_results",
    ),
}


def _load(module: str, name: str) -> Any:
    if module == "tensorflow.distribute":  # its importable namesake is another, internal, module
        return getattr(importlib.import_module("tensorflow").distribute, name)
    return getattr(importlib.import_module(module), name)


def check() -> list[str]:
    """Names that the installed TensorFlow and Keras no longer have; empty when all is well."""
    missing = []
    for module, names in NAMES.items():
        for name in names:
            try:
                _load(module, name)
            except (ImportError, AttributeError):
                missing.append(f"{module}.{name}")
    for path, methods in METHODS.items():
        module, cls = path.rsplit(".", 1)
        try:
            owner = _load(module, cls)
        except (ImportError, AttributeError):
            missing.append(path)
            continue
        missing += [f"{path}.{m}" for m in methods if not callable(inspect.getattr_static(owner, m, None))]
    return missing


def is_arrays(x: Any, y: Any = None, sample_weight: Any = None) -> bool:
    """Whether Keras would feed these from memory (numpy, tensors, pandas, SciPy), not from a dataset."""
    can = _load("keras.src.trainers.data_adapters.array_data_adapter", "can_convert_arrays")
    return bool(can((x, y, sample_weight)))


def array_adapter(**kwargs: Any) -> Any:
    """Keras' own ArrayDataAdapter: its checks, class weights, batch arithmetic and shuffle order."""
    return _load("keras.src.trainers.data_adapters.array_data_adapter", "ArrayDataAdapter")(**kwargs)


def adapter_parts(adapter: Any) -> tuple[Any, int, int]:
    """(inputs packed as `(x, y, sample_weight)`, number of samples, batch size) of an array adapter."""
    return adapter._inputs, int(adapter._num_samples), int(adapter._batch_size)


def tensors_of(inputs: Any) -> Any:
    """Keras' conversion of arrays to what tf.data takes (float64 to floatx, pandas, SciPy, ...)."""
    return _load("keras.src.trainers.data_adapters.array_slicing", "convert_to_sliceable")(
        inputs, target_backend="tensorflow"
    )


def is_sparse_rows(value: Any) -> bool:
    """Whether `value` is Keras' row-sliceable form of a sparse tensor."""
    return isinstance(value, _load("keras.src.trainers.data_adapters.array_slicing", "TensorflowSparseWrapper"))


def sparse_rows(value: Any, indices: Any) -> Any:
    """Rows `indices` of Keras' row-sliceable form of a sparse tensor, as a `tf.SparseTensor`."""
    take = _load("keras.src.trainers.data_adapters.array_slicing", "slice_tensorflow_sparse_wrapper")
    return take(value, indices)


def validation_split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Keras' split of arrays into (training, validation)."""
    split = _load("keras.src.trainers.data_adapters.array_slicing", "train_validation_split")
    return split(arrays, validation_split=fraction)


def mask_of(value: Any) -> Any:
    """The mask that Keras left on a tensor, or None."""
    return _load("keras.src.backend", "get_keras_mask")(value)


def merged_weight(sample_weight: Any, mask: Any, dtype: Any) -> Any:
    """Sample weight and mask as Keras' losses merge them when they do not rescale the mask."""
    return _load("keras.src.losses.loss", "apply_mask")(sample_weight, mask, dtype=dtype, reduction="sum")


def compile_loss(model: Any) -> Any:
    """The CompileLoss of a compiled model, or None."""
    return getattr(model, "_compile_loss", None)


def compile_loss_class() -> type:
    """The class of a model's CompileLoss, which is itself a Loss."""
    return _load("keras.src.trainers.compile_utils", "CompileLoss")


def flat_losses(compiled: Any) -> list[Any]:
    """The Loss objects that a built CompileLoss calls, one per output."""
    return [entry.loss for entry in (compiled._flat_losses or [])]


def auto_jit(model: Any) -> bool:
    """What `compile(jit_compile="auto")` would make of it for this model."""
    return bool(model._resolve_auto_jit_compile())


def element_spec(epoch_iterator: Any) -> Any:
    """The type of the batches that Keras' epoch iterator will give."""
    return epoch_iterator._distributed_dataset.element_spec


def batches_in(epoch_iterator: Any) -> int | None:
    """Batches in the data of Keras' epoch iterator, as the data tell it; None where they do not."""
    return epoch_iterator.data_adapter.num_batches


def count_batches(epoch_iterator: Any, batches: int) -> None:
    """Has Keras' epoch iterator count batches that were taken from its present iterator beside its loop."""
    epoch_iterator._steps_seen += batches


def set_strategy(obj: Any, strategy: Any) -> None:
    """Tells a model or an optimizer which strategy it belongs to, as Keras does at construction."""
    if hasattr(obj, "_distribution_strategy"):
        obj._distribution_strategy = strategy
    else:
        obj._distribute_strategy = strategy


def get_initial_epoch(model: Any) -> int:
    """The epoch at which BackupAndRestore told the next `fit` to begin."""
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Tells the running `fit` to begin at `epoch`, as BackupAndRestore does."""
    model._initial_epoch = epoch


def global_seed() -> int | None:
    """TensorFlow's global seed, or None when the user set none."""
    return _load("tensorflow.python.eager.context", "global_seed")()


def layers_of(model: Any) -> list[Any]:
    """Every layer inside a model, nested ones too."""
    return list(model._flatten_layers())


def local_variable(name: str, value: Any, stands_for: Any = None) -> Any:
    """In a graph: a variable in the memory of whatever task runs it, filled with `value`.

    `tf.Variable` cannot be made inside a function that is to run on another task than this. An optimizer knows it as
    the Keras variable `stands_for`.
    """
    variables = importlib.import_module("tensorflow.python.ops.resource_variable_ops")
    tf = importlib.import_module("tensorflow")
    place = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=name, container="")
    filled = tf.raw_ops.AssignVariableOp(resource=place, value=value)
    # Whatever uses the handle comes after the filling, gradients of loops too, which ask for its shape on their own.
    with tf.control_dependencies([filled]):
        handle = tf.identity(place)
    return variables.BaseResourceVariable(
        trainable=True,
        shape=value.shape,
        dtype=value.dtype,
        handle=handle,
        handle_name=name,
        unique_id=f"{name}.{id(handle)}" if stands_for is None else stands_for.value._unique_id,
        in_graph_mode=True,
        name=name,
    )


def reconnect(coordinator: Any) -> None:
    """Connects a ClusterCoordinator's process to its tasks anew, after some were started again.

    Under the lock under which TensorFlow does the same for workers. What the tasks that were not restarted hold stays.

    Raises:
        tf.errors.OpError: a task did not answer.
    """
    context = importlib.import_module("tensorflow.python.eager.context")
    with coordinator._cluster.failure_handler._cluster_update_lock:
        context.context().update_server_def(context.get_server_def())


def forget_coordinator(strategy: Any) -> None:
    """Lets a ClusterCoordinator be made anew for a ParameterServerStrategy, which keeps one."""
    strategy._cluster_coordinator = None


def ran_on(value: Any) -> str:
    """The device on which a call of a ClusterCoordinator was run, from its finished RemoteValue."""
    return next(iter(value._values.values())).backing_device


@contextlib.contextmanager
def holding(pairs: Any) -> Iterator[None]:
    """Each Keras variable of (variable, stand-in) reads and writes its stand-in instead of its own value."""
    own = [(variable, variable._value) for variable, _ in pairs]
    try:
        for variable, value in pairs:
            variable._value = value
        yield
    finally:
        for variable, value in own:
            variable._value = value


def trained_by(optimizer: Any) -> list[Any]:
    """The variables that an optimizer was built on, in its order."""
    return list(optimizer._trainable_variables)


def rate_of(optimizer: Any) -> Any:
    """An optimizer's learning rate as it keeps it: a variable, a schedule, or a function of no argument."""
    return optimizer._learning_rate


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer's weight decay counts for a variable."""
    return bool(optimizer._use_weight_decay(variable))


def functional_of(model: Any) -> Any:
    """The functional model inside a Sequential, or a functional model itself; None where a `call` says what happens."""
    inner = getattr(model, "_functional", model)  # of a Sequential, None before it is built
    cls = _load("keras.src.models.functional", "Functional")
    return inner if isinstance(inner, cls) and type(inner).call is cls.call else None


def nodes_of(functional: Any) -> list[Any]:
    """The calls of operations in a functional model, each after those it takes from; its inputs are none."""
    by_depth = functional._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def standard_inputs(functional: Any, inputs: Any) -> list[Any]:
    """What was passed to a functional model as a list in the order of its inputs, of their types and ranks."""
    return list(functional._standardize_inputs(inputs))


def output_structure(functional: Any) -> Any:
    """The structure of symbolic tensors that a functional model was made with; one alone stands alone."""
    outputs = functional._outputs_struct
    return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


def call_node(node: Any, tensors: dict[int, Any], training: bool) -> list[Any]:
    """Runs the operation of a node on tensors by id of their symbols, as `Functional.call` does; its outputs."""
    args, kwargs = node.arguments.fill_in(tensors)
    if "training" in getattr(node.operation, "_call_context_args", ()):
        kwargs["training"] = training
    return list(importlib.import_module("keras").tree.flatten(node.operation(*args, **kwargs)))


def added_losses(layer: Any) -> list[Any]:
    """Losses that a layer and those inside it have added in their last call; those of weights are none of them."""
    return [loss for inner in layer._flatten_layers() for loss in inner._get_own_losses()]


def set_mask(tensor: Any, mask: Any) -> None:
    """Leaves a mask on a tensor, as a layer does."""
    _load("keras.src.backend", "set_keras_mask")(tensor, mask)


def track_loss(model: Any, loss: Any, samples: Any) -> None:
    """Counts a batch's loss into what the logs call "loss"."""
    model._loss_tracker.update_state(loss, sample_weight=samples)


def wait_for(operation: Any, others: Any) -> None:
    """Makes an operation of a graph run after others. `tf.control_dependencies` is for operations yet to be made."""
    operation._add_control_inputs(others)
