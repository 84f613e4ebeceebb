"""Gives rank 0 a terminal where the command has one, so that progress bars redraw in place."""

from __future__ import annotations

import fcntl
import os
import pty
import sys
import termios
import tty

from tfdist.launch.rundir import RunDir


class Terminal:
    """A pseudo-terminal of the size of the real one, in place of rank 0's named pipes.

    Its output side is read through the run directory by the supervisor. Close it after the run.
    """

    def __init__(self, size: bytes):
        self.controller, self.user_side = pty.openpty()
        tty.setraw(self.user_side)  # bytes pass as they are; the real terminal translates them
        fcntl.ioctl(self.user_side, termios.TIOCSWINSZ, size)
        self.name = os.ttyname(self.user_side)

    def close(self) -> None:
        """Close both sides."""
        os.close(self.controller)
        os.close(self.user_side)


def terminal_here() -> tuple[list[str], bytes] | None:
    """Which of stdout and stderr are a terminal here, by their names "out" and "err", and its size.

    None where stdout is none.
    """
    names = [n for n, stream in (("out", sys.stdout), ("err", sys.stderr)) if stream.isatty()]
    if "out" not in names:
        return None
    return names, fcntl.ioctl(sys.stdout.fileno(), termios.TIOCGWINSZ, bytes(8))


def terminal_for(run_dir: RunDir, here: tuple[list[str], bytes] | None) -> Terminal | None:
    """Replace the pipes of rank 0 that end in a terminal; None where none does.

    Args:
        run_dir: of the run.
        here: the answer of `terminal_here`, perhaps another host's.
    """
    if here is None:
        return None
    names, size = here
    terminal = Terminal(size)
    for name in names:
        pipe = run_dir.stream(0, name)
        pipe.unlink()
        pipe.symlink_to(terminal.name)
    return terminal
