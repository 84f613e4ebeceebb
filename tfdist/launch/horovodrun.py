"""The process that is Horovod's launcher: `python -m tfdist.launch.horovodrun <its arguments>`.

`horovodrun` asks each framework whether Gloo or MPI was built in, and imports TensorFlow twice to
hear it: three seconds in front of every run. `installed.py` has answered that before this process
is started, so the question is dropped here and everything else is Horovod's own.

A program, imported by nothing: it and `comm/horovod.py` are the two files that load Horovod, and
this one only its launcher, which needs no TensorFlow.
"""

from __future__ import annotations


def main() -> None:
    """Run Horovod's command line, without its question."""
    from horovod.runner import launch

    from tfdist.launch.processes import die_with_parent

    die_with_parent()
    launch.gloo_built = launch.mpi_built = lambda verbose=False: True
    launch.run_commandline()


if __name__ == "__main__":
    main()
