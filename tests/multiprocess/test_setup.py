"""What the set-up has left here: Horovod sums over two processes, and the doctor finds no fault."""

from tfdist.build import check
from tfdist.doctor import probe
from tfdist.doctor.findings import findings


def test_two_processes_sum_a_tensor(tmp_path):
    check.all_reduce("gloo", tmp_path / "log")


def test_doctor_finds_nothing_wrong():
    facts = probe.look()
    assert facts.tensorflow_error is facts.horovod_error is None
    assert "gloo" in facts.controllers
    assert [finding for finding in findings(facts) if finding.wrong] == []
