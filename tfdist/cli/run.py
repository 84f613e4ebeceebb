"""`tfdist run`: train on several processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tfdist.cli._elastic import Elastic, check_elastic, elastic_options, run_elastic
from tfdist.cli._over_hosts import OverHosts, hosts_options
from tfdist.launch.hosts import seats, total_slots
from tfdist.launch.installed import controller_problem
from tfdist.launch.plan import CONTROLLERS, Job, Program
from tfdist.launch.ports import cluster_on_free_ports
from tfdist.launch.run import AnyJob
from tfdist.launch.run import dry_run as describe
from tfdist.launch.run import run as run_job
from tfdist.launch.task_plan import NO_RESTARTS, TaskJob
from tfdist.new_cluster import task_names

RESTARTS = 3


@click.command(
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
)
@click.option("-np", "--ranks", type=click.IntRange(min=1), help="Number of ranks.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Instead of -np: number of workers of a parameter-server job; it has a chief besides. With "
    "--ps 0 these are all tasks, and hold the stages of one model.",
)
@click.option(
    "--ps",
    type=click.IntRange(min=0),
    help="With --workers: number of parameter servers; 0 for ModelParallelStrategy.  [default: 1]",
)
@click.option(
    "--restarts",
    type=click.IntRange(min=0),
    help="With --workers: how often a worker or ps that is killed is started again.  [default: 3]",
)
@click.option(
    "--evaluator",
    is_flag=True,
    help="With --workers: an evaluator besides, which validates while training goes on.",
)
@click.option(
    "--controller",
    type=click.Choice(CONTROLLERS),
    help="With -np: how the ranks find each other and exchange data.  [default: gloo]",
)
@click.option(
    "--cores-per-rank",
    type=click.IntRange(min=1),
    help="Bind each process (rank or task) to cores of its own, and set its thread counts. With "
    "--workers it counts for every task alike.",
)
@hosts_options
@elastic_options
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False),
    help="Write the output of each rank or task to files of its own there, besides showing it.",
)
@click.option("-m", "--module", is_flag=True, help="PROGRAM is a module, as in `python -m`.")
@click.option("--dry-run", is_flag=True, help="Print the command and environment, start nothing.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    ranks: int | None,
    workers: int | None,
    ps: int | None,
    restarts: int | None,
    evaluator: bool,
    controller: str | None,
    cores_per_rank: int | None,
    module: bool,
    dry_run: bool,
    log_dir: str | None,
    program: str,
    args: tuple[str, ...],
    over: OverHosts | None,
    elastic: Elastic | None,
) -> None:
    """Run PROGRAM with its ARGS in several processes, of this machine or of several hosts.

    With -np these are the ranks of a ring. With --workers they are the tasks of a parameter-server
    job: a chief, --ps parameter servers, the workers and, with --evaluator, an evaluator, each with
    its own TF_CONFIG. With --workers and --ps 0 they are workers alone, over whose devices a
    ModelParallelStrategy lays one model; worker 0 is what the chief is elsewhere.

    Rank 0 or the chief prints as usual, the lines of the others carry their rank or task. When one
    fails the rest is ended, its traceback is shown last, and its exit code is that of this command.
    A worker or ps of a parameter-server job that is killed by a signal is started again, and
    training goes on. When the chief ends well the other tasks have 10 seconds to end as well.
    Options for this command stand before PROGRAM.

    With -H or --hostfile the processes are dealt out to the hosts' slots, and started by ssh. Every
    host needs the same Python environment and program at the same paths. -np is all slots unless given.

    With --min-np or --max-np the ring is elastic: where a rank dies or hosts change, all ranks end, and
    those that are there then go on from the last checkpoint (tfdist.Checkpoint).

    \b
    tfdist run -np 2 train.py --epochs 3
    tfdist run -np 4 --cores-per-rank 1 -m mypackage.train
    tfdist run --ps 1 --workers 2 train.py --epochs 3
    tfdist run --ps 0 --workers 2 train.py --epochs 3
    tfdist run -H host1:2,host2:2 train.py --epochs 3
    tfdist run --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh train.py
    """
    if elastic is not None:
        check_elastic(ranks, workers, ps, controller)
    elif over is not None and ranks is None and workers is None and ps is None:
        ranks = total_slots(over.hosts)
    check_choice(1 if elastic else ranks, workers, ps, controller, restarts, evaluator)
    if not module and not Path(program).exists():
        raise click.BadParameter(
            f"there is no file {program!r}; to run a module write -m {program}.",
            param_hint="PROGRAM",
        )
    what = Program("module" if module else "script", program, args)
    if elastic is not None:
        sys.exit(run_elastic(elastic, over, what, cores_per_rank, dry_run, log_dir))
    job: AnyJob
    servers = 1 if ps is None else ps
    tasks = () if workers is None else task_names(servers, workers, evaluator)
    again = (RESTARTS if servers and tasks else 0) if restarts is None else restarts
    if over is not None:
        check_slots(over, len(tasks) or ranks or 0, controller, program)
    if over is not None and not over.here:
        job = over.job(what, over.hosts, tasks, ranks or 0, cores_per_rank, again)
    elif workers is not None:
        job = TaskJob(what, cluster_on_free_ports(servers, workers, evaluator), cores_per_rank, again)
    else:
        job = Job(what, ranks or 1, controller or "gloo", cores_per_rank)
    if dry_run:
        click.echo(describe(job))
        return
    if isinstance(job, Job) and job.ranks > 1 and (problem := controller_problem(job.controller)):
        raise click.ClickException(problem)
    try:
        sys.exit(run_job(job, log_dir))
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--log-dir") from error


def check_slots(over: OverHosts, count: int, controller: str | None, program: str) -> None:
    """UsageError where hosts have fewer slots than there are processes, or MPI would have to start them."""
    try:
        seats(over.hosts, count)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if controller == "mpi" and not over.here:
        names = ",".join(f"{host.name}:{host.slots}" for host in over.hosts)
        raise click.UsageError(
            "--controller mpi starts on other hosts by MPI's own launcher: "
            f"mpirun -np {count} -H {names} python {program}"
        )


def check_choice(
    ranks: int | None,
    workers: int | None,
    ps: int | None,
    controller: str | None,
    restarts: int | None = None,
    evaluator: bool = False,
) -> None:
    """UsageError unless the options choose one kind of job, ranks or tasks, and no more."""
    if restarts is not None and workers is None:
        raise click.UsageError("--restarts is for the tasks of a parameter-server job (--workers).")
    if ranks is not None and (workers is not None or ps is not None):
        other = "--workers" if workers is not None else "--ps"
        raise click.UsageError(
            f"-np and {other} exclude each other: -np starts the ranks of a ring, --workers (with "
            "--ps) the tasks of a parameter-server job."
        )
    if evaluator and workers is None:
        raise click.UsageError("--evaluator needs --workers: it is one of the tasks.")
    if ps == 0 and restarts:
        raise click.UsageError(f"--restarts goes with ps, and --ps is 0: {NO_RESTARTS}.")
    if ps == 0 and evaluator:
        raise click.UsageError("--evaluator goes with ps, and --ps is 0: workers alone have none.")
    if ranks is None and workers is None:
        if ps is not None:
            raise click.UsageError("--ps needs --workers, the number of workers beside the ps.")
        raise click.UsageError(
            "Missing option '-np' (ranks of a ring) or '--workers' (workers of a parameter-server "
            "job)."
        )
    if workers is not None and controller is not None:
        raise click.UsageError(
            "--controller is for ranks (-np): tasks (--workers) exchange data by gRPC."
        )
