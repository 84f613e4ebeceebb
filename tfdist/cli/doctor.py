"""`tfdist doctor`: prints what `tfdist.doctor` found."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table

from tfdist.doctor.facts import Facts
from tfdist.doctor.findings import Finding, findings

NONE = "none"


def rows(facts: Facts) -> list[tuple[str, str]]:
    """The lines of the table: name and value."""
    tensorflow = ", ".join(f"{name} {version}" for name, version in facts.tensorflow.items())
    usable, all_cores = facts.cores
    # Horovod's Adasum for CPUs is written on MPI.
    extra = ", Adasum" if "mpi" in facts.operations else ""
    return [
        ("Python", ".".join(map(str, facts.python))),
        ("TensorFlow", tensorflow or NONE),
        ("Keras", facts.keras or NONE),
        ("Keras backend", f"{facts.backend[0]} (by {facts.backend[1]})"),
        ("Horovod", facts.horovod or NONE),
        ("  controllers", ", ".join(facts.controllers) or NONE),
        ("  operations", (", ".join(facts.operations) + extra) or NONE),
        ("MPI", facts.mpirun or NONE),
        ("GPUs", _gpus(facts)),
        *([("CUDA", _cuda(facts))] if facts.cuda else []),
        ("cores", f"{usable}" if usable == all_cores else f"{usable} of {all_cores} usable"),
    ]


def _gpus(facts: Facts) -> str:
    names = ", ".join(facts.gpus) or NONE
    if not facts.gpus and not facts.tensorflow_gpus:
        return NONE
    return f"{names} (TensorFlow sees {facts.tensorflow_gpus})"


def _cuda(facts: Facts) -> str:
    return f"TensorFlow's {facts.cuda}, NCCL {facts.nccl or NONE}, nvcc {facts.nvcc or NONE}"


def show(console: Console, facts: Facts, found: list[Finding]) -> None:
    """Print table and findings. Wide lines wrap at words and are never cut."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(facts):
        table.add_row(name, value)
    console.print(table, markup=False, highlight=False)
    for finding in found:
        console.print()
        label, style = ("wrong", "bold red") if finding.wrong else ("note", "bold yellow")
        console.print(label, style=style, end=" ")
        console.print(finding.what, markup=False, highlight=False, soft_wrap=True)
        console.print(f"  -> {finding.mend}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    count = sum(finding.wrong for finding in found)
    console.print(f"{count} wrong" if count else "All is well.", highlight=False)


@click.command("doctor")
def doctor() -> None:
    """Print what is installed here, what is wrong with it, and how to mend it.

    Ends with exit code 1 when something is wrong.
    """
    # Late: `tfdist --help` lists this verb and needs none of it.
    from tfdist.doctor import probe

    console = Console()
    if console.is_terminal:
        with console.status("Importing TensorFlow and Horovod"):
            facts = probe.look()
    else:
        facts = probe.look()
    found = findings(facts)
    show(console, facts, found)
    sys.exit(1 if any(finding.wrong for finding in found) else 0)
