"""What the first task says of errors that come from other tasks."""

from __future__ import annotations

import socket

import pytest
import tensorflow as tf

from tfdist.tasks.first import First
from tfdist.tasks.waiting import servers
from tfdist.tf_config import Cluster


@pytest.fixture
def first():
    """Of a cluster whose other task listens; not connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = object.__new__(First)
        made.cluster = Cluster(None, ("127.0.0.1:1", f"127.0.0.1:{listener.getsockname()[1]}"))
        made._others = servers(made.cluster)
        yield made


def test_a_task_that_was_started_again_is_named_by_what_the_error_says(first):
    said = "Additional GRPC error information from remote target /job:worker/replica:0/task:1/device:CPU:0"
    with pytest.raises(RuntimeError, match=r"^worker/1 \(127.0.0.1:\d+\) ended during fit"), first.watching("fit"):
        raise tf.errors.AbortedError(None, None, said)


def test_a_task_that_is_gone_is_named_whatever_the_error_says(first):
    first.cluster = Cluster(None, ("127.0.0.1:1", "127.0.0.1:2"))
    with pytest.raises(RuntimeError, match=r"^worker/1 \(127.0.0.1:2\) ended during fit"), first.watching("fit"):
        raise tf.errors.InternalError(None, None, "something broke")


def test_errors_of_the_program_stay_what_they_are(first):
    shapes = tf.errors.InvalidArgumentError(None, None, "shapes differ on /job:worker/replica:0/task:1")
    for error in (shapes, OSError("the disk is full")):
        with pytest.raises(type(error)) as raised, first.watching("fit"):
            raise error
        assert raised.value is error


def test_what_was_made_too_early_is_said(first):
    said = "/job:localhost/replica:0/task:0/device:CPU:0 unknown device."
    words = "fit met what was made before .* Make the strategy first"
    with pytest.raises(RuntimeError, match=words), first.watching("fit"):
        raise tf.errors.InvalidArgumentError(None, None, said)
