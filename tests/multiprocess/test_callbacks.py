"""Keras' callbacks, unchanged, on all ranks: they decide alike, and files are written once."""

from __future__ import annotations

import importlib.util
import sys
import types

import keras
import numpy as np
import tensorflow as tf

from tests.helpers.checks import Checks
from tests.multiprocess.parity_cases import cross_entropy, data, dense

CHECKS = Checks(__name__)
K = keras.callbacks


def compiled(ring, optimizer=None, **kwargs):
    with ring.strategy.scope():
        model = ring.strategy.distribute(dense())
        model.compile(optimizer or keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"], **kwargs)
    return model


def fit(model, rows=64, **kwargs):
    x, y = data(rows)
    return model.fit(x, y, **{"batch_size": 16, "verbose": 0, **kwargs})


def same_everywhere(ring, value):
    everybody = ring.everywhere(value)
    assert all(v == everybody[0] for v in everybody), everybody
    return value


@CHECKS
def r3_early_stopping_on_one_rank(ring):
    """R3: EarlyStopping that only rank 1 has, or that fires on one rank only: all stop at the same epoch."""
    model = compiled(ring, keras.optimizers.SGD(0.0))
    stop = K.EarlyStopping(monitor="loss", patience=1)
    history = fit(model, epochs=6, callbacks=[stop] if ring.rank == 1 else [])
    assert same_everywhere(ring, len(history.epoch)) == 2
    # And the ordinary use, with a validation split and the best weights back.
    model = compiled(ring, keras.optimizers.SGD(0.0))
    stop = K.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True)
    history = fit(model, epochs=6, validation_split=0.25, callbacks=[stop])
    assert same_everywhere(ring, len(history.epoch)) == 3


def tensorboard(ring, **kwargs):
    """The callback; where the tensorboard package, which TensorFlow needs for it, is missing, with a stand-in."""
    if "tensorboard" not in sys.modules and importlib.util.find_spec("tensorboard") is None:
        for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.v2"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["tensorboard.summary.v2"].scalar = lambda name, data, step=None, description=None: tf.summary.write(
            name, data, step
        )
    return K.TensorBoard(str(ring.path / "board"), profile_batch=0, **kwargs)


class StopAt(K.Callback):
    """Sets `stop_training` in a batch callback; counts the steps that were taken."""

    def __init__(self, step):
        super().__init__()
        self.step, self.steps = step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == self.step:
            self.model.stop_training = True


@CHECKS
def stop_training_in_a_batch(ring):
    """`stop_training` set at a batch on one rank only: all stop together, with the step after or the epoch's end."""
    for steps, taken in (((3, None), 4), ((None, 5), 6), ((None, 8), 8)):
        model = compiled(ring)
        counter = StopAt(steps[ring.rank])
        history = fit(model, rows=128, epochs=3, callbacks=[counter])
        assert same_everywhere(ring, counter.steps) == taken, (steps, counter.steps)
        assert same_everywhere(ring, int(model.optimizer.iterations.numpy())) == taken
        assert same_everywhere(ring, len(history.epoch)) == 1
    assert len(fit(model, rows=128, epochs=2).epoch) == 2  # the next fit starts afresh


@CHECKS
def r4_reduce_on_plateau(ring):
    """R4: the same learning rate on every rank, that of one process; validation sizes differ."""
    x, y = data(100)
    rates = []
    for strategy in (None, ring.strategy):
        keras.utils.set_random_seed(3)
        model = strategy.distribute(dense()) if strategy else dense()
        model.compile(keras.optimizers.SGD(0.5), cross_entropy())
        plateau = K.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_delta=0.2)
        history = model.fit(
            x, y, batch_size=20, epochs=6, validation_data=(x[:10], y[:10]), callbacks=[plateau], verbose=0
        )
        rates.append(np.array(history.history["learning_rate"]).tolist())
    assert rates[0] == same_everywhere(ring, rates[1])
    assert len(set(rates[0])) > 1


@CHECKS
def r5_global_logs_for_every_callback(ring):
    """R5: a user's callback sees the same numbers on every rank, at the end of each epoch and of validation."""
    seen = []

    class Look(K.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append({k: float(v) for k, v in logs.items()})

        def on_test_end(self, logs=None):
            seen.append({k: float(v) for k, v in logs.items()})

    fit(compiled(ring), rows=103, epochs=2, validation_split=0.2, callbacks=[Look()])
    same_everywhere(ring, seen)
    assert len(seen) == 4 and {"loss", "accuracy", "val_loss", "val_accuracy"} == set(seen[1])


@CHECKS
def r7_r8_writers_on_all_ranks(ring):
    """R7, R8: ModelCheckpoint, TensorBoard, CSVLogger and BackupAndRestore with one path on all ranks: one writer."""
    model = compiled(ring)
    writers = [
        K.ModelCheckpoint(str(ring.path / "best.keras"), monitor="val_loss", save_best_only=True),
        K.ModelCheckpoint(str(ring.path / "{epoch}.weights.h5"), save_weights_only=True),
        tensorboard(ring, update_freq=10),
        K.CSVLogger(str(ring.path / "log.csv")),
        K.BackupAndRestore(str(ring.path / "backup")),
    ]
    history = fit(model, rows=256, epochs=2, validation_split=0.25, callbacks=writers)
    assert ring.everywhere(len(history.epoch)) == [2, 2]
    files = sorted(p.name for p in ring.path.rglob("*") if p.is_file())
    assert [f for f in files if f.startswith(".tfdist")] == []
    assert "1.weights.h5" in files and "2.weights.h5" in files
    assert len((ring.path / "log.csv").read_text().splitlines()) == 3
    events = [f for f in files if f.startswith("events")]
    assert len(events) == 2, events  # training and validation, of one rank
    best = keras.models.load_model(ring.path / "best.keras")
    x, y = data(256)
    scores = best.evaluate(x[192:], y[192:], verbose=0, return_dict=True)
    assert abs(scores["loss"] - min(history.history["val_loss"])) < 1e-5


@CHECKS
def r7_tensorboard_on_rank_0_only(ring):
    """R7: a list of callbacks that differs between ranks."""
    board = [tensorboard(ring, update_freq=2)] if ring.rank == 0 else []
    history = fit(compiled(ring), epochs=2, callbacks=board)
    assert same_everywhere(ring, len(history.epoch)) == 2


@CHECKS
def r8_checkpoints_within_an_epoch(ring):
    """R8: `save_freq` in batches; rank 0 writes while the others train on."""
    saver = K.ModelCheckpoint(str(ring.path / "at-{batch}.keras"), save_freq=2)
    fit(compiled(ring), callbacks=[saver])
    ring.everywhere(None)
    found = sorted(ring.path.glob("*.keras"))
    assert len(found) == 2
    assert keras.models.load_model(found[0]).count_params() == dense().count_params()


class Interrupt(K.Callback):
    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise KeyboardInterrupt


@CHECKS
def r23_backup_and_restore(ring):
    """R23: interrupted at epoch 4, started again: epoch, iterations and moments go on; only rank 0 sees the files."""
    x, y = data(64)
    straight = compiled(ring)
    start = straight.get_weights()
    straight.fit(x, y, batch_size=16, epochs=6, shuffle=False, verbose=0)

    mine = ring.path / f"seen-by-rank-{ring.rank}"
    first = compiled(ring)
    first.set_weights(start)
    try:
        callbacks = [K.BackupAndRestore(str(mine)), Interrupt(4)]
        first.fit(x, y, batch_size=16, epochs=6, shuffle=False, verbose=0, callbacks=callbacks)
    except KeyboardInterrupt:
        pass
    assert mine.exists() == (ring.rank == 0)
    ring.everywhere(None)

    second = compiled(ring)  # as a new process: other weights, no optimizer state
    history = second.fit(
        x, y, batch_size=16, epochs=6, shuffle=False, verbose=0, callbacks=[K.BackupAndRestore(str(mine))]
    )
    assert same_everywhere(ring, history.epoch) == [4, 5]
    assert same_everywhere(ring, int(second.optimizer.iterations.numpy())) == 24
    state = [*second.variables, *second.optimizer.variables]
    wanted = [*straight.variables, *straight.optimizer.variables]
    for one, other in zip(state, wanted, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)


@CHECKS
def r17_schedules_and_resume(ring):
    """R17: LearningRateSchedule objects, LearningRateScheduler; a second fit goes on in the middle of the schedule."""
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 8, warmup_target=0.3, warmup_steps=6)
    results = []
    for strategy in (None, ring.strategy):
        keras.utils.set_random_seed(3)
        model = strategy.distribute(dense()) if strategy else dense()
        model.compile(keras.optimizers.SGD(schedule), cross_entropy())
        fit(model, rows=48, shuffle=False)
        fit(model, rows=48, shuffle=False, initial_epoch=1, epochs=3)
        results.append((model.get_weights(), float(model.optimizer.learning_rate)))
    assert results[0][1] == same_everywhere(ring, results[1][1])
    for one, other in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


@CHECKS
def a_callback_list_and_one_callback(ring):
    """`callbacks` may be a single callback or a CallbackList."""
    model = compiled(ring)
    log = K.CSVLogger(str(ring.path / "log.csv"))
    listed = K.CallbackList([log], add_history=True, model=model)
    fit(model, callbacks=listed)
    fit(model, callbacks=listed, epochs=2)
    fit(model, callbacks=K.EarlyStopping(monitor="loss"))
    ring.everywhere(None)
    assert len((ring.path / "log.csv").read_text().splitlines()) == 3


@CHECKS
def only_rank_0_shows_progress(ring):
    """The line about the batch, and the progress bar, once."""
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        fit(compiled(ring), verbose=2)
        fit(compiled(ring), verbose=0)
    told = ring.everywhere(out.getvalue())
    assert told[0].count("tfdist: global batch 16 = 2 x 8") == 1 and "Epoch" not in told[1]
    assert told[1] == "", told[1]


@CHECKS
def evaluate_and_predict_in_a_callback(ring):
    """A user's callback may call the model on all ranks, between steps of fit."""
    x, y = data(30)
    scores = []

    class Score(K.Callback):
        def on_epoch_end(self, epoch, logs=None):
            scores.append(self.model.evaluate(x, y, verbose=0))
            scores.append(self.model.predict(x, verbose=0).sum())

    fit(compiled(ring), epochs=2, callbacks=[Score()])
    same_everywhere(ring, [np.array(s).tolist() for s in scores])
    assert tf.nest.flatten(scores)


test_callbacks = CHECKS.tests()
