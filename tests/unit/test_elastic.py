"""Elastic jobs: who is in the next round, and whether there is one."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.comm.watch import RankEndedError
from tfdist.launch import discovery, elastic, verdict
from tfdist.launch.discovery import Discovery, DiscoveryError
from tfdist.launch.elastic import Limits
from tfdist.launch.hosts import Host, parse_hosts, total_slots
from tfdist.launch.outcome import Outcome
from tfdist.launch.rundir import Failure

LIMITS = Limits(2, 4)


def failure(rank=1, host="b", **how):
    return Failure(rank=rank, host=host, pid=7, code=how.pop("code", 1), at=0.0, **how)


def outcome(code, *failures, interrupted=0):
    first = failures[0] if failures else None
    return Outcome(code, failures, (), (), first, "", (), (), {}, interrupted)


KILLED = failure(signal=9, code=137)
LOST = failure(kind=("HostLost",), message="the host was lost")
PEER = failure(kind=("HorovodInternalError",), message="Horovod has been shut down")
BUG = failure(kind=("ZeroDivisionError",), message="division by zero")
LEFT = failure(kind=("SystemExit",), code=75, message="75")


class TestTeam:
    @pytest.mark.parametrize(
        ("offered", "resting", "team"),
        [
            ("a:2,b:2", (), "a:2,b:2"),
            ("a:2,b:2,c:2", (), "a:2,b:2"),
            ("a:3,b:3", (), "a:3,b:1"),
            ("a:2,b:2", ("b",), "a:2"),
            ("a:1,b:2", ("b",), ""),
            ("a:9", (), "a:4"),
        ],
    )
    def test_hosts_in_order(self, offered, resting, team):
        expected = parse_hosts(team) if team else ()
        assert elastic.team(parse_hosts(offered), resting, LIMITS) == expected

    @given(st.lists(st.integers(1, 6), max_size=6), st.integers(1, 5), st.integers(0, 5))
    def test_as_many_ranks_as_there_may_be(self, slots, low, more):
        limits = Limits(low, low + more)
        hosts = [Host(f"h{i}", n) for i, n in enumerate(slots)]
        size = total_slots(elastic.team(hosts, (), limits))
        assert size == (min(sum(slots), limits.max_np) if sum(slots) >= low else 0)

    @pytest.mark.parametrize(
        ("now", "then", "changed"),
        [
            ("a:2", "a:2", False),
            ("a:2", "a:2,b:2", True),
            ("a:2,b:2", "b:2,a:2", False),
            ("a:2,b:2", "a:2", True),
            ("a:2,b:2", "a:2,c:2", True),
            ("a:2", "c:2,a:2", True),
            ("a:2,b:1", "a:1,b:2", True),
        ],
    )
    def test_when_a_round_ends_for_another(self, now, then, changed):
        assert elastic.changed(parse_hosts(now), parse_hosts(then)) is changed

    def test_it_does_not_end_for_none(self):
        assert not elastic.changed(parse_hosts("a:2"), ())

    def test_limits(self):
        for low, high in ((0, 2), (3, 2)):
            with pytest.raises(ValueError, match=f"--min-np is {low} and --max-np {high}"):
                Limits(low, high)
        with pytest.raises(ValueError, match="--reset-limit is -1"):
            Limits(1, 2, -1)


class TestJudge:
    @pytest.mark.parametrize("found", [KILLED, LOST, PEER])
    def test_what_heals(self, found):
        after = elastic.judge(outcome(found.code, found), False, 99, 0, 0, LIMITS)
        assert after.again
        assert after.lost == (("b",) if found is LOST else ())
        assert "rank 1 on b" in after.why

    def test_a_bug_does_not(self):
        assert not elastic.judge(outcome(1, BUG), False, 99, 0, 0, LIMITS).again
        assert not elastic.judge(outcome(1), False, 99, 0, 0, LIMITS).again  # the launcher itself

    def test_the_end_and_the_users_signal_are_ends(self):
        assert not elastic.judge(outcome(0), True, 99, 0, 0, LIMITS).again
        assert not elastic.judge(outcome(75, LEFT, interrupted=15), False, 99, 0, 0, LIMITS).again

    def test_ranks_that_were_asked_or_told_to_leave_come_back(self):
        assert elastic.judge(outcome(75, LEFT), True, 5, 9, 0, LIMITS).why == "hosts have changed"
        assert elastic.judge(outcome(75, LEFT), False, 99, 9, 0, LIMITS).why == "rank 1 was told to leave"
        # A program that leaves so by itself would come back for ever.
        assert not elastic.judge(outcome(75, LEFT), False, 5, 2, 2, LIMITS).again

    def test_rounds_that_do_nothing_are_counted(self):
        assert elastic.judge(outcome(137, KILLED), False, 5, 1, 1, LIMITS).again
        after = elastic.judge(outcome(137, KILLED), False, 5, 2, 2, LIMITS)
        assert (after.again, after.why) == (False, "3 rounds in a row ended within 30 s")
        assert elastic.judge(outcome(137, KILLED), False, 31, 2, 2, LIMITS).again

    def test_the_reset_limit(self):
        limits = Limits(1, 4, resets=1)
        assert elastic.judge(outcome(137, KILLED), False, 99, 0, 0, limits).again
        for found, asked in ((KILLED, False), (LEFT, True)):
            after = elastic.judge(outcome(found.code, found), asked, 99, 0, 1, limits)
            assert (after.again, "--reset-limit" in after.why) == (False, True)


class TestCulprit:
    """Clocks of hosts differ, and a killed rank is reported after those that miss it."""

    def test_a_killed_rank_rather_than_one_that_waited_for_it(self):
        waited = failure(0, "a", kind=("RankEndedError", "RuntimeError"), message="rank 1 (b) ended")
        late = failure(1, "b", signal=9, code=137)
        assert verdict.culprit([waited, late]) is late
        assert elastic.heals(waited)

    @pytest.mark.parametrize("outside", [KILLED, LOST])
    def test_what_no_rank_can_cause_comes_first(self, outside):
        later = replace(outside, at=5.0)
        assert verdict.culprit([failure(0, "a", kind=("ValueError",)), later]) is later

    def test_an_abort_can_follow_from_another_ranks_exception(self):
        bug, aborted = failure(0, "a", kind=("ValueError",)), failure(1, "b", signal=6, code=134)
        assert verdict.culprit([replace(aborted, at=1.0), bug]) is bug

    def test_the_roll_call_says_so_by_its_class(self):
        assert RankEndedError.__name__ in verdict.PEER_LOST_KINDS


class TestDiscovery:
    def script(self, tmp_path, text):
        path = tmp_path / "hosts.sh"
        path.write_text("#!/bin/sh\n" + text)
        path.chmod(0o755)
        return Discovery(str(path))

    def test_what_it_prints(self, tmp_path):
        assert self.script(tmp_path, "echo a:2; echo; echo b").hosts() == parse_hosts("a:2,b:1")
        assert self.script(tmp_path, "true").hosts() == ()

    def test_without_one(self):
        assert Discovery(None, parse_hosts("a:2")).hosts() == parse_hosts("a:2")

    def test_comments_and_drained_hosts(self, tmp_path):
        assert self.script(tmp_path, "echo a:2 '# old'; echo '# none'; echo b:0").hosts() == parse_hosts("a:2")

    def test_what_is_no_text(self, tmp_path):
        with pytest.raises(DiscoveryError, match="is no host"):
            self.script(tmp_path, r"printf '\\377\\376'").hosts()

    def test_one_that_hangs_ends_with_all_it_has_started(self, tmp_path, monkeypatch):
        monkeypatch.setattr(discovery, "SECONDS", 0.5)
        pid = tmp_path / "pid"
        with pytest.raises(DiscoveryError, match=r"took longer than 0.5 s"):
            self.script(tmp_path, f"sleep 600 & echo $! > {pid}; wait").hosts()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid.read_text())).wait(5)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("echo no >&2; exit 3", "ended with exit code 3: no"), ("echo a:b", "a line of .*'a:b' is no host")],
    )
    def test_what_fails(self, tmp_path, text, message):
        with pytest.raises(DiscoveryError, match=message):
            self.script(tmp_path, text).hosts()
        with pytest.raises(DiscoveryError, match="could not be run: No such file"):
            Discovery("/no/such/script").hosts()
