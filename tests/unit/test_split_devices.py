"""Which device operations are timed on."""

from __future__ import annotations

from tfdist.split.devices import nearest
from tfdist.tf_config import Task

OTHER, OWN = (f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in (1, 0))


def test_operations_are_timed_on_a_device_of_this_process_if_there_is_one():
    assert nearest([OTHER, OWN], Task("worker", 0)) == OWN
    assert nearest([OTHER], Task("worker", 0)) == OTHER
    assert nearest([OTHER, OWN], None) == OTHER
