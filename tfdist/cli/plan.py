"""`tfdist plan`: what training a saved model on several devices would bring, without them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfdist.planner import picture
from tfdist.planner.amounts import read_bytes
from tfdist.planner.partition import BALANCES
from tfdist.planner.schedule import SCHEDULES

if TYPE_CHECKING:
    from tfdist.planner.outlook import Report
    from tfdist.planner.plan import Plan

STRATEGIES = ("split",)  # those that can be planned for
NARROWEST = 80  # columns of the report
HDF5 = b"\x89HDF\r\n\x1a\n"
BEGINNINGS = {".keras": b"PK", ".h5": HDF5, ".hdf5": HDF5}  # of files, by how their names end


def _bytes(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else read_bytes(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _number(_ctx: click.Context, _param: click.Parameter, value: str) -> int | str:
    if value == "auto" or (value.isdecimal() and int(value) > 0):
        return value if value == "auto" else int(value)
    raise click.BadParameter(f'{value!r} is neither a number of at least 1 nor "auto".')


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="split",
    show_default=True,
    help="split: the model's layers over the devices (ModelParallelStrategy).",
)
@click.option("--devices", type=click.IntRange(min=2), required=True, help="How many there will be.")
@click.option("--batch", type=click.IntRange(min=1), required=True, help="Samples of a batch.")
@click.option(
    "--balance",
    type=click.Choice(BALANCES),
    default="time",
    show_default=True,
    help="What the stages are to be even by.",
)
@click.option(
    "--microbatches",
    metavar="NUMBER",
    callback=_number,
    default="auto",
    help="Of a batch.  [default: auto, four for each stage after the first]",
)
@click.option(
    "--schedule",
    type=click.Choice(sorted(SCHEDULES)),
    default="1f1b",
    show_default=True,
    help="When each stage does what.",
)
@click.option(
    "--recompute", is_flag=True, help="Compute forwards again rather than keep activations."
)
@click.option(
    "--memory", metavar="BYTES", callback=_bytes, help="What a device may take, such as 8GB."
)
@click.option(
    "--bandwidth",
    metavar="BYTES",
    callback=_bytes,
    help="Bytes a second between devices, each way, such as 12GB.  [default: that of a copy here]",
)
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the plan, for ModelParallelStrategy(balance=tfdist.Plan.load(...)).",
)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw a step as a PNG (needs matplotlib).",
)
def plan(
    model: Path,
    strategy: str,
    devices: int,
    batch: int,
    balance: str,
    microbatches: int | str,
    schedule: str,
    recompute: bool,
    memory: float | None,
    bandwidth: float | None,
    save: Path | None,
    timeline: Path | None,
) -> None:
    """Plan the training of MODEL, a saved Keras model, on devices that need not be here.

    Its operations are timed on one device of this machine, the first GPU or else the CPU. The
    report says where the model is cut, what each stage takes, how fast a step will be, and whether
    data parallelism would be faster. Nothing is trained.

    \b
    tfdist plan model.keras --devices 4 --batch 256
    tfdist plan model.keras --devices 2 --batch 64 --memory 8GB --save plan.json
    tfdist plan model.keras --devices 4 --batch 256 --bandwidth 12GB --timeline step.png
    """
    if timeline is not None:
        try:
            picture.check()
        except ModuleNotFoundError as error:
            raise click.ClickException(str(error)) from None
    _check_file(model)
    for path in (save, timeline):
        if path is not None and not path.absolute().parent.is_dir():
            raise click.ClickException(f"there is no directory {path.absolute().parent} to write to.")
    asked = {
        "balance": balance,
        "microbatches": microbatches,
        "schedule": schedule,
        "recompute": recompute,
        "memory": memory,
        "batch_size": batch,
    }
    found, report = _planned(model, devices, asked, bandwidth)
    click.echo(report.text(max(shutil.get_terminal_size((NARROWEST, 24)).columns - 1, NARROWEST)))
    try:
        if save is not None:
            found.save(save)
            click.echo(f"\n{save}: the plan, for tfdist.Plan.load")
        if timeline is not None:
            report.timeline(timeline)
            click.echo(f"\n{timeline}: a step, by time")
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'a file'}: {error.strerror}.") from None


def _check_file(path: Path) -> None:
    """ClickException unless it looks like a file with a Keras model: before TensorFlow is loaded."""
    expected = "expected a model, as model.save('model.keras') writes."
    if not path.exists():
        raise click.ClickException(f"there is no file {path}; {expected}")
    if path.name.endswith(".weights.h5"):
        raise click.ClickException(f"{path} holds weights only; {expected}")
    if path.is_dir():
        raise click.ClickException(f"{path} is a directory; {expected}")
    try:
        with path.open("rb") as file:
            begins = file.read(len(HDF5))
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}.") from None
    if path.suffix not in BEGINNINGS or not begins.startswith(BEGINNINGS[path.suffix]):
        raise click.ClickException(f"{path} is no file of Keras; {expected}")


def _planned(
    model: Path, devices: int, asked: dict[str, Any], bandwidth: float | None
) -> tuple[Plan, Report]:
    """With TensorFlow, which is loaded here: `--help` needs none of it."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdist.trainers import split_forecast

    try:
        return split_forecast.forecast(model, devices, asked, bandwidth)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None
