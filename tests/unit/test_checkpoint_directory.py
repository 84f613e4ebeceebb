"""Where checkpoints are to go: looked at when `fit` begins, not a minute later."""

import pytest

from tfdist.checkpoint import check_directory


def test_it_is_made(tmp_path):
    check_directory(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_where_nothing_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file" / "sub", tmp_path / "file"):
        with pytest.raises(ValueError, match=r"directory is '.*file.*', where nothing can be written \(.+\)"):
            check_directory(directory)
