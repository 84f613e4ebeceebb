import hashlib
import json
import os
import threading
from pathlib import Path

import pytest

from tfdist.build import cache
from tfdist.build.cache import WheelCache

KEY = "0123456789ab"
NAME = "horovod-0.28.1+tf2.21.0.k0123456789ab-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def wheels(tmp_path):
    return WheelCache(tmp_path / "wheels")


@pytest.fixture
def built(tmp_path):
    wheel = tmp_path / NAME
    wheel.write_bytes(b"a wheel")
    return wheel


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"TFDIST_CACHE": "/here", "XDG_CACHE_HOME": "/there"}, "/here"),
        ({"TFDIST_CACHE": "~/mine"}, str(Path.home() / "mine")),
        ({"XDG_CACHE_HOME": "/there"}, "/there/tfdist"),
        ({"TFDIST_CACHE": "", "XDG_CACHE_HOME": ""}, str(Path.home() / ".cache" / "tfdist")),
        ({}, str(Path.home() / ".cache" / "tfdist")),
    ],
)
def test_where_it_is(env, expected):
    assert str(cache.root(env)) == expected


def test_what_is_put_is_got(wheels, built):
    assert wheels.get(KEY) is None
    kept = wheels.put(KEY, built, {"version": "0.28.1"})
    built.unlink()
    assert wheels.get(KEY) == kept
    # pip reads the version from the file's name.
    assert kept.name == NAME
    assert kept.read_bytes() == b"a wheel"
    record = json.loads((kept.parent / "build.json").read_text())
    assert record["version"] == "0.28.1"
    assert record["sha256"] == hashlib.sha256(b"a wheel").hexdigest()
    assert wheels.get("ba9876543210") is None


def test_put_again_replaces(wheels, built):
    wheels.put(KEY, built, {})
    built.write_bytes(b"a newer wheel")
    assert wheels.put(KEY, built, {}).read_bytes() == b"a newer wheel"
    assert wheels.get(KEY).read_bytes() == b"a newer wheel"


def test_damaged_wheel_is_a_miss(wheels, built):
    kept = wheels.put(KEY, built, {})
    kept.write_bytes(b"a whee")
    assert wheels.get(KEY) is None


def test_missing_wheel_is_a_miss(wheels, built):
    wheels.put(KEY, built, {}).unlink()
    assert wheels.get(KEY) is None


@pytest.mark.parametrize("record", ["", "{", "[]", '{"wheel": "x.whl"}', "null"])
def test_damaged_record_is_a_miss(wheels, built, record):
    kept = wheels.put(KEY, built, {})
    (kept.parent / "build.json").write_text(record)
    assert wheels.get(KEY) is None


def test_cut_off_before_the_record_is_a_miss(wheels, built, monkeypatch, tmp_path):
    def killed(_source, target):
        if str(target).endswith("build.json"):
            raise KeyboardInterrupt
        replace(_source, target)

    replace = os.replace
    monkeypatch.setattr("tfdist.build.cache.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        wheels.put(KEY, built, {})
    assert wheels.get(KEY) is None
    assert [path.name for path in (tmp_path / "wheels" / KEY).iterdir()] == [NAME]


def test_failed_copy_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    target = tmp_path / "kept" / "file"
    target.parent.mkdir()
    target.write_text("old")

    def full(_source, name):
        Path(name).write_text("ha")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfdist.build.cache.shutil.copyfile", full)
    with pytest.raises(OSError, match="No space left"):
        cache.replace_file(tmp_path / "source", target)
    assert [path.read_text() for path in target.parent.iterdir()] == ["old"]


def test_second_holder_of_a_key_waits_for_the_first(wheels):
    order = []
    first_in, second_waits = threading.Event(), threading.Event()

    def first():
        with wheels.lock(KEY, lambda: order.append("first waits")):
            first_in.set()
            # Left only once the second stands at the door.
            assert second_waits.wait(10)
            order.append("first leaves")

    def on_wait():
        order.append("second waits")
        second_waits.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_in.wait(10)
    with wheels.lock(KEY, on_wait):
        order.append("second is in")
    thread.join()
    assert order == ["second waits", "first leaves", "second is in"]


def test_keys_do_not_wait_for_each_other_and_an_error_frees_the_key(wheels):
    waits = []
    with wheels.lock(KEY, lambda: waits.append(1)), wheels.lock("other", lambda: waits.append(2)):
        pass
    with pytest.raises(ValueError), wheels.lock(KEY, lambda: waits.append(3)):
        raise ValueError
    with wheels.lock(KEY, lambda: waits.append(4)):
        pass
    assert waits == []
