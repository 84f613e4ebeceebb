"""A rank's or task's program: `python -m tfdist.launch.program PLACE KIND TARGET ARGS...`.

Runs the user's script or module as `__main__`, as `python` itself would, or a pickled function. An
exception is recorded the moment it reaches the top, before Horovod's shutdown at exit makes the
other ranks fail too: so it is known which rank was the first.
"""

from __future__ import annotations

import io
import os
import runpy
import socket
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

from tfdist.launch.place import Place
from tfdist.launch.processes import die_with_parent
from tfdist.launch.rundir import MARK, Failure, RunDir


def run_script(path: str, args: list[str]) -> None:
    """Run a file as `python path args...` does; a directory or zip file needs a `__main__.py`."""
    sys.argv = [path, *args]
    if not Path(path).is_file() or path.endswith((".zip", ".pyz")):
        sys.path.pop(0)
        runpy.run_path(path, run_name="__main__")
        return
    sys.path[0] = str(Path(path).resolve().parent)
    # A module of its own that stays in sys.modules: worker processes, pickles and functions at
    # exit look for the program's names in `__main__`.
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    vars(module).update(__file__=path, __loader__=loader, __cached__=None, __spec__=None)
    sys.modules["__main__"] = module
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(module))


def run_module(name: str, args: list[str]) -> None:
    """Run a module as `python -m name args...` does."""
    sys.argv = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_call(payload: str, args: list[str]) -> None:
    """Run the function that `spawn` has stored."""
    from tfdist.launch.spawn import run_payload

    run_payload(Path(payload))


RUN = {"script": run_script, "module": run_module, "call": run_call}


def own_frames_cut(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames between the interpreter and the user's program."""
    launchers = (str(Path(__file__).parent), "<frozen runpy>", runpy.__file__)
    cut = trace
    while cut is not None and cut.tb_frame.f_code.co_filename.startswith(launchers):
        cut = cut.tb_next
    return cut or trace


def record(run_dir: RunDir, place: Place, error: BaseException, code: int) -> None:
    """Store how the program failed, for the supervisor to show."""
    trace = own_frames_cut(error.__traceback__)
    run_dir.write_failure(
        Failure(
            rank=place.number,
            host=socket.gethostname(),
            pid=os.getpid(),
            code=code,
            at=time.time(),
            kind=tuple(c.__name__ for c in type(error).__mro__ if c is not object),
            message=str(error),
            traceback="".join(traceback.format_exception(type(error), error, trace)),
            task=place.task,
        )
    )


def exit_code(error: SystemExit) -> int:
    """The code with which the interpreter leaves for this exception."""
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def show_interrupt(kind: type, error: BaseException, trace: TracebackType | None) -> None:
    """Say where Ctrl-C met the program; one rank's word is enough."""
    traceback.print_exception(kind, error, own_frames_cut(trace))


def main() -> None:
    """Run the program that the command line names, and record how it fails."""
    die_with_parent()
    word, kind, target, *args = sys.argv[1:]
    place = Place.parse(word)
    run_dir = RunDir(os.environ[MARK])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Whole lines: Horovod's launcher asks for unbuffered output, whose pieces would mix.
            stream.reconfigure(line_buffering=True, write_through=False)
    try:
        RUN[kind](target, args)
    except SystemExit as error:
        if code := exit_code(error):
            record(run_dir, place, error, code)
        raise
    except KeyboardInterrupt:
        sys.excepthook = show_interrupt if place.number == 0 else lambda *error: None
        raise
    except BaseException as error:
        record(run_dir, place, error, 1)
        if sys.excepthook is not sys.__excepthook__:  # the user's own, a tracker's for example
            sys.excepthook(type(error), error, own_frames_cut(error.__traceback__))
        sys.exit(1)


if __name__ == "__main__":
    main()
