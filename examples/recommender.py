"""Wide and deep: which of 5,000 items do 20,000 users like? On a parameter server, where such tables belong.

    tfdist run --ps 1 --workers 2 examples/recommender.py

The model is that of Cheng et al., Wide & Deep Learning for Recommender Systems (2016): embeddings of ids under a deep
tower, and beside it a weight for each cross of two ids. The data are made up here: users have tastes and
items a nature, groups of users have favourite kinds of items, some items are liked by all; a click is drawn from that.
"""

import keras
import numpy as np

import tfdist

USERS, ITEMS, GROUPS, KINDS, ROWS = 20_000, 5_000, 50, 40, 400_000


def load():
    random = np.random.default_rng(0)
    user, item = random.integers(0, USERS, ROWS), random.integers(0, ITEMS, ROWS)
    group_of, kind_of = random.integers(0, GROUPS, USERS), random.integers(0, KINDS, ITEMS)
    taste, nature = random.normal(size=(USERS, 4)), random.normal(size=(ITEMS, 4))
    popular = random.normal(size=ITEMS)
    favour = random.normal(size=(GROUPS, KINDS))
    context = random.normal(size=(ROWS, 3)).astype("float32")  # the hour, the device, the weather
    logit = (
        0.5 * (taste[user] * nature[item]).sum(axis=1)
        + popular[item]
        + 1.5 * favour[group_of[user], kind_of[item]]
        + 0.5 * context[:, 0] * context[:, 1]
    )
    click = (random.random(ROWS) < 1 / (1 + np.exp(-logit))).astype("float32")
    x = {
        "user": user,
        "item": item,
        "group": group_of[user],
        "kind": kind_of[item],
        "cross": group_of[user] * KINDS + kind_of[item],
        "context": context,
    }
    held = ROWS // 10
    return [({k: v[part] for k, v in x.items()}, click[part]) for part in (slice(held, None), slice(held))]


def build_model():
    inputs = {name: keras.Input((), dtype="int32", name=name) for name in ("user", "item", "group", "kind", "cross")}
    inputs["context"] = keras.Input((3,), name="context")
    tables = {"user": (USERS, 8), "item": (ITEMS, 8), "group": (GROUPS, 4), "kind": (KINDS, 4)}
    ids = [keras.layers.Embedding(*size, name=f"{name}_table")(inputs[name]) for name, size in tables.items()]
    deep = keras.layers.Concatenate()([*ids, inputs["context"]])
    deep = keras.layers.Dropout(0.3)(deep)  # or it learns each user's few rows by heart
    for width in (64, 32):
        deep = keras.layers.Dense(width, "relu")(deep)
    wide = keras.layers.Embedding(GROUPS * KINDS, 1, name="wide")(inputs["cross"])
    logit = keras.layers.Add()([keras.layers.Dense(1)(deep), wide])
    return keras.Model(inputs, keras.layers.Activation("sigmoid")(logit))


def auc(scores, clicks):
    """The chance that a row with a click scores above one without."""
    metric = keras.metrics.AUC(num_thresholds=1000)
    metric.update_state(clicks, scores)
    return float(metric.result())


keras.utils.set_random_seed(1)
(x, y), (xv, yv) = load()

strategy = tfdist.ParameterServerStrategy()
with strategy.scope():
    model = strategy.distribute(build_model())
    model.compile(keras.optimizers.Adam(2e-3), "binary_crossentropy", metrics=["auc"])

model.fit(x, y, batch_size=512, epochs=2, validation_data=(xv, yv), verbose=2, callbacks=[tfdist.RunReport()])

counts = np.bincount(x["item"], minlength=ITEMS)
rate = (np.bincount(x["item"], y, ITEMS) + 2 * y.mean()) / (counts + 2)  # few clicks say little
print(f"AUC on held-out rows: {auc(model.predict(xv, batch_size=2048, verbose=0)[:, 0], yv):.4f}", flush=True)
print(f"AUC of each item's share of clicks: {auc(rate[xv['item']], yv):.4f}", flush=True)
