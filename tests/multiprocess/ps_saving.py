"""Checks with one worker of what is kept: files, checkpoints, weights that stay with the workers; see ps_checks.py."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile

import keras
import numpy as np

import tfdist
from tests.multiprocess.ps_parts import SPARSE, assert_like_plain, assert_same, data, dense, pair, with_workers


@with_workers(1)
def fits_go_on_and_files_are_plain(strategy):
    """A second fit, weights set between, save and load, a checkpoint at each epoch, BackupAndRestore."""
    x, y = data()
    ours, plain = assert_like_plain(strategy, dense, lambda: keras.optimizers.Adam(0.01))
    start = [w * 0.5 for w in plain.get_weights()]
    with tempfile.TemporaryDirectory() as folder:
        for model in (ours, plain):
            model.set_weights(start)
            model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        assert_same(ours, plain)
        ours.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
        assert_same(loaded, plain)
        assert loaded.get_config() == plain.get_config() or loaded.name != plain.name
        np.testing.assert_allclose(ours.predict(x, verbose=0), plain.predict(x, verbose=0), atol=1e-5)
        assert ours.evaluate(x, y, verbose=0, return_dict=True).keys() == {"accuracy", "loss"}

        class Interrupt(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch, logs=None):
                if epoch == 2:
                    raise KeyboardInterrupt

        resumed, straight = pair(strategy, dense, lambda: keras.optimizers.Adam(0.01))
        straight.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
        for callbacks in ([Interrupt()], []):
            backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
            try:
                history = resumed.fit(
                    x, y, batch_size=16, epochs=4, shuffle=False, verbose=0, callbacks=[backup, *callbacks]
                )
            except KeyboardInterrupt:
                resumed = strategy.distribute(dense())  # as a new process has it
                resumed.compile(keras.optimizers.Adam(0.01), SPARSE, metrics=["accuracy"])
        assert history.epoch == [2, 3]
        assert_same(resumed, straight)

        saved = []

        class Look(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                saved.append((int(self.model.optimizer.iterations), self.model.get_weights()[0].copy()))

        before = int(ours.optimizer.iterations)
        ours.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[Look()])
        assert [n - before for n, _ in saved] == [7, 14]
        assert np.abs(saved[0][1] - saved[1][1]).max() > 0


@with_workers(1)
def a_checkpoint_goes_on_at_its_step(strategy):
    """The same weights, slots and logs as without the end in between; saving in an epoch writes what there is then."""
    x, y = data(320)

    class At(keras.callbacks.Callback):
        def __init__(self, checkpoint):
            super().__init__()
            self.checkpoint = checkpoint

        def on_train_batch_end(self, batch, logs=None):
            if (self.checkpoint.at.epoch, batch) == (1, 6):
                self.checkpoint.save()
                written.append(int(self.model.optimizer.iterations))
            if (self.checkpoint.at.epoch, batch) == (1, 11):
                raise KeyboardInterrupt

    written = []
    resumed, straight = pair(strategy, dense, lambda: keras.optimizers.Adam(0.01))
    whole = straight.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "mine.txt").write_text("kept")
        checkpoint = tfdist.Checkpoint(folder)
        kwargs = {"batch_size": 16, "epochs": 3, "shuffle": False, "verbose": 0}
        with contextlib.suppress(KeyboardInterrupt):
            resumed.fit(x, y, callbacks=[checkpoint, At(checkpoint)], **kwargs)
        assert written == [27]
        assert sorted(p.name for p in folder.iterdir()) == ["000001-000000007", "mine.txt"]
        plain = dense()
        plain.load_weights(folder / "000001-000000007" / "model.weights.h5")
        resumed = strategy.distribute(dense())  # as a new process has it
        resumed.compile(keras.optimizers.Adam(0.01), SPARSE, metrics=["accuracy"])
        history = resumed.fit(x, y, callbacks=[tfdist.Checkpoint(folder)], **kwargs)
        assert [p.name for p in folder.iterdir()] == ["mine.txt"]
    assert history.epoch == [1, 2]
    assert_same(resumed, straight)
    for name, values in history.history.items():
        np.testing.assert_allclose(values, whole.history[name][1:], rtol=1e-4, err_msg=name)


@with_workers(1)
def frozen_weights_stay_with_the_workers(strategy):
    """They are sent once, and again when they have changed."""

    def build():
        layers = keras.layers
        frozen = layers.Dense(300, "relu", name="frozen")
        frozen.trainable = False
        return keras.Sequential([keras.Input((100,)), frozen, layers.BatchNormalization(), layers.Dense(3, "softmax")])

    x, y = data(columns=100)
    ours, plain = assert_like_plain(strategy, build, lambda: keras.optimizers.Adam(0.01), x=x, y=y)
    store = ours.__dict__["_tfdist"]._store
    assert len(store.held.variables) == 2
    assert len(store.statistics) == 2
    stamp = store.held.stamp
    for model in (ours, plain):
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert store.held.stamp == stamp
    for model in (ours, plain):
        model.get_layer("frozen").set_weights([w * 0.5 for w in model.get_layer("frozen").get_weights()])
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    assert store.held.stamp > stamp
    assert_same(ours, plain)
