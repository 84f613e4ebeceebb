"""TF_CONFIG texts for tests, and the form of its refusals."""

import json

import pytest

from tfdist.tf_config import Cluster, parse

ADDRESSES = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
CLUSTER = Cluster("a:1", ("b:1", "c:1"), ("d:1",))
WORKER = {"type": "worker", "index": 1}


def config(cluster=ADDRESSES, task=WORKER, **rest):
    return json.dumps({"cluster": cluster, "task": task, **rest})


def refused(text, *words):
    """The text must be refused with a message that has all parts of one and these words."""
    with pytest.raises(ValueError, match=r"^TF_CONFIG: .*, expected .+\. [A-Z]") as error:
        parse(text)
    for word in words:
        assert word in str(error.value)
