"""How a run ended, as the supervisor hands it to whoever started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.launch.rundir import Failure


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        code: exit code of the culprit; 128 + signal when interrupted, unless what had asked for time
            has ended as it meant to; 0 when all went well.
        failures: one per rank that failed.
        afterwards: failures after the chief of a parameter-server job had ended well.
        lingering: the tasks that had to be ended some time after that.
        culprit: the failure to blame, None if there is none.
        launcher: what the launcher itself printed.
        unfinished: ranks that had not ended at the deadline; empty if it was kept.
        leaked: processes that outlived a run that went well, and were killed.
        tails: last lines on stderr by rank.
        interrupted: the signal that ended the run, 0 for none.
    """

    code: int
    failures: tuple[Failure, ...]
    afterwards: tuple[Failure, ...]
    lingering: tuple[str, ...]
    culprit: Failure | None
    launcher: str
    unfinished: tuple[int, ...]
    leaked: tuple[str, ...]
    tails: Mapping[int, str]
    interrupted: int
