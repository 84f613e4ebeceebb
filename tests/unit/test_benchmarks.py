"""What the benchmarks make of their measurements."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from benchmarks import pace, ps_curves, ps_report, split_report
from benchmarks.slowed import Slowed


def test_the_middle_leaves_start_and_end_out():
    marks = [(float(n), n) for n in range(101)]
    assert pace.middle(marks) == ((10.0, 10), (90.0, 90))


def test_the_middle_needs_two_marks():
    with pytest.raises(ValueError, match="train for more updates"):
        pace.middle([(0.0, 0), (1.0, 100)])


def test_sampled_values_are_interpolated():
    with pace.Sampled(lambda: 5.0, seconds=0.01) as sampled:
        time.sleep(0.05)
    assert len(sampled.marks) > 2
    sampled.marks = [(0.0, 10.0), (2.0, 30.0)]
    assert sampled.at(1.0) == 20.0


def figures(updates_per_s, first_s=10.0):
    return ps_report.Figures(updates_per_s, first_s, 0.0, 0.0)


def test_tfdist_is_compared_with_the_better_peer_of_each_turn():
    turns = {
        "tfdist 2": [figures(30.0), figures(40.0), None],
        "tf_keras 2, 1 a call": [figures(10.0), figures(5.0), figures(1.0)],
        "tf_keras 2, 10 a call": [figures(5.0), figures(20.0), figures(1.0)],
    }
    assert ps_report.over_peer(turns, lambda f: f.updates_per_s) == 2.5  # of 3.0 and 2.0


def test_without_a_peer_there_is_no_ratio():
    assert ps_report.over_peer({"tfdist 2": [figures(30.0)]}, lambda f: f.updates_per_s) is None


def run(*history, late=None):
    return {"history": [(0.0, 0, None), *history], "report": {"late": late or {}}}


def test_the_first_epoch_that_is_good_enough_counts():
    assert ps_curves.reached(run((1.0, 10, 0.9), (2.0, 20, 0.98), (3.0, 30, 0.99)), 0.97) == (2.0, 20)
    assert ps_curves.reached(run((1.0, 10, 0.9)), 0.97) is None


def test_staleness_counts_each_update():
    assert ps_curves.staleness(run(late={0: 6, 1: 3, 9: 1})) == (1.2, 9)
    assert ps_curves.staleness(run()) == (0.0, 0)


def test_a_run_that_does_not_get_there_is_slower_than_all():
    good, slow, never = run((1.0, 10, 0.98)), run((5.0, 10, 0.98)), run((9.0, 10, 0.5))
    assert ps_curves.middle_run([never, good, slow], 0.97) is slow


def test_a_slowed_process_runs_a_tenth_of_the_time_and_goes_on_afterwards():
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        with Slowed(process.pid) as slow:
            time.sleep(1.0)
        assert 0.05 < slow.ran < 0.4  # a busy machine is late
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def turn(step):
    return split_report.Turn(step, [step], 0.0)


def test_the_ideal_pipeline_only_fills_and_empties():
    assert split_report.ideal(8.0, 1) == 8.0
    assert split_report.ideal(8.0, 8) == 4.5
    assert split_report.of_ideal([turn(8.0), turn(16.0)], [turn(9.0), turn(9.0)], 8) == 0.75  # of 0.5 and 1.0


def test_an_automatic_cut_is_compared_with_the_best_manual_one():
    manual = [[turn(3.0), turn(4.0)], [turn(2.0), turn(2.0)]]
    assert split_report.over_best(manual, [turn(2.5), turn(2.0)]) == 0.9
