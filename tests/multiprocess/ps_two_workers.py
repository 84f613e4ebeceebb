"""Checks with two workers, side by side; ps_checks.py runs them."""

from __future__ import annotations

import os
import signal
import tempfile
import threading

import keras
import numpy as np

import tfdist
from tests.multiprocess.ps_parts import CLUSTER, SPARSE, Sum, data, dense, refused, with_workers


@with_workers(2)
def p1_updates_are_counted_and_the_loss_stays_finite(strategy):
    """P1: asynchronous Adam, every update counted."""
    x, y = data(640)
    keras.utils.set_random_seed(4)
    model = strategy.distribute(dense())
    model.compile(keras.optimizers.Adam(0.01), SPARSE, metrics=["accuracy"])
    report = tfdist.RunReport()
    history = model.fit(x, y, batch_size=8, epochs=4, verbose=0, callbacks=[report]).history
    assert int(model.optimizer.iterations) == 4 * 80
    assert history["loss"][-1] < history["loss"][0] < 2
    late = report.result["late"]
    assert sum(late.values()) == report.result["updates"] == 4 * 80
    assert max(late) > 0  # the workers did run side by side
    tasks = {task["task"]: task for task in strategy.status()}
    assert set(tasks) == {"ps/0", "ps/1", "worker/0", "worker/1"}
    assert all(task["listens"] for task in tasks.values())
    workers = [tasks["worker/0"], tasks["worker/1"]]
    assert sum(task["steps"] for task in workers) >= 4 * 80
    assert all(task["steps_per_s"] > 0 and task["silent_s"] < 60 for task in workers)
    assert report.result["samples_per_s"] > report.result["updates_per_s"] > 0


@with_workers(2)
def every_sample_is_used_once(strategy):
    """Promise 2: the epoch's metrics are those of all samples, whoever computed them."""
    x, y = data(203)[0], np.arange(203, dtype="float32")[:, None]
    model = strategy.distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Sum(), "mae"])
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    assert history["sum"] == [203 * 202 / 2] * 2
    wanted = np.abs(model.predict(x, verbose=0) - y).mean()
    np.testing.assert_allclose(history["mae"], [wanted] * 2, rtol=1e-5)


@with_workers(2)
def batch_callbacks_and_stopping(strategy):
    """P8: callbacks at each batch see logs; stop_training in one of them ends the epoch."""
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)
            if batch == 9:
                self.model.stop_training = True

    x, y = data(640)
    model = strategy.distribute(dense())
    model.compile("sgd", SPARSE)
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[Watch()])
    assert seen == list(range(10))
    assert int(model.optimizer.iterations) == 10
    assert len(history.history["loss"]) == 1


@with_workers(2)
def p9_a_killed_worker_costs_no_update(strategy):
    """P9: the other one does its work, every sample once; a new one at its address takes part again."""

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 40:
                CLUSTER["cluster"].processes["worker/1"].kill()

    x, y = data(640)
    model = strategy.distribute(keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Sum()])
    for callbacks in ([Kill()], []):
        history = model.fit(x, y[:, None], batch_size=4, epochs=1, verbose=0, callbacks=callbacks).history
        assert history["sum"] == [y.sum()]
        if callbacks:
            CLUSTER["cluster"].restart("worker/1")
    assert int(model.optimizer.iterations) == 2 * 160


@with_workers(2)
def a_worker_killed_between_push_and_answer_counts_once(strategy):
    """Its updates are on both ps, the chief has not heard of them, and another worker makes them again: no effect."""
    cluster, repeated = CLUSTER["cluster"], 0
    x, y = data(640)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 100:
                store = self.model.__dict__["_tfdist"]._store
                before = store.updates()
                while store.updates() < before + 4:  # of calls of ten steps that have not ended
                    pass
                cluster.processes["worker/1"].kill()

    for _ in range(5):
        wide = [keras.layers.Dense(512, "relu") for _ in range(4)]
        model = strategy.distribute(keras.Sequential([keras.Input((8,)), *wide, keras.layers.Dense(3, "softmax")]))
        model.compile(keras.optimizers.SGD(0.01), SPARSE)
        report = tfdist.RunReport()
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[report, Kill()])
        cluster.restart("worker/1")
        assert int(model.optimizer.iterations) == report.result["updates"] == 160
        repeated += report.result["repeated"]
        while not all(task["listens"] for task in strategy.status()):
            pass
        if repeated:
            return
    raise AssertionError("the worker was never in the middle of a call")


@with_workers(2)
def an_interrupt_ends_fit_and_the_next_one_works(strategy):
    class Interrupt(keras.callbacks.Callback):
        def __init__(self, at):
            super().__init__()
            self.at = at

        def on_train_batch_end(self, batch, logs=None):
            if batch == self.at:
                os.kill(os.getpid(), signal.SIGINT)

    x, y = data(640)
    model = strategy.distribute(dense())
    model.compile("sgd", SPARSE)
    for at in (1, 30, 61):
        try:
            model.fit(x, y, batch_size=8, verbose=0, callbacks=[Interrupt(at)])
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no KeyboardInterrupt")
    before = int(model.optimizer.iterations)
    model.fit(x, y, batch_size=8, verbose=0)
    assert int(model.optimizer.iterations) - before == 80


@with_workers(2)
def one_fit_at_a_time(strategy):
    x, y = data()
    models = [strategy.distribute(dense()) for _ in range(2)]
    for model in models:
        model.compile("sgd", SPARSE)

    class Inner(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            models[1].fit(x, y, verbose=0)

    refused(lambda: models[0].fit(x, y, verbose=0, callbacks=[Inner()]), "another fit() of this strategy is under way")
    models[1].fit(x, y, verbose=0)


@with_workers(2)
def bytes_are_even_over_the_ps(strategy):
    x, y = data()
    hidden = [keras.layers.Dense(64) for _ in range(8)]
    model = strategy.distribute(keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(3, "softmax")]))
    model.compile("adam", SPARSE)
    model.fit(x, y, verbose=0)
    from tfdist.ps.layout import bytes_by_task

    store = model.__dict__["_tfdist"]._store
    held = bytes_by_task(store.holdings, store.rows, 2)
    assert max(held) <= 1.1 * min(held)
    for part in store.parts:
        assert all(part.device in v.value.device for v in [*part.kept, *part.optimizer.variables])


@with_workers(2)
def p9_a_ps_that_is_started_again_goes_on_from_the_last_values(strategy):
    """P9: a ps and a worker die and come back; all ps go back to one update, the chief and the other worker live on."""
    cluster = CLUSTER["cluster"]

    class Kill(keras.callbacks.Callback):
        saved = 0

        def on_train_batch_begin(self, batch, logs=None):
            if batch == 100 and not self.saved:
                self.model.save_weights(self.path)  # what the chief has, and goes back to
                self.saved = int(self.model.optimizer.iterations)
            if batch == 140 and "killed" not in self.__dict__:
                self.killed = names = ("ps/1", "worker/1")
                for name in names:
                    cluster.processes[name].kill()
                    cluster.processes[name].wait()
                threading.Timer(1.0, lambda: [cluster.restart(name) for name in names]).start()

    x, y = data(960)
    model = strategy.distribute(dense())
    model.compile(keras.optimizers.Adam(0.01), SPARSE, metrics=["accuracy"])
    kill = Kill()
    with tempfile.TemporaryDirectory() as folder:
        kill.path = f"{folder}/kept.weights.h5"
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[kill]).history
        restored = dense()
        restored.load_weights(kill.path)
    assert kill.saved == 100
    assert int(model.optimizer.iterations) < 480 - 40  # what was after the save is gone
    assert int(model.optimizer.iterations) > 100 + 240
    assert history["accuracy"][-1] > 0.7


@with_workers(2)
def a_dead_ps_is_named(strategy):
    """The last check: nothing goes on after it."""
    strategy.recover_seconds = 2.0

    class Kill(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 40:
                CLUSTER["cluster"].processes["ps/1"].kill()

    x, y = data(640)
    model = strategy.distribute(dense())
    model.compile("sgd", SPARSE)
    refused(lambda: model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[Kill()]), "ps/1 (127.0.0.1:")
