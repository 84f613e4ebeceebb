"""The process that starts a cluster's tasks: `python -m tfdist.launch.tasks <rank.py's arguments>`.

For a job of tasks it is what Horovod's launcher is for ranks. It decides nothing: the
supervisor says when a task is to end, and this process waits until all have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import FrameType

from tfdist import tf_config
from tfdist.launch.place import CHIEF, Place
from tfdist.launch.rundir import MARK, Failure, RunDir
from tfdist.launch.task_plan import task_process
from tfdist.tf_config import Cluster

ALONE_SECONDS = 1.0  # for the tasks to end their programs themselves


class Tasks:
    """The processes that watch the tasks, from the start of the first to the end of the last."""

    def __init__(self, cluster: Cluster, run_dir: RunDir, arguments: list[str]):
        self.run_dir = run_dir
        self._stopped = False
        self._crashed = 0
        self._children: dict[Place, subprocess.Popen[bytes]] = {}
        signal.signal(signal.SIGTERM, self.stop)
        for number, task in enumerate(cluster.tasks()):
            if self._stopped:  # by a signal, in the meantime
                break
            process = task_process(cluster, task, arguments, sys.executable, os.environ)
            child = subprocess.Popen(process.argv, env=process.environment(os.environ))
            self._children[Place(number, task.name)] = child

    def stop(self, signum: int = signal.SIGTERM, frame: FrameType | None = None) -> None:
        """Start no more, and tell those that run to end."""
        self._stopped = True
        for child in list(self._children.values()):
            child.terminate()

    def wait(self) -> int:
        """Wait until all have ended; the exit code of the chief."""
        codes: dict[int, int] = {}
        with ThreadPoolExecutor(max(1, len(self._children))) as pool:
            waits = {pool.submit(child.wait): place for place, child in self._children.items()}
            for ended in as_completed(waits):
                status, place = ended.result(), waits[ended]
                codes[place.number] = status if status >= 0 else 128 - status
                if status and not self._stopped and self.run_dir.read_failure(place.number) is None:
                    self._unreported(place, status)
        return self._crashed or codes.get(CHIEF, 128 + signal.SIGTERM)

    def end_when_alone(self) -> None:
        """Wait (in a thread) for the end of the supervisor, then end what the tasks have not."""
        self.run_dir.wait_alone()
        # Not at once, as by `die_with_parent`: each rank.py would die with this process, before it
        # has ended what its program has started.
        time.sleep(ALONE_SECONDS)
        self.run_dir.remove()
        os._exit(128 + signal.SIGTERM)

    def _unreported(self, place: Place, status: int) -> None:
        """A process that watched a task has ended without a report, and its program with it."""
        if status > 0:  # it crashed, and said why on stderr
            self._crashed = status
            self.stop()
            return
        failure = Failure.of_status(place, self._children[place].pid, status)
        self.run_dir.write_failure(failure)
        self.run_dir.report("end", place.number, code=failure.code)


def main() -> None:
    """Start the tasks of the cluster in TF_CONFIG, and leave with the chief's exit code."""
    found = tf_config.from_env()
    if found is None:
        sys.exit("TF_CONFIG is not set, expected the cluster whose tasks are to be started.")
    tasks = Tasks(found[0], RunDir(os.environ[MARK]), sys.argv[1:])
    threading.Thread(target=tasks.end_when_alone, daemon=True).start()
    sys.exit(tasks.wait())


if __name__ == "__main__":
    main()
