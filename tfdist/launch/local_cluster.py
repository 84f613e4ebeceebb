"""All tasks of a parameter server on this machine, from one script or notebook."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
from types import TracebackType

from tfdist.cluster import PLACE_VARIABLES
from tfdist.launch.ports import cluster_on_free_ports
from tfdist.tf_config import Task

# Its standard input ends with the chief's process, however that ends. (The kernel's own signal for it comes when the
# thread that started the task ends.)
SERVE = """
import os, sys, threading
def end_with_chief():
    sys.stdin.buffer.read()
    os._exit(143)
threading.Thread(target=end_with_chief, daemon=True).start()
import tfdist
tfdist.serve()
"""


class LocalCluster:
    """Worker and ps tasks as processes of this machine; this process is the chief.

    ```python
    strategy = tfdist.ParameterServerStrategy(cluster=tfdist.LocalCluster(workers=2, ps=1))
    ```

    The tasks end with this process, however it ends, or before it by `close()` or at the end of a `with` block.

    Args:
      workers: number of worker tasks.
      ps: number of ps tasks.

    Attributes:
      cluster: the addresses, all on 127.0.0.1.
      processes: by task name, such as "worker/0".

    Raises:
      ValueError: a number below 1.
    """

    def __init__(self, workers: int = 2, ps: int = 1) -> None:
        for name, count in (("workers", workers), ("ps", ps)):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"LocalCluster: {name} is {count!r}, expected an integer >= 1.")
        self.cluster = cluster_on_free_ports(ps, workers)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for task in self.cluster.tasks():
            if not task.is_chief:
                self.processes[task.name] = self._start(task)
        atexit.register(self.close)  # after the chief has dismissed them: for what does not listen

    def _start(self, task: Task) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if name not in PLACE_VARIABLES}
        env |= {"TF_CONFIG": self.cluster.tf_config(task), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        # Nobody at the keyboard means a task by Ctrl-C: the chief ends it.
        return subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def restart(self, name: str) -> None:
        """Starts a task that has ended again, at its address.

        Raises:
          ValueError: there is no such task, or it still runs.
        """
        if name not in self.processes:
            raise ValueError(f"LocalCluster has no task {name!r}; it has {', '.join(self.processes)}.")
        if self.processes[name].poll() is None:
            raise ValueError(f"{name} still runs, as process {self.processes[name].pid}.")
        _close(self.processes[name])
        job, index = name.split("/")
        self.processes[name] = self._start(Task(job, int(index)))

    def close(self, seconds: float = 5.0) -> None:
        """Ends the tasks that are still there."""
        for process in self.processes.values():
            process.terminate()
            process.send_signal(signal.SIGCONT)  # or one that is stopped would not hear
            _close(process)
        for process in self.processes.values():
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close(process: subprocess.Popen[bytes]) -> None:
    """Ends its standard input, by which it would end too."""
    if process.stdin is not None:
        process.stdin.close()
