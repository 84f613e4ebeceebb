import hashlib
import sys
import tarfile

import pytest

from tests.helpers.machine import MACHINE
from tfdist.build import explain, steps
from tfdist.build.errors import BuildError
from tfdist.build.plan import make_plan


@pytest.mark.parametrize("content", [b"", b"another sdist"])
def test_another_file_than_horovods_sdist_is_refused(tmp_path, content):
    file = tmp_path / "horovod-0.28.1.tar.gz"
    file.write_bytes(content)
    with pytest.raises(BuildError) as caught:
        steps.fetch_sdist(file, {}, tmp_path, tmp_path, tmp_path / "log")
    assert hashlib.sha256(content).hexdigest() in str(caught.value)
    assert steps.SDIST_SHA256 in str(caught.value)


def test_sdist_that_is_not_there(tmp_path):
    with pytest.raises(BuildError, match="there is no such file"):
        steps.fetch_sdist(tmp_path / "none.tar.gz", {}, tmp_path, tmp_path, tmp_path / "log")


def test_downloaded_sdist_is_checked_kept_and_taken_again(tmp_path, monkeypatch):
    content, downloads = b"the sdist", []
    monkeypatch.setattr(steps, "SDIST_SHA256", hashlib.sha256(content).hexdigest())

    def pip(argv, *, cwd, **_options):
        downloads.append(argv)
        target = cwd / "download"
        target.mkdir()
        (target / "horovod-0.28.1.tar.gz").write_bytes(content)
        return 0

    monkeypatch.setattr("tfdist.build.process.run", pip)
    for _ in range(2):
        log = tmp_path / "log"
        kept = steps.fetch_sdist(None, {}, tmp_path / "root", tmp_path, log)
        assert kept.read_bytes() == content
    assert kept.parent == tmp_path / "root" / "sdist"
    assert len(downloads) == 1


def test_unpack_patches(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("text")
    with tarfile.open(tmp_path / "s.tar.gz", "w:gz") as tar:
        tar.add(file, "horovod-0.28.1/a.txt")
    patched = []
    plan = make_plan(MACHINE)
    monkeypatch.setattr("tfdist.build.patch.apply", lambda *args: patched.append(args))
    source = steps.unpack(plan, tmp_path / "s.tar.gz", tmp_path / "work")
    assert patched == [(source, plan.edits)]
    assert (source / "a.txt").read_text() == "text"


def test_failing_pip_is_explained_by_its_own_part_of_the_log(tmp_path, monkeypatch):
    log = tmp_path / "log"
    log.write_text("Network is unreachable, but that was before\n")
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'cc1plus: error: no luck'\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(BuildError) as caught:
        steps.compile_wheel(tmp_path, {}, tmp_path, log)
    message = str(caught.value)
    assert message.startswith("Could not compile Horovod (exit code 1). The last lines of")
    assert str(log) in message
    assert "cc1plus: error: no luck" in message
    assert "network" not in message


@pytest.mark.parametrize(
    ("log", "advice"),
    [
        ("NewConnectionError('<pip._vendor.urllib3...>: Failed')", "--sdist horovod-0.28.1.tar.gz"),
        ("No matching version (from versions: none)", "Check the network"),
        ("Temporary failure in name resolution", "Check the network"),
        ("error: externally-managed-environment", "python3 -m venv"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
        ("Could NOT find MPI_CXX", "--without-mpi"),
        ("a.cc:1: write failed: No space left on device", "TMPDIR"),
    ],
)
def test_known_failures_say_what_to_do(tmp_path, log, advice):
    message = explain.failure("do it", 1, tmp_path / "x.log", f"much text\n{log}\nmore\n")
    assert message.startswith("Could not do it (exit code 1). ")
    assert advice in message
    assert str(tmp_path / "x.log") in message


def test_unknown_failure_shows_the_end_of_the_log(tmp_path):
    text = "".join(f"line {number}\n" for number in range(1000))
    message = explain.failure("do it", None, tmp_path / "x.log", text)
    assert "took too long" in message
    assert message.endswith("  line 998\n  line 999")
    assert len(message.splitlines()) == 1 + explain.TAIL_LINES
