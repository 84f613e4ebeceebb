"""What a job in containers is to be: plain values, checked."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.new_cluster import cluster_of, task_names
from tfdist.tf_config import Cluster, Task

PORT = 2222  # that of TensorFlow's tutorials, of Kubeflow's TFJob, and here of sshd too
IMAGE, SSH_IMAGE = "tfdist", "tfdist:ssh"  # what docker/Dockerfile makes


@dataclass(frozen=True)
class Wanted:
    """One job, each of whose tasks has a container of its own. Ranks of a ring are its workers.

    Attributes:
        command: what every task runs.
        workers: ranks of a ring, or workers.
        ps: parameter servers; with one or more there is a chief besides.
        evaluator: a task more, which validates.
        ssh: a ring that horovodrun starts over ssh; else the ranks find each other by TF_CONFIG.
        image: None for the one of docker/Dockerfile.
        gpus: GPUs of each worker. None for the other tasks: they hold no model that is trained.

    Raises:
        ValueError: a number out of range, or choices that exclude each other.
    """

    command: tuple[str, ...]
    workers: int
    ps: int = 0
    evaluator: bool = False
    ssh: bool = False
    image: str | None = None
    gpus: int = 0

    def __post_init__(self) -> None:
        if not self.command:
            raise ValueError("the command is empty, expected a program, such as python train.py.")
        for name, value, least in (("workers", self.workers, 1), ("ps", self.ps, 0), ("gpus", self.gpus, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}, expected {least} or more.")
        if self.ssh and self.ps:
            raise ValueError(f"ssh with {self.ps} ps, expected a ring: horovodrun starts the ranks of a ring.")
        if self.evaluator and not self.ps:
            raise ValueError("an evaluator without ps, expected 1 ps or more: workers alone have no evaluator.")
        if self.gpus and self.image is None:
            raise ValueError(
                f"gpus is {self.gpus} without an image, expected one with CUDA's libraries: {IMAGE} is for the CPU."
            )

    @property
    def image_name(self) -> str:
        """The image of every container."""
        return self.image or (SSH_IMAGE if self.ssh else IMAGE)

    def cluster(self) -> Cluster:
        """The tasks, each at a host of its name: what TF_CONFIG says where the network has such names."""
        names = task_names(self.ps, self.workers, self.evaluator)
        return cluster_of(names, [f"{service(Task.parse(name))}:{PORT}" for name in names])


def service(task: Task) -> str:
    """The task's name where a host is called after it: "worker-1", "chief"."""
    return f"{task.job}-{task.index}" if task.job in ("worker", "ps") else task.job
