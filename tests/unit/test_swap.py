"""Changing a living object's class without saved files, `isinstance` or Keras' registry noticing."""

import keras
import pytest

from tfdist.trainers.swap import has, swap


class Loud:
    def call(self, x):
        return super().call(x) + 1


@keras.saving.register_keras_serializable("tfdist_tests")
class Own(keras.layers.Layer):
    def call(self, x):
        return x


@pytest.mark.parametrize("make", [Own, lambda: keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)])
def test_swapped_object_stays_what_it_was(make):
    plain, loud = make(), swap(make(), Loud)
    x = keras.ops.ones((1, 1))
    assert float(loud(x)[0, 0]) == float(plain(x)[0, 0]) + 1
    assert has(loud, Loud) and not has(plain, Loud)
    assert isinstance(loud, type(plain)) and loud.__class__ is type(plain)
    assert type(loud).__name__ == type(plain).__name__
    told = keras.saving.serialize_keras_object(loud)
    expected = keras.saving.serialize_keras_object(plain)
    for config in (told, expected):
        config["config"].pop("name")
    assert told == expected
    assert not has(keras.saving.deserialize_keras_object(told), Loud)


class Double:
    def call(self, x):
        return 2 * super().call(x)


def test_two_mixins_and_the_users_class():
    layer = swap(swap(Own(), Loud), Double)
    x = keras.ops.ones((1, 1))
    assert float(layer(x)[0, 0]) == 4  # the last is the outer one
    assert has(layer, Loud) and has(layer, Double)
    assert layer.__class__ is Own
    assert keras.saving.serialize_keras_object(layer)["registered_name"] == "tfdist_tests>Own"


def test_twice_is_once():
    layer = swap(Own(), Loud)
    before = type(layer)
    assert type(swap(layer, Loud)) is before
