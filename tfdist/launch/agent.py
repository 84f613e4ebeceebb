"""The process on each host of a job over several: `python -m tfdist.launch.agent`, started by ssh.

It answers questions about its host, then starts the host's ranks or tasks and passes on what they
print and report. It decides nothing: the supervisor on the launching machine does.

    launching machine  --- one JSON object a line, on stdin --->  agent
                       <--- one JSON object a line, on stdout ---

When its standard input ends, or nothing comes on it for `SILENCE_SECONDS`, whoever started it is gone:
it kills all that it has started, and ends.
"""

from __future__ import annotations

import base64
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from tfdist.launch import lookout, processes
from tfdist.launch.output import Lines
from tfdist.launch.place import CHIEF, Place
from tfdist.launch.ports import free_ports
from tfdist.launch.rundir import MARK, Failure, RunDir
from tfdist.launch.terminal import Terminal, terminal_for

BEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
LOOK_SECONDS = 0.5
LEAK_SECONDS = 2.0


# A place as one word, its own variables, and its arguments of rank.py.
Seated = tuple[str, dict[str, str], list[str]]


class Agent:
    """One host's part of a job. `run` serves until its processes have ended, or the launcher has."""

    def __init__(self, commands: int, answers: int):
        self._commands, self._answers = commands, answers
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._heard = time.monotonic()
        self._listener: lookout.Listener | None = None
        self._store: Any = None
        self._run_dir: RunDir | None = None
        self._terminal: Terminal | None = None
        self._children: dict[Place, subprocess.Popen[bytes]] = {}
        self._patience: dict[int, str] = {}  # what each program has asked for (tfdist/patience.py)
        self._started = False
        self._left = 0

    def say(self, **message: Any) -> None:
        """One line to the launcher."""
        data = (json.dumps(message) + "\n").encode()
        with self._lock:
            while data:
                data = data[os.write(self._answers, data) :]

    def run(self) -> int:
        """Serve; the exit code."""
        lines = Lines()

        def obey(data: bytes) -> None:
            for line in lines.feed(data):
                self._obey(json.loads(line))

        self._watch(self._commands, obey)
        with self._lock:
            os.write(self._answers, b"\n")  # ends what a login shell may have printed
        beat = threading.Thread(target=self._beat, daemon=True)
        beat.start()
        look_at = 0.0
        try:
            while not (self._started and self._left == 0):
                for key, _ in self._selector.select(BEAT_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    if data == b"" and key.fd == self._commands:
                        return 0  # the launcher has ended, or does not want this host
                    key.data(data)
                now = time.monotonic()
                if now >= look_at:  # not with each piece of output
                    look_at = now + LOOK_SECONDS
                    self._tell_patience()
                if now - self._heard > SILENCE_SECONDS:
                    # What has come meanwhile counts: this process may have waited for its output to be read.
                    unread, _, _ = select.select([self._commands], [], [], 0)
                    if not unread:
                        return 1
            self._drain()
            self.say(say="done", leaked=self._clean_up(LEAK_SECONDS))
            return 0
        except BrokenPipeError:
            return 1
        finally:
            self._clean_up(0.0)

    # -- commands

    def _obey(self, command: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        what = command.pop("do")
        try:
            getattr(self, f"_do_{what}")(**command)
        except Exception as error:  # the launcher shows it with the host's name
            self.say(say="error", what=what, text=f"{type(error).__name__}: {error}")

    def _do_beat(self) -> None:
        """The launcher is there."""

    def _do_look(self, program: str) -> None:
        self.say(say="facts", **asdict(lookout.facts(program)))

    def _do_listen(self) -> None:
        self._listener = lookout.Listener()
        self.say(say="listening", port=self._listener.port, token=self._listener.token)

    def _do_reach(self, targets: list[tuple[int, str, int, str]]) -> None:
        self.say(say="reached", ok=lookout.reached(targets))

    def _do_ports(self, address: str, count: int) -> None:
        self.say(say="ports", ports=free_ports(address, count))

    def _do_rendezvous(self, address: str) -> None:
        from tfdist.comm.hall import serve

        self._store = serve(address)
        self.say(say="rendezvous", port=self._store.server_port)

    def _do_start(
        self, env: dict[str, str], places: list[Seated], program: list[str], terminal: str
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        numbers = [Place.parse(word).number for word, _, _ in places]
        self._run_dir = run_dir = RunDir.create_for(numbers)
        events = Lines()
        self._watch(os.open(run_dir.events, os.O_RDWR), lambda data: self._pass_on(events.feed(data)))
        # Held open for as long as this process lives: rank.py ends with it.
        os.open(run_dir.alive, os.O_RDWR)
        if terminal:
            size, _, names = terminal.partition(":")
            self._terminal = terminal_for(run_dir, (names.split(","), bytes.fromhex(size)))
            if self._terminal is not None:
                self._watch(self._terminal.controller, self._printer(CHIEF, "out"))
        for number in numbers:
            for name in ("out", "err"):
                if (path := run_dir.stream(number, name)).is_fifo():
                    self._watch(os.open(path, os.O_RDWR), self._printer(number, name))
        self._left = len(places)
        self._started = True
        common = {**os.environ, **env, MARK: str(run_dir.path)}
        for word, own, arguments in places:
            argv = [sys.executable, "-m", "tfdist.launch.rank", *arguments, str(run_dir.path), *program]
            child = subprocess.Popen(argv, env={**common, **own}, stdin=subprocess.DEVNULL, stdout=2)
            place = Place.parse(word)
            self._children[place] = child
            threading.Thread(target=self._wait, args=(place, child), daemon=True).start()

    def _do_stop(self, signal: int, numbers: list[int]) -> None:
        for place, child in self._children.items():
            if place.number in numbers and child.poll() is None:
                child.send_signal(signal)

    # -- what ranks say

    def _watch(self, fd: int, act: Callable[[bytes], Any]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, act)

    def _printer(self, number: int, name: str) -> Callable[[bytes], None]:
        return lambda data: self.say(say="out", n=number, to=name, data=base64.b64encode(data).decode())

    def _pass_on(self, lines: list[str]) -> None:
        for line in lines:
            event = json.loads(line)
            kind, number = event["event"], event["rank"]
            if kind == "failed" and self._run_dir is not None:
                failure = self._run_dir.read_failure(number)
                if failure is not None:
                    self.say(say="failed", failure=asdict(failure))
            elif kind == "closed":
                self._left -= 1
            else:
                self.say(say="event", event=event)

    def _tell_patience(self) -> None:
        """Pass on how much time programs ask for, where that has changed."""
        run_dir = self._run_dir
        if run_dir is None:
            return
        for place in self._children:
            try:
                text = run_dir.patience_file(place.number).read_text()
            except FileNotFoundError:
                text = ""
            if text != self._patience.get(place.number, ""):
                self._patience[place.number] = text
                self.say(say="patience", n=place.number, text=text)

    def _wait(self, place: Place, child: subprocess.Popen[bytes]) -> None:
        """In a thread: wait for a rank.py; one that could not report is reported here."""
        status = child.wait()
        run_dir = self._run_dir
        if run_dir is None:
            return
        if status and run_dir.read_failure(place.number) is None:
            failure = Failure.of_status(place, child.pid, status)
            run_dir.write_failure(failure)
            run_dir.report("end", place.number, code=failure.code)
        run_dir.report("closed", place.number)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self.say(say="beat")
            except OSError:
                return

    # -- the end

    def _drain(self) -> None:
        """What was printed and reported until now. Commands can wait: there is nothing left to command."""
        self._selector.unregister(self._commands)
        while ready := self._selector.select(0):
            for key, _ in ready:
                key.data(os.read(key.fd, 1 << 16))

    def _clean_up(self, seconds: float) -> list[str]:
        """End what carries the run's mark, after a moment; names what was left."""
        if self._run_dir is None:
            return []
        left = processes.wait_gone(MARK, str(self._run_dir.path), seconds)
        names = processes.describe(left)
        processes.kill(left)
        self._run_dir.remove()
        return list(names)


def main() -> None:
    """Serve the launcher on standard input and output; what others print goes to stderr."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of sshd: the end of standard input says the same
    commands, answers = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.exit(Agent(commands, answers).run())


if __name__ == "__main__":
    main()
