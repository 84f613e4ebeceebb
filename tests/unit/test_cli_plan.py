"""`tfdist plan`: a saved model in, a report, a plan and a picture out; and what is said of other files."""

from __future__ import annotations

import os
import re

import keras
import pytest
from click.testing import CliRunner

import tfdist
from tfdist.cli.main import main
from tfdist.planner import picture

L = keras.layers


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    keras.utils.set_random_seed(1)
    hidden = [L.Dense(32, "relu", name=f"hidden{i}") for i in range(5)]
    model = keras.Sequential([keras.Input((16,)), *hidden, L.Dense(3, name="out")], name="small")
    path = tmp_path_factory.mktemp("plan") / "small.keras"
    model.save(path)
    return path


def plan(*args):
    return CliRunner().invoke(main, ["plan", *map(str, args)])


def test_a_model_is_planned_without_its_devices(saved, tmp_path):
    wanted = ["--devices", 3, "--batch", 90, "--microbatches", 9, "--bandwidth", "2GB", "--schedule", "gpipe"]
    done = plan(saved, "--strategy", "split", *wanted, "--balance", "parameters", "--save", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    assert max(len(line) for line in done.output.split("\n") if "plan.json" not in line) <= 80
    words = " ".join(done.output.split())
    assert "small: 3 stages on 3 devices, gpipe; a batch of 90 samples in 9 micro-batches of 10 stage" in words
    for i in range(3):
        assert re.search(rf"\n +{i}  device {i}  \w+", done.output)
    assert re.search(r"bandwidth B +2.00 GB/s each way, given", done.output)
    assert re.search(r"slots +2 for each trained weight, assumed", done.output)
    assert re.search(r"samples/s +[\d,]+ +-\n", done.output)
    found = tfdist.Plan.load(tmp_path / "plan.json")
    assert [stage.device for stage in found.stages] == [0, 1, 2]
    assert [*found.mapping()] == [*(f"hidden{i}" for i in range(5)), "out"]
    # 16 x 32 + 32 and four times 32 x 32 + 32, and 32 x 3 + 3: thirds are two layers each, but for the ends.
    numbers = [int(n.replace(",", "")) for n in re.findall(r"\n +\d  device \d  .*?  ([\d,]+)  ", done.output)]
    assert sum(numbers) == 544 + 4 * 1056 + 99


def test_the_default_is_measured_here(saved, tmp_path):
    done = plan(saved, "--devices", 2, "--batch", 64, "--recompute", "--timeline", tmp_path / "step.png")
    assert done.exit_code == 0, done.output
    assert re.search(r"bandwidth B +[\d.]+ GB/s each way, measured: a copy in this machine's memory", done.output)
    assert re.search(r"times +median of 5 runs on 16 samples", done.output)
    assert "forwards again before backwards" in done.output
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_slots_are_those_of_the_saved_optimizer(tmp_path):
    for optimizer, slots in (("adam", 2), (keras.optimizers.SGD(momentum=0.9), 1), ("sgd", 0)):
        model = keras.Sequential([keras.Input((50,)), L.Dense(20, use_bias=False), L.Dense(50, use_bias=False)])
        model.compile(optimizer, "mse")
        model.optimizer.build(model.trainable_variables)
        model.save(tmp_path / "compiled.keras")
        done = plan(tmp_path / "compiled.keras", "--devices", 2, "--batch", 8)
        assert done.exit_code == 0, done.output
        own = f"{4 * slots:.2f} kB" if slots else "0 B"
        assert len(re.findall(rf"\n +\d  4.00 kB +4.00 kB +{re.escape(own)} ", done.output)) == 2, done.output
        assert re.search(r"slots +those of the optimizer", done.output)


def test_what_cannot_be_planned_is_said(saved, tmp_path):
    few = ["--devices", 2, "--batch", 8]

    def says(words, *args, code=1):
        done = plan(*args)
        assert done.exit_code == code, done.output
        assert words in done.output, done.output
        assert "Traceback" not in done.output

    says("a model of 6 operations cannot be cut into 7 stages", saved, "--devices", 7, "--batch", 8)
    says("no cut into 2 stages keeps within 1,000 bytes", saved, *few, "--memory", "1kB")
    says("'8QB' is no number of bytes", saved, *few, "--memory", "8QB", code=2)
    says("'many' is neither a number of at least 1 nor", saved, *few, "--microbatches", "many", code=2)
    says("'0' is neither", saved, *few, "--microbatches", "0", code=2)
    says("'luck' is not 'split'", saved, *few, "--strategy", "luck", code=2)
    says("there is no directory", saved, *few, "--save", tmp_path / "nowhere" / "plan.json")
    says("there is no file nothing.keras", "nothing.keras", *few)
    says("is a directory; expected a model", tmp_path, *few)
    (tmp_path / "text.keras").write_text("no model")
    says("text.keras is no file of Keras", tmp_path / "text.keras", *few)
    (tmp_path / "model.pt").write_bytes(saved.read_bytes())
    says("model.pt is no file of Keras", tmp_path / "model.pt", *few)
    (tmp_path / "zip.keras").write_bytes(saved.read_bytes()[:2000])
    says("zip.keras could not be loaded", tmp_path / "zip.keras", *few)


def test_models_that_need_their_code_or_have_no_graph(tmp_path):
    class Doubles(L.Layer):
        def call(self, x):
            return 2 * x

    @keras.saving.register_keras_serializable("test_cli_plan")
    class Own(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = L.Dense(3)

        def call(self, x):
            return self.dense(x)

    def says(model, words, name="model.keras"):
        model.save(tmp_path / name)
        done = plan(tmp_path / name, "--devices", 2, "--batch", 8)
        assert done.exit_code == 1, done.output
        assert words in done.output, done.output

    says(keras.Sequential([keras.Input((4,)), Doubles()]), "it needs Doubles, which only the code that wrote it knows")
    says(keras.Sequential([keras.Input((4,)), L.Lambda(lambda x: x)]), "it holds a Python lambda")
    own = Own()
    own(keras.ops.ones((2, 4)))
    says(own, "with a call() of its own: what happens in there can not be cut")
    with pytest.warns(UserWarning, match="not yet been built"):
        says(keras.Sequential([L.Dense(3)]), "was not built")
    own.save_weights(tmp_path / "own.weights.h5")
    done = plan(tmp_path / "own.weights.h5", "--devices", 2, "--batch", 8)
    assert "own.weights.h5 holds weights only" in done.output


def test_an_old_file_whose_loss_is_not_known_is_planned_all_the_same(tmp_path):
    def distance(y, y_pred):
        return y - y_pred

    model = keras.Sequential([keras.Input((4,)), L.Dense(4), L.Dense(4)])
    model.compile("adam", distance)
    model.save(tmp_path / "model.h5")
    done = plan(tmp_path / "model.h5", "--devices", 2, "--batch", 8)
    assert done.exit_code == 0, done.output


def test_a_missing_matplotlib_is_said_before_anything_is_timed(saved, monkeypatch):
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    done = plan(saved, "--devices", 2, "--batch", 8, "--timeline", "step.png")
    assert done.exit_code == 1
    assert "needs matplotlib" in done.output
    assert not os.path.exists("step.png")
