"""What `strategy.distribute` accepts, in one process; and that one process trains as plain Keras does."""

import sys
import types

import keras
import numpy as np
import pytest

import tfdist
from tfdist.trainers import distribute, logs, ring, weights
from tfdist.trainers.switchboard import unnumbered


@pytest.fixture(scope="module")
def strategy():
    return tfdist.RingAllReduceStrategy()


def dense():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])


def test_other_keras_backends_are_refused(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="'jax' backend.*KERAS_BACKEND=tensorflow"):
        tfdist.RingAllReduceStrategy()


def test_tf_keras_models_are_refused(strategy, monkeypatch):
    module = types.ModuleType("tf_keras")
    exec("class Sequential: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "tf_keras", module)

    class Mine(module.Sequential):
        pass

    for model in (module.Sequential(), Mine()):
        with pytest.raises(ValueError, match=r"of tf_keras \(Keras 2\).*import keras"):
            strategy.distribute(model)


@pytest.mark.parametrize("wrong", [3, None, [1], "model"])
def test_what_is_no_model_is_refused(strategy, wrong):
    with pytest.raises(ValueError, match="expected a keras.Model or a function that builds one"):
        strategy.distribute(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduce_op": "max"}, "reduce_op is 'max'; known are 'mean', 'sum', 'adasum'"),
        ({"bucket_mb": 0}, "bucket_mb is 0; expected a positive number"),
        ({"bucket_mb": "large"}, "bucket_mb is 'large'"),
        ({"compression": "int3"}, "int3"),
    ],
)
def test_arguments_of_the_strategy(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdist.RingAllReduceStrategy(**arguments)


def test_one_process_is_plain_keras(strategy):
    """Weights, history, evaluate and predict to the last bit."""
    x, y = np.random.default_rng(0).normal(size=(20, 3)), np.ones((20, 2))
    ends = []
    for distributed in (False, True):
        keras.utils.set_random_seed(3)
        model = strategy.distribute(dense()) if distributed else dense()
        model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=8, epochs=2, validation_split=0.2, verbose=0).history
        told = [*history.values(), model.evaluate(x, y, verbose=0)]
        ends.append([*model.get_weights(), *map(np.array, told), model.predict(x, verbose=0)])
    for plain, ours in zip(*ends, strict=True):
        np.testing.assert_array_equal(ours, plain)


def test_undistributed_step_is_recognised(strategy):
    model = dense()
    with pytest.raises(ValueError, match=r"`model = strategy.distribute\(model\)`"):
        distribute.refuse_undistributed(model.train_step, "RingAllReduceStrategy")
    distribute.refuse_undistributed(strategy.distribute(model).train_step, "")
    distribute.refuse_undistributed(lambda: model, "")  # a user's own function


def test_optimizers_anywhere_in_a_model_are_found():
    model = dense()
    model.compile(keras.optimizers.SGD())
    model.pair = {"b": [keras.optimizers.Adam()], "a": keras.optimizers.RMSprop()}
    model.other = model.pair["a"]
    found = {name: type(o).__name__ for name, o in weights.optimizers_of(model)}
    assert found == {"optimizer": "SGD", "other": "RMSprop", "pair.b.0": "Adam"}


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("dense_12/kernel", "dense/kernel"),
        ("sequential_3/multi_head_attention_1/query/kernel", "sequential/multi_head_attention/query/kernel"),
        ("block1_conv2/bias", "block1_conv2/bias"),
        ("adam/dense_1_kernel_momentum", "adam/dense_kernel_momentum"),
    ],
)
def test_automatic_numbers_are_left_out_of_names(path, plain):
    assert unnumbered(path) == plain


@pytest.mark.parametrize(
    "text",
    [
        "Graph execution error:\n\nassertion failed: [b\"tfdist: the model \\'own\\' is odd.\"]\n\t [[{{node A}}]]",
        "assertion failed: ['tfdist: the model \\'own\\' is odd.']\n\t [[{{node Assert}}]] [Op:__inference_1]",
        "tfdist: the model 'own' is odd.",
    ],
)
def test_messages_of_failed_assertions_read_well(text):
    assert ring.told_by_graph(text) == "the model 'own' is odd."


def test_logs_keep_their_structure():
    class Board:
        model_name, key = "m", "m"

        class comm:  # noqa: N801
            size = 2

            @staticmethod
            def all_reduce(tensor, name, op):
                return tensor * 2

    told = {"loss": 5.0, "own": 3.0, "array": np.ones(2), "text": "a", "group": {"accuracy": 0.0}}
    agreed = logs.agree(told, {"loss": 7.0, "accuracy": 0.5}, Board)
    assert agreed["loss"] == 7.0 and agreed["own"] == 3.0 and agreed["text"] == "a"
    assert agreed["group"] == {"accuracy": 0.5} and (agreed["array"] == 1).all()
    assert logs.agree(3.0, {}, Board) == 3.0
