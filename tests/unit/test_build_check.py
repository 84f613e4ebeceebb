import pytest

from tfdist.build import check
from tfdist.build.errors import BuildError


def fact(**values):
    device = "/job:localhost/replica:0/task:0/device:CPU:0"
    usual = {"size": 2, "gloo": True, "mpi": False, "last": 12294.0, "error": 0.0, "device": device}
    return {**usual, **values}


def test_the_sums_are_judged():
    assert check.judge("gloo", [fact(), fact()]) is None
    assert "1 of 2 ranks" in check.judge("gloo", [fact()])
    assert "rank 1 saw 1 ranks" in check.judge("gloo", [fact(), fact(size=1)])
    assert "did not run on the mpi controller" in check.judge("mpi", [fact(), fact()])
    assert "rank 0 got a wrong sum" in check.judge("gloo", [fact(error=1e-3), fact()])
    assert "wrong sum" in check.judge("gloo", [fact(), fact(last=4098.0)])


def test_check_starts_horovods_own_launcher_quietly():
    assert check.command("py", "gloo", "s.py", "out") == [
        *("py", "-m", "horovod.runner.launch", "--gloo", "-np", "2"),
        *("py", "s.py", "out", "CPU"),
    ]
    env = check.environment({"HOME": "/me", "HOROVOD_RANK": "3"})
    assert env == {"HOME": "/me", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


def test_check_of_nccl_takes_a_gpu_each_and_leaves_none_of_them_hidden():
    assert check.command("py", "gloo", "s.py", "out", "GPU")[-2:] == ["out", "GPU"]
    env = check.environment({"CUDA_VISIBLE_DEVICES": "2,3"}, "GPU")
    assert env == {"CUDA_VISIBLE_DEVICES": "2,3", "TF_CPP_MIN_LOG_LEVEL": "3"}
    assert check.judge("gloo", [fact(device="/device:GPU:0")] * 2, "GPU") is None
    assert "instead of its GPU" in check.judge("gloo", [fact(), fact()], "GPU")


def test_failed_check_of_nccl_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "command", lambda *a: ["sh", "-c", "exit 7"])
    with pytest.raises(BuildError) as caught:
        check.all_reduce("gloo", tmp_path / "log", "GPU")
    assert "over 2 processes on a GPU each by NCCL" in str(caught.value)
    assert "NCCL_DEBUG=INFO" in str(caught.value)


def test_failed_check_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "command", lambda *a: ["sh", "-c", "echo broken; exit 7"])
    for controller, remedy in (("gloo", "--rebuild"), ("mpi", "--without-mpi")):
        with pytest.raises(BuildError) as caught:
            check.all_reduce(controller, tmp_path / "log")
        assert f"over 2 processes with the {controller} controller" in str(caught.value)
        assert "exit code 7" in str(caught.value)
        assert "  broken" in str(caught.value)
        assert remedy in str(caught.value)


def test_check_that_ends_well_without_results_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "command", lambda *a: ["true"])
    with pytest.raises(BuildError, match="0 of 2 ranks wrote a result"):
        check.all_reduce("gloo", tmp_path / "log")
