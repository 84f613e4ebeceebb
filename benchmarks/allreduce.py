"""Bus bandwidth of the all-reduce: `python benchmarks/allreduce.py --controllers gloo mpi`.

NCCL's definition: 2 (n - 1) / n * bytes / seconds, the bytes that each rank must send (and receive) in any
bandwidth-optimal all-reduce over n ranks per second, comparable with the speed of the link. One tensor at a time
inside a `tf.function`, one core a rank, median of the slowest rank; tfdist's own settings of Horovod.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from statistics import median  # noqa: E402

from benchmarks import quiet, report  # noqa: E402
from benchmarks.teams import Team, Teams  # noqa: E402

SIZES = [4_000 * 4**power for power in range(7)] + [64_000_000]  # 4 kB to 64 MB
MOVED_A_TURN = 64_000_000  # bytes; small tensors are repeated more often
TURNS = 3


def repeats(size: int) -> int:
    """All-reduces of one turn."""
    return max(3, min(50, MOVED_A_TURN // size))


def bus_bandwidth(size: int, ranks: int, seconds: float) -> float:
    """Bytes per second by NCCL's definition."""
    return 2 * (ranks - 1) / ranks * size / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--controllers", nargs="+", choices=["gloo", "mpi"], default=["gloo"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, default=report.RESULTS / "allreduce.json")
    options = parser.parse_args()
    if "mpi" in options.controllers and shutil.which("mpirun") is None:
        raise SystemExit("--controllers mpi: there is no mpirun; install Open MPI and rebuild, see `tfdist doctor`")

    started = time.time()
    about = report.surroundings()
    seconds: dict[str, dict[int, list[float]]] = {c: {} for c in options.controllers}
    with Teams([Team(c, "allreduce", options.ranks, c) for c in options.controllers]) as running:
        for size in SIZES:
            for team in running.teams:
                running.call(team, "prepare", str(size), repeats(size))
            for _ in range(TURNS):
                for team in running.teams:
                    quiet.wait(0.15, patience=2.0)
                    slowest = max(median(times) for times in running.call(team, "run"))
                    seconds[team.name].setdefault(size, []).append(slowest)
    heads = ["bytes", *(f"{c}, {what}" for c in options.controllers for what in ("ms", "GB/s"))]
    rows = [[f"{size:,}"] for size in SIZES]
    for measured in seconds.values():
        for row, size in zip(rows, SIZES, strict=True):
            taken = median(measured[size])
            row += [f"{taken * 1e3:.2f}", f"{bus_bandwidth(size, options.ranks, taken) / 1e9:.3f}"]
    about |= {"command": shlex.join(["python", *sys.argv]), "seconds": round(time.time() - started)}
    title = f"All-reduce of float32 over {options.ranks} ranks: time, bus bandwidth"
    report.write(options.json, about, [(title, [heads, *rows])], {"seconds": seconds})


if __name__ == "__main__":
    main()
