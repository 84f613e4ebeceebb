"""Which calls may be under way, and which batches go into which: against a simulation of workers in any order."""

from __future__ import annotations

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from tfdist.ps.pacing import Window, deal, most_steps


class Running:
    """A call in the simulation: pull, push, pull, push, ... and then the chief hears of its end."""

    def __init__(self, steps):
        self.steps, self.done, self.at, self.pulled = steps, 0, 0, None

    def advance(self, version):
        """Its next pull or push; (the version after it, how late the update was or None)."""
        if self.pulled is None:
            self.pulled = version
            return version, None
        late, self.pulled = version - self.pulled, None
        self.at += 1
        if self.at <= self.done:  # was done before its worker died
            return version, None
        self.done = self.at
        return version + 1, late

    def again(self):
        """Its worker died, and another one begins it anew."""
        self.at, self.pulled = 0, None

    @property
    def ended(self):
        return self.at == self.steps


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(0, 12)),
    st.randoms(use_true_random=False),
)
def test_no_update_is_later_than_the_bound(sizes, calls, staleness, random):
    """Whatever the order of pulls, pushes, ends and deaths; and all calls get their turn."""
    window, running, version, waiting = Window(calls, staleness), {}, 0, list(enumerate(sizes))
    deaths = 0
    while waiting or running:
        if waiting and window.admits(waiting[0][1]):
            number, steps = waiting.pop(0)
            window.begin(number, steps)
            running[number] = Running(steps)
            assert len(window) == len(running) <= calls
            continue
        assert running  # else nothing could ever be admitted
        number = random.choice(sorted(running))
        call = running[number]
        if deaths < 5 and random.random() < 0.05:
            deaths += 1
            call.again()
        elif call.ended:
            window.end(number)
            del running[number]
        else:
            version, late = call.advance(version)
            assert late is None or staleness is None or late <= staleness
    assert version == sum(sizes)
    assert len(window) == 0


@given(st.integers(0, 20), st.integers(1, 30), st.integers(1, 5))
def test_an_empty_window_admits_whatever_the_bound(staleness, steps, calls):
    window = Window(calls, staleness)
    assert window.admits(steps)
    window.begin(3, steps)
    window.clear()
    window.end(3)  # of a call that is no longer known
    assert window.admits(steps)


def test_the_drawing():
    """The one at the head of pacing.py: its call 3 has met 2 + 2, and begins under a bound of 5 only."""
    for staleness, admitted in ((4, False), (5, True)):
        window = Window(4, staleness)
        window.begin(0, 1)
        window.begin(1, 2)
        window.end(1)
        window.begin(2, 2)
        window.end(2)
        assert window.admits(1) is admitted


def test_no_bound_leaves_the_number_of_calls():
    window = Window(2)
    window.begin(0, 100)
    assert window.admits(100)
    window.begin(1, 100)
    assert not window.admits(1)


@given(st.integers(1, 20), st.one_of(st.none(), st.integers(0, 200)), st.integers(1, 30))
def test_most_steps_let_all_workers_in(workers, staleness, most):
    steps = most_steps(workers, staleness, most)
    assert 1 <= steps <= most
    if staleness is None or workers == 1:
        assert steps == most
    elif staleness >= 2 * workers:  # a call that runs and one that waits, of each worker
        window = Window(2 * workers, staleness)
        for number in range(2 * workers):
            assert window.admits(steps)
            window.begin(number, steps)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(1, 9))
def test_dealt_batches(kinds, workers, steps):
    rounds = deal(kinds, workers, steps)
    assert [n for calls in rounds for numbers in calls for n in numbers] == list(range(len(kinds)))
    for calls in rounds:
        assert 1 <= len(calls) <= workers
        for numbers in calls:
            assert 1 <= len(numbers) <= steps
            assert len({kinds[n] for n in numbers}) == 1
            assert numbers == list(range(numbers[0], numbers[-1] + 1))
    runs = len([*groupby(kinds)])
    assert len(rounds) <= -(-len(kinds) // (workers * steps)) + runs  # no round is wasted on a change of kind twice


def test_dealt_by_hand():
    assert deal([], 2, 3) == []
    assert deal("aaaaaa", 2, 3) == [[[0, 1, 2], [3, 4, 5]]]
    assert deal("aaa", 2, 3) == [[[0, 1], [2]]]  # a short last round is shared out as well
    assert deal("aaaaab", 2, 3) == [[[0, 1, 2], [3, 4]], [[5]]]
