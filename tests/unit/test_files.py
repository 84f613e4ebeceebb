"""Files of rank 0: whole or not at all, and which callbacks write them."""

import keras
import pytest

from tfdist.trainers import files

K = keras.callbacks


def test_file_appears_whole(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with files.whole(path, "save") as partial:
        with open(partial, "w") as file:
            file.write("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "model.keras"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), files.whole(str(path), "save") as partial:
        with open(partial, "w") as file:
            file.write("ne")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model.keras"]


def test_directory_takes_the_place_of_the_old_one(tmp_path):
    path = tmp_path / "export"
    for content in ("one", "two"):
        with files.whole(path, "export") as partial:
            (tmp_path / partial).mkdir()
            (tmp_path / partial / content).touch()
    assert [p.name for p in path.iterdir()] == ["two"]
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


@pytest.mark.parametrize("path", ["gs://bucket/model.keras", "weights.weights.json", object()])
def test_paths_that_are_no_local_file_are_left_alone(path):
    with files.whole(path, "save") as same:
        assert same is path


def test_suffix_is_kept(tmp_path):
    """Keras decides by it what it writes."""
    with files.whole(tmp_path / "a.weights.h5", "save_weights") as partial:
        assert partial.endswith(".weights.h5")
        open(partial, "w").close()


class OwnCheckpoint(K.ModelCheckpoint):
    pass


def test_writers_stay_with_rank_0(tmp_path):
    writers = [OwnCheckpoint("a.keras"), K.CSVLogger("log"), K.TensorBoard("logs"), K.BackupAndRestore("b")]
    others = [K.EarlyStopping(), K.LambdaCallback()]
    assert files.keep_for(0, writers + others) == writers + others
    assert files.keep_for(1, writers + others) == others
    assert files.keep_for(1, tuple(others)) == others
    assert files.keep_for(1, writers[0]) == [] and files.keep_for(0, writers[0]) == [writers[0]]
    assert files.keep_for(1, None) == []
    listed = K.CallbackList([*writers, *others])
    assert files.keep_for(1, listed) is listed and listed.callbacks == others


def test_asking_before_overwriting(tmp_path):
    (tmp_path / "there").touch()
    assert files.must_ask(tmp_path / "there", overwrite=False)
    assert not files.must_ask(tmp_path / "there", overwrite=True)
    assert not files.must_ask(tmp_path / "not", overwrite=False)
