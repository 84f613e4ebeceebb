"""The hosts that an elastic job may use now: what a script of the user's prints, or a fixed list."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tfdist.launch.hosts import Host, parse_hosts

SECONDS = 10.0  # for the script


class DiscoveryError(RuntimeError):
    """The script failed; the message says how."""


class Discovery:
    """Asks for hosts.

    Args:
        script: a program that prints a host a line, as `host1:2` (Horovod's form); None for `fixed`.
        fixed: the hosts where there is no script.
    """

    def __init__(self, script: str | None, fixed: Sequence[Host] = ()):
        self._script, self._fixed = script, tuple(fixed)

    def hosts(self) -> tuple[Host, ...]:
        """Those that there are now, perhaps none.

        Raises:
            DiscoveryError: the script is missing, fails, takes too long, or prints something else.
        """
        if self._script is None:
            return self._fixed
        try:
            done = subprocess.run(
                [self._script], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            raise DiscoveryError(f"{self._script} took longer than {SECONDS:g} s") from None
        except OSError as error:
            raise DiscoveryError(f"{self._script} could not be run: {error.strerror or error}") from error
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [""])[-1]
            raise DiscoveryError(f"{self._script} ended with exit code {done.returncode}: {said}")
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        try:
            return parse_hosts(",".join(lines), f"a line of {self._script}") if lines else ()
        except ValueError as error:
            raise DiscoveryError(str(error)) from error
