"""Which process of a job this is, for the run directory and for messages. Pure."""

from __future__ import annotations

from dataclasses import dataclass

CHIEF = 0  # the number of rank 0, the chief, or worker/0 without one; `Cluster.tasks` begins with it


@dataclass(frozen=True)
class Place:
    """One process of a job.

    Attributes:
        number: counts the job's processes from 0; the one with 0 is the chief, which prints as it
            is. In a job of ranks it is the rank.
        task: "worker/1" in a job of tasks, "" for a rank.
    """

    number: int
    task: str = ""

    @property
    def who(self) -> str:
        """What messages call it: "rank 1", "worker/1"."""
        return self.task or f"rank {self.number}"

    @property
    def label(self) -> str:
        """What stands in brackets before its lines: "1", "worker/1"."""
        return self.task or str(self.number)

    def written(self) -> str:
        """The place as one word of a command line: "1", "3:worker/1"."""
        return f"{self.number}:{self.task}" if self.task else str(self.number)

    @classmethod
    def parse(cls, word: str) -> Place:
        """The opposite of `written`."""
        number, _, task = word.partition(":")
        return cls(int(number), task)
