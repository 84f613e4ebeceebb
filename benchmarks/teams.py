"""Starts the ranks of each variant, lets one variant at a time run, and ends them all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tfdist.launch.processes import die_with_parent

ROOT = Path(__file__).resolve().parent.parent
CALM = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": "",
    "KERAS_BACKEND": "tensorflow",
    # Teams are frozen for minutes between their turns; Horovod and the roll call must not count that.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600",
    "TFDIST_DEADLINE": "3600",
}
START_SECONDS = 120.0


@dataclass(frozen=True)
class Team:
    """One variant to measure: which module (worker.VARIANTS), on how many ranks, over which controller."""

    name: str
    variant: str
    ranks: int = 1
    controller: str = "gloo"
    python: str = sys.executable
    env: Mapping[str, str] = field(default_factory=dict)
    pinned: bool = True  # to a core of its own; a chief pins its workers instead
    frozen: bool = True  # between its turns; not where it has processes of its own that would miss it

    def commands(self, meeting: str) -> list[tuple[list[str], dict[str, str]]]:
        """(argv, environment) of each process to start."""
        worker = [self.python, "-m", "benchmarks.worker", self.variant]
        if not self.pinned:
            return [(worker, {**self.env, "BENCHMARK_UNPINNED": "1"})]
        if self.variant in ("torch", "split torch"):
            shared = {**self.env, "WORLD_SIZE": str(self.ranks), "BENCHMARK_MEETING": meeting}
            return [(worker, {**shared, "RANK": str(rank)}) for rank in range(self.ranks)]
        if self.ranks == 1:
            return [(worker, dict(self.env))]
        if self.controller == "mpi":
            mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            return [([*mpirun, "-np", str(self.ranks), *worker], dict(self.env))]
        horovodrun = [str(Path(self.python).parent / "horovodrun"), "--gloo", "--disable-cache"]
        return [([*horovodrun, "-np", str(self.ranks), *worker], dict(self.env))]


class Teams:
    """A context manager: the teams' processes, all frozen but the one whose turn it is.

    Args:
        teams: to start.
        show: what they print, instead of keeping it for errors.
        deadline: seconds of a call.
    """

    def __init__(self, teams: Sequence[Team], show: bool = False, deadline: float = 600.0) -> None:
        self.teams, self._show, self._deadline = list(teams), show, deadline
        self._ranks: dict[str, dict[int, tuple[Connection, int]]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.mkdtemp(prefix="benchmark-")
        self._key = secrets.token_hex(16)
        self._listener = Listener(("127.0.0.1", 0), backlog=16, authkey=self._key.encode())

    def __enter__(self) -> Teams:
        # A frozen process cannot notice that this one was told to end.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            for team in self.teams:
                self._start(team)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, ranks in self._ranks.items():
            self._signal(name, signal.SIGCONT)
            for connection, _ in ranks.values():
                with contextlib.suppress(OSError):  # it has ended, which is what was wanted
                    connection.send(None)
        self._listener.close()
        ends = time.monotonic() + 10
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, ends - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):  # also what a process that crashed has left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for ranks in self._ranks.values():
            for _, pid in ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, team: Team, method: str, *args: Any) -> list[Any]:
        """Calls a method on all ranks of a team while the others are frozen; results by rank.

        Raises:
            RuntimeError: a rank failed; the message holds its traceback.
        """
        if team.frozen:
            self._signal(team.name, signal.SIGCONT)
        ranks = self._ranks[team.name]
        for connection, _ in ranks.values():
            connection.send((method, args))
        answers = [self._receive(team, ranks[rank][0], self._deadline) for rank in sorted(ranks)]
        if team.frozen:
            self._signal(team.name, signal.SIGSTOP)
        for problem, _ in answers:
            if problem:
                raise RuntimeError(f"{team.name}: {method}{args} failed:\n{problem}")
        return [result for _, result in answers]

    def pids(self, team: Team) -> list[int]:
        return [pid for _, pid in self._ranks[team.name].values()]

    def _start(self, team: Team) -> None:
        output = None if self._show else open(os.path.join(self._folder, f"{team.name}.txt"), "wb")  # noqa: SIM115
        self._ranks[team.name] = {}
        for argv, env in team.commands(os.path.join(self._folder, f"{team.name}.meeting")):
            host, port = self._listener.address  # type: ignore[misc]
            process = subprocess.Popen(
                argv,
                cwd=ROOT,
                env={
                    **os.environ, **CALM, **env, "BENCHMARK_ADDRESS": f"{host}:{port}",
                    "BENCHMARK_KEY": self._key,
                    "PYTHONPATH": os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), str(ROOT)]),
                },
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
            self._started.append(process)
        for _ in range(team.ranks):
            self._accept(team)
        for connection, _ in self._ranks[team.name].values():  # only now: the ranks wait for each other
            problem, _ = self._receive(team, connection, START_SECONDS)
            if problem:
                raise RuntimeError(f"{team.name} did not start:\n{problem}")
        if team.frozen:
            self._signal(team.name, signal.SIGSTOP)

    def _accept(self, team: Team) -> None:
        self._listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
        try:
            connection = self._listener.accept()
        except TimeoutError:
            raise RuntimeError(f"{team.name} did not start in {START_SECONDS:g} s:\n{self._said(team)}") from None
        rank, pid = self._receive(team, connection, START_SECONDS)
        self._ranks[team.name][rank] = (connection, pid)

    def _receive(self, team: Team, connection: Connection, seconds: float) -> Any:
        if not wait([connection], seconds):
            raise RuntimeError(f"{team.name} gave no answer in {seconds:g} s:\n{self._said(team)}")
        try:
            return connection.recv()
        except EOFError:
            raise RuntimeError(f"{team.name} ended:\n{self._said(team)}") from None

    def _signal(self, name: str, number: int) -> None:
        for _, pid in self._ranks[name].values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _said(self, team: Team) -> str:
        """The end of what a team printed."""
        file = Path(self._folder, f"{team.name}.txt")
        return file.read_text(errors="replace")[-3000:] if file.exists() else "(its output is above)"
