"""Two equal branches on one task, or one on each, side by side.

    tfdist run --ps 0 --workers 2 --cores-per-rank 1 benchmarks/branches.py

Each task has a core of its own. The models take turns; a figure is the median step.
"""

from __future__ import annotations

import statistics
import time

import keras
import numpy as np

import tfdist

WIDTH, DEEP, BATCH, TURNS, STEPS = 1024, 5, 1024, 4, 5


def build() -> keras.Model:
    """A stem, two branches of `DEEP` Dense layers, and their concatenation's output."""
    keras.utils.set_random_seed(1)
    first = keras.Input((WIDTH,))
    stem = keras.layers.Dense(64, name="stem")(first)
    ends = []
    for branch in "ab":
        x = stem
        for depth in range(DEEP):
            x = keras.layers.Dense(WIDTH, "relu", name=f"{branch}{depth}")(x)
        ends.append(x)
    joined = keras.layers.Concatenate(name="join")(ends)
    return keras.Model(first, keras.layers.Dense(1, name="out")(joined))


def main() -> None:
    here, there = tfdist.ModelParallelStrategy().devices
    cuts = {"both on one task": {"stem": 0, "out": 1}, "one on each": {"b0": 1, "join": 0}}
    models = {}
    for name, balance in cuts.items():
        strategy = tfdist.ModelParallelStrategy([here, there], balance=balance, microbatches=1)
        models[name] = strategy.distribute(build())
        models[name].compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("float32")
    y = np.zeros((BATCH, 1), "float32")
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, model in models.items():
            for step in range(STEPS):
                began = time.perf_counter()
                model.train_on_batch(x, y)
                if step:  # the first traces, or finds colder caches
                    seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name, each in medians.items():
        print(f"two branches of {DEEP} Dense({WIDTH}), batch {BATCH}, {name}: {1e3 * each:.0f} ms", flush=True)
    one, two = medians.values()
    print(f"speed: {one / two:.2f}", flush=True)


if __name__ == "__main__":
    main()
