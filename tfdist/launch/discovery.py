"""The hosts that an elastic job may use now: what a script of the user's prints, or a fixed list."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Sequence

from tfdist.launch.hosts import Host, parse_hosts
from tfdist.launch.processes import signal_group

DRAINED = re.compile(r"[^:\s]+:0+")  # a host that is to get nothing
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
        code, out, err = self._run(self._script)
        if code:
            said = (err.strip().splitlines() or [""])[-1]
            raise DiscoveryError(f"{self._script} ended with exit code {code}: {said}")
        lines = [line.partition("#")[0].strip() for line in out.splitlines()]
        lines = [line for line in lines if line and not DRAINED.fullmatch(line)]
        try:
            return parse_hosts(",".join(lines), f"a line of {self._script}") if lines else ()
        except ValueError as error:
            raise DiscoveryError(str(error).removesuffix(".")) from error

    @staticmethod
    def _run(script: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; whatever the script has started ends with it."""
        try:
            process = subprocess.Popen(
                [script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise DiscoveryError(f"{script} could not be run: {error.strerror or error}") from error
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise DiscoveryError(f"{script} took longer than {SECONDS:g} s") from None
        finally:
            signal_group(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
