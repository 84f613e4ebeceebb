"""The peer: tf_keras' `fit` under `tf.distribute.ParameterServerStrategy`, as TensorFlow's guide writes it."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
import tf_keras

from benchmarks import models
from benchmarks.pace import Mark, Sampled
from benchmarks.peers.ps_fit import Arrays, PsFit, pin_workers
from tfdist.launch.ports import cluster_on_free_ports
from tfdist.launch.processes import die_with_parent
from tfdist.ps.chief import START, await_tasks

SERVE = """
import os
import tensorflow as tf
at = tf.distribute.cluster_resolver.TFConfigClusterResolver()
workers = at.cluster_spec().num_tasks("worker")
config = tf.compat.v1.ConfigProto()
if at.task_type == "worker" and os.cpu_count() < workers + 1:
    config.inter_op_parallelism_threads = workers + 1
tf.distribute.Server(
    at.cluster_spec(), job_name=at.task_type, task_index=at.task_id, config=config, protocol="grpc"
).join()
"""


class PsTfKeras(PsFit):
    keras = tf_keras

    def start(self, workers: int) -> Mapping[str, subprocess.Popen[bytes]]:
        cluster = cluster_on_free_ports(1, workers)
        os.environ["GRPC_FAIL_FAST"] = "use_caller"
        tasks = {}
        for task in cluster.tasks():
            if not task.is_chief:
                tasks[task.name] = subprocess.Popen(
                    [sys.executable, "-c", SERVE],
                    env={**os.environ, "TF_CONFIG": cluster.tf_config(task)},
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=die_with_parent,
                )  # fmt: skip
                atexit.register(tasks[task.name].kill)
        await_tasks(cluster, START)
        pin_workers(tasks)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster.spec()), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        self.strategy = tf.distribute.ParameterServerStrategy(resolver)
        return tasks

    def build(self) -> Any:
        with self.strategy.scope():
            return super().build()

    def fit(self, arrays: Arrays, updates: int) -> list[Mark]:
        data = tf.data.Dataset.from_tensor_slices(arrays).shuffle(len(arrays[0])).repeat().batch(models.BATCH)
        counter = self.model.optimizer.iterations
        before = int(counter.numpy())
        # Its callbacks see batches that are scheduled, far ahead of the workers; the counter is on the ps.
        with Sampled(lambda: int(counter.numpy()) - before) as done:
            self.model.fit(data, steps_per_epoch=updates, verbose=0)
        return done.marks


def open() -> Any:
    return PsTfKeras()
