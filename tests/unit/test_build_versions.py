import configparser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tfdist.build.errors import BuildError
from tfdist.build.versions import (
    PYTHON_RANGE,
    TENSORFLOW_RANGE,
    check_python,
    choose_tensorflow,
    has_nccl,
    local_version,
    parse_local_version,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.18.0", "2.18.1", "2.19.1", "2.20.0", "2.21.0", "2.21.0rc1"])
def test_supported_tensorflow(version):
    assert choose_tensorflow({"tensorflow-cpu": version}) == ("tensorflow-cpu", version)


@pytest.mark.parametrize("version", ["2.17.1", "1.15.5", "2.22.0", "3.0", "custom build"])
def test_unsupported_tensorflow_says_got_wanted_and_what_to_install(version):
    with pytest.raises(BuildError) as caught:
        choose_tensorflow({"tensorflow": version})
    for part in (
        f"tensorflow {version}",
        "2.18 to 2.21",
        'pip install "tensorflow-cpu>=2.18,<2.22"',
    ):
        assert part in str(caught.value)


def test_no_tensorflow_says_what_to_install():
    with pytest.raises(BuildError, match="No TensorFlow is installed.*pip install"):
        choose_tensorflow({})


def test_two_tensorflows_of_one_version_are_one():
    both = {"tensorflow-cpu-aws": "2.18.0", "tensorflow": "2.18.0"}
    assert choose_tensorflow(both) == ("tensorflow", "2.18.0")


def test_two_different_tensorflows_are_refused():
    with pytest.raises(BuildError) as caught:
        choose_tensorflow({"tensorflow-cpu": "2.20.0", "tensorflow": "2.21.0"})
    assert "tensorflow 2.21.0, tensorflow-cpu 2.20.0" in str(caught.value)
    assert "pip uninstall tensorflow tensorflow-cpu" in str(caught.value)


@pytest.mark.parametrize("python", [(3, 10), (3, 11), (3, 12), (3, 13)])
def test_supported_python(python):
    check_python(python)


@pytest.mark.parametrize("python", [(2, 7), (3, 9), (3, 14), (4, 0)])
def test_unsupported_python(python):
    with pytest.raises(BuildError, match=rf"Python {python[0]}\.{python[1]} .* 3\.10 to 3\.13"):
        check_python(python)


@pytest.mark.parametrize("tensorflow", ["2.21.0", "2.18.1", "2.21.0rc1", "2.21.0.dev20260101"])
@pytest.mark.parametrize("key", ["0123456789ab", "000000000000", "abcdefabcdef"])
@pytest.mark.parametrize("nccl", [False, True])
def test_version_survives_the_packaging_rules(tensorflow, key, nccl):
    version = local_version(tensorflow, key, nccl=nccl)
    # What pip and setuptools make of it is what is read back from an installed Horovod.
    assert parse_local_version(str(Version(version))) == (tensorflow, key)
    assert has_nccl(str(Version(version))) == nccl
    assert Version(version).public == "0.28.1"


@pytest.mark.parametrize("version", ["0.28.1", "0.28.1+cu118", "0.28.1+tf2.21", ""])
def test_a_horovod_by_other_hands_is_known_as_such(version):
    assert parse_local_version(version) is None
    assert not has_nccl(version)


def test_setup_cfg_states_the_same_ranges():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    (low, high) = TENSORFLOW_RANGE
    for extra in ("cpu", "gpu"):
        tensorflow = Requirement(extras[extra].strip()).specifier
        for minor in range(low[1] - 3, high[1] + 4):
            assert tensorflow.contains(f"2.{minor}.0") == (low <= (2, minor) <= high)
    python = SpecifierSet(config["options"]["python_requires"])
    for minor in range(6, 20):
        expected = PYTHON_RANGE[0] <= (3, minor) <= PYTHON_RANGE[1]
        assert python.contains(f"3.{minor}.1") == expected
