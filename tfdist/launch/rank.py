"""The process that starts and watches one rank's program: `python -m tfdist.launch.rank DIR ...`.

Horovod's launcher starts it once per rank, tasks.py once per task. It connects its output to the
run's directory, binds cores, runs the program in a child of its own process group and reports how
that ended. Signals to stop are passed on; what has not ended `STOP_SECONDS` later is killed, or as
much later as the program has asked for (tfdist/patience.py). Where the supervisor disappears, the
program is killed too.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import FrameType

from tfdist.cluster import World
from tfdist.launch.place import Place
from tfdist.launch.plan import program_argv, rank_cores, rank_env
from tfdist.launch.processes import die_with_parent, signal_group
from tfdist.launch.rundir import Failure, RunDir
from tfdist.patience import VARIABLE, asked

STOP_SECONDS = 4.0  # below the 5 s after which Horovod's launcher kills what it told to stop


class Rank:
    """One rank's program, from its start to the report of its end."""

    def __init__(
        self, place: Place, run_dir: RunDir, argv: list[str], env: dict[str, str], restarts: int = 0
    ):
        self.place = place
        self.run_dir = run_dir
        self.told = False
        self._left = restarts
        self._argv, self._env = argv, env
        self.child = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._argv, env=self._env, start_new_session=True)

    def stop(self, signum: int, frame: FrameType | None = None) -> None:
        """Pass a signal to stop to the program's group, once; time kills what ignores it.

        Horovod's launcher and the supervisor may both tell this rank to stop.
        """
        if self.told:
            return
        self.told = True
        patience = 0.0
        if signum != signal.SIGINT:
            patience = asked(self.run_dir.patience_file(self.place.number))
        if patience:  # it goes on for a step, and needs what it has started
            os.kill(self.child.pid, signum)
        else:
            signal_group(self.child.pid, signum)
        signal.setitimer(signal.ITIMER_REAL, max(STOP_SECONDS, patience))

    def kill(self, signum: int, frame: FrameType | None) -> None:
        """End the program's group at once (the alarm that `stop` has set)."""
        signal_group(self.child.pid, signal.SIGKILL)

    def kill_when_alone(self) -> None:
        """Wait (in a thread) for the end of the supervisor, then end everything here."""
        self.run_dir.wait_alone()
        signal_group(self.child.pid, signal.SIGKILL)
        self.run_dir.remove()  # nobody else will
        os._exit(128 + signal.SIGTERM)

    def wait(self) -> int:
        """Wait for the program, report a failure that it could not report, return its code.

        A program that was killed is started again, as long as that is allowed.
        """
        status = self.child.wait()
        while status < 0 and self._left > 0 and not self.told:
            self._left -= 1
            signal_group(self.child.pid, signal.SIGKILL)  # what it has started
            name = signal.Signals(-status).name
            print(f"tfdist: ended by {name}; started again", file=sys.stderr, flush=True)
            self.child = self._start()
            if self.told:  # in the meantime: the signal went to the one before
                signal_group(self.child.pid, signal.SIGTERM)
            status = self.child.wait()
        at = time.time()
        code = status if status >= 0 else 128 - status
        if self.told:
            signal_group(self.child.pid, signal.SIGKILL)  # worker processes that ignored the signal
        rank = self.place.number
        if code and self.run_dir.read_failure(rank) is None:
            failure = Failure.of_status(self.place, self.child.pid, status, at, self.told)
            self.run_dir.write_failure(failure)
        if not self.run_dir.report("end", rank, code=code):
            self.run_dir.remove()
        return code


def connect_output(run_dir: RunDir, rank: int) -> None:
    """Make stdout and stderr of this process and its children the run directory's streams."""
    for name, number in (("out", 1), ("err", 2)):
        stream = os.open(run_dir.stream(rank, name), os.O_WRONLY | os.O_NOCTTY)
        os.dup2(stream, number)
        os.close(stream)


def main() -> None:
    """Set the stage for one rank's program, run it, and leave with its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tfdist.launch.rank")
    parser.add_argument("--place", type=Place.parse, help="of a task; a rank asks its launcher")
    parser.add_argument("--local-rank", type=int, help="of a task, where others are on other hosts")
    parser.add_argument("--cores-per-rank", type=int, default=None)
    parser.add_argument("--restarts", type=int, default=0, help="of a killed worker or ps")
    parser.add_argument("run_dir")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    die_with_parent()
    run_dir = RunDir(options.run_dir)
    if options.place is not None:
        place = options.place
        # Without the option all tasks are on this host.
        local_rank = place.number if options.local_rank is None else options.local_rank
    else:
        world = World.from_env()
        place, local_rank = Place(world.rank), world.local_rank
    connect_output(run_dir, place.number)
    if options.cores_per_rank is not None and hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, rank_cores(mine, local_rank, options.cores_per_rank))
    env = rank_env(os.environ, place.number, options.cores_per_rank)
    env[VARIABLE] = str(run_dir.patience_file(place.number))
    argv = program_argv(sys.executable, place, options.program)
    restarts = options.restarts if place.task.startswith(("worker/", "ps/")) else 0
    rank = Rank(place, run_dir, argv, env, restarts)
    signal.signal(signal.SIGALRM, rank.kill)
    signal.signal(signal.SIGTERM, rank.stop)
    signal.signal(signal.SIGINT, rank.stop)
    signal.signal(signal.SIGUSR1, rank.stop)
    threading.Thread(target=rank.kill_when_alone, daemon=True).start()
    run_dir.report("start", place.number, pid=os.getpid(), host=socket.gethostname())
    sys.exit(rank.wait())


if __name__ == "__main__":
    main()
