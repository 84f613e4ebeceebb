"""The process that starts a job over several hosts: `python -m tfdist.launch.spread --hosts a:2,b:2 ...`.

What Horovod's launcher is for the ranks of one host. It connects to an agent on each host, checks what
preflight.py says, has the ranks or tasks started, and copies what agents tell into the run's directory,
so that the supervisor sees ranks of other hosts as it sees its own. It decides nothing else.

    connect -> look -> listen, reach -> ports or rendezvous -> start -> pass on until all are done
"""

from __future__ import annotations

import base64
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from tfdist import patience
from tfdist.cluster import ROUND
from tfdist.launch import hosts_plan, links, preflight
from tfdist.launch.hosts_plan import HostsJob
from tfdist.launch.links import HostError, Link
from tfdist.launch.preflight import Facts
from tfdist.launch.rundir import MARK, Failure, RunDir
from tfdist.launch.ssh import forwarded
from tfdist.launch.verdict import HOST_LOST
from tfdist.new_cluster import cluster_of

BEAT_SECONDS = 2.0


class Spread:
    """The agents of one job, from the first connection to the end of the last process."""

    def __init__(self, job: HostsJob, run_dir: RunDir, terminal: str = ""):
        self.job, self.run_dir, self._terminal = job, run_dir, terminal
        self.hosts = job.used
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended: set[int] = set()
        self._codes: dict[int, int] = {}
        self._stopping = self._patient_told = False
        self._streams: dict[tuple[int, str], int] = {}
        self._ends_at = time.monotonic() + job.start_seconds
        self._over = threading.Event()
        self.links = [
            Link(index, host, job.ssh, self._inbox) for index, host in enumerate(self.hosts)
        ]

    def interrupt(self, signum: int, frame: Any = None) -> None:
        """From a signal handler: have all processes stopped by this signal."""
        self._inbox.put((-1, {"say": "signal", "signal": signum}))

    # -- the start

    def start(self) -> None:
        """Check the hosts and start what is to run there.

        Raises:
            HostError: what is wrong, for every host.
        """
        program = self.job.program
        facts = [
            Facts(**{k: v for k, v in each.items() if k != "say"})
            for each in self._ask("facts", "look", program=program.target if program.kind == "script" else "")
        ]
        ring = not self.job.tasks
        refuse(preflight.differences(self.hosts, facts, program.target, ring))
        for line in preflight.crowded(self.hosts, facts, self.job):
            self.run_dir.report("note", 0, text=line)
        networks = self._networks(facts)
        where = ", ".join(
            f"{host.name} ({address}, {name})" for host, (name, address) in zip(self.hosts, networks, strict=True)
        )
        count = len(self.job.places)
        self.run_dir.report("note", 0, text=f"{count} process{'es' * (count > 1)} on {where}"[:3000])
        envs = self._envs(networks)
        for index, link in enumerate(self.links):
            places = [
                (
                    self.job.places[seat.number].written(),
                    envs[seat.number],
                    hosts_plan.seated_arguments(self.job, seat),
                )
                for seat in self.job.seats
                if seat.host == index
            ]
            words = [program.kind, program.target, *program.args]
            # The first process is on the first host.
            terminal = "" if index else self._terminal
            link.running = True
            link.send(do="start", env=forwarded(os.environ), places=places, program=words, terminal=terminal)

    def _networks(self, facts: Sequence[Facts]) -> list[tuple[str, str]]:
        """(interface, address) by which each host is reached by all others."""
        if len(self.hosts) == 1 and links.is_here(self.hosts[0]) and not self.job.interfaces:
            return [("lo", "127.0.0.1")]
        offered, wrong = preflight.candidates(self.hosts, facts, self.job.interfaces)
        refuse(wrong)
        listening = self._ask("listening", "listen")
        for index, link in enumerate(self.links):
            targets = [
                (other, address, listening[other]["port"], listening[other]["token"])
                for other in range(len(self.hosts))
                if other != index
                for _, address in offered[other]
            ]
            link.send(do="reach", targets=targets)
        reached = [{(at, address) for at, address in each["ok"]} for each in self._answers("reached")]
        chosen, wrong = preflight.common_network(self.hosts, offered, reached)
        refuse(wrong)
        return chosen

    def _envs(self, networks: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
        """Variables of each rank or task."""
        job = self.job
        if not job.tasks:
            self.links[0].send(do="rendezvous", address=networks[0][1])
            port = self._answers("rendezvous", only=0)[0]["port"]
            return hosts_plan.rank_envs(job, networks, networks[0][1], port)
        for index, link in enumerate(self.links):
            count = sum(seat.host == index for seat in job.seats)
            link.send(do="ports", address=networks[index][1], count=count)
        free = [each["ports"] for each in self._answers("ports")]
        addresses = [f"{networks[seat.host][1]}:{free[seat.host][seat.local_rank]}" for seat in job.seats]
        cluster = cluster_of(job.tasks, addresses)
        return hosts_plan.task_envs(job, cluster, forwarded(os.environ))

    def _ask(self, answer: str, do: str, **arguments: Any) -> list[dict[str, Any]]:
        for link in self.links:
            link.send(do=do, **arguments)
        return self._answers(answer)

    def _answers(self, say: str, only: int | None = None) -> list[dict[str, Any]]:
        """One answer from each host, or from one; HostError where one does not come or is an error."""
        awaited = set(range(len(self.links))) if only is None else {only}
        found: dict[int, dict[str, Any]] = {}
        wrong: list[str] = []
        lost: list[int] = []
        while awaited - set(found):
            left = self._ends_at - time.monotonic()
            missing = sorted(awaited - set(found))
            if left <= 0:
                names = ", ".join(self.hosts[i].name for i in missing)
                wrong.append(f"{names} gave no answer within {self.job.start_seconds:g} s (--start-timeout).")
                wrong += [f"{self.hosts[i].name} said: {said}" for i in missing if (said := self.links[i].last_words())]
                lost += missing
                break
            try:
                index, message = self._inbox.get(timeout=min(left, 1.0))
            except queue.Empty:
                continue
            if message is None:
                wrong.append(self.links[index].why())
                lost.append(index)
                awaited.discard(index)
            elif message["say"] == "signal":
                raise SystemExit(128 + message["signal"])
            elif message["say"] == "error":
                wrong.append(f"{self.hosts[index].name} could not {message['what']}: {message['text']}.")
                awaited.discard(index)
            elif message["say"] == say:
                found[index] = message
        if lost and ROUND in os.environ:  # the next round does without them
            for index in lost:
                self._lost(index, "; ".join(wrong))
        refuse(wrong)
        return [found[index] for index in sorted(found)]

    # -- while it runs

    def pass_on(self) -> int:
        """Copy what agents tell until all of them are done; the exit code."""
        look_at = time.monotonic()
        while not all(link.done for link in self.links):
            try:
                index, message = self._inbox.get(timeout=BEAT_SECONDS / 2)
            except queue.Empty:
                index, message = -1, {"say": "nothing"}
            now = time.monotonic()
            if now >= look_at:
                look_at = now + BEAT_SECONDS
                for at, link in enumerate(self.links):
                    if link.silent(now):
                        self._lost(at, f"nothing was heard of it for {links.SILENCE_SECONDS:g} s")
            if message is None:
                if not self.links[index].done:
                    self._lost(index, self.links[index].why())
            else:
                self._hear(index, message)
        return next((code for _, code in sorted(self._codes.items()) if code), 0)

    def beat(self) -> None:
        """In a thread, as the rest may wait for whoever reads the job's output: tell agents that this process lives."""
        while not self._over.wait(BEAT_SECONDS):
            for link in self.links:
                link.send(do="beat")

    def _hear(self, index: int, message: dict[str, Any]) -> None:
        what = message["say"]
        if what == "out":
            self._write(message["n"], message["to"], base64.b64decode(message["data"]))
        elif what == "event":
            event = message["event"]
            if event["event"] == "end":
                self._ended.add(event["rank"])
                self._codes[event["rank"]] = event["code"]
            facts = {k: v for k, v in event.items() if k not in ("event", "rank", "at")}
            self.run_dir.report(event["event"], event["rank"], away=True, **facts)
        elif what == "failed":
            failure = message["failure"]
            self.run_dir.write_failure(Failure(**{**failure, "kind": tuple(failure["kind"])}))
        elif what == "patience":
            # What a rank there asks for, where the supervisor looks for it.
            patience.put(self.run_dir.patience_file(message["n"]), message["text"])
        elif what == "signal":
            self._stop(message["signal"])
        elif what == "error":
            self._lost(index, f"it could not {message['what']}: {message['text']}")
        elif what == "done":
            self.links[index].done = True
            if message["leaked"]:
                self.run_dir.report("leaked", 0, names=[name[:300] for name in message["leaked"][:5]])

    def _write(self, number: int, name: str, data: bytes) -> None:
        if (number, name) not in self._streams:
            self._streams[number, name] = os.open(self.run_dir.stream(number, name), os.O_WRONLY | os.O_NOCTTY)
        while data:
            data = data[os.write(self._streams[number, name], data) :]

    def _stop(self, signum: int) -> None:
        """Pass a signal on: first to those alone who have asked for time, where there are any (supervise.py)."""
        numbers = [seat.number for seat in self.job.seats]
        patient = [n for n in numbers if self.run_dir.patience_file(n).exists()]
        if patient and not self._patient_told and signum in (signal.SIGTERM, signal.SIGUSR1):
            self._patient_told = True
            numbers = patient
        elif self._stopping:
            return
        else:
            self._stopping = True
        for link in self.links:
            link.send(do="stop", signal=signum, numbers=numbers)

    def _lost(self, index: int, why: str) -> None:
        """A host is gone: its processes have failed."""
        link = self.links[index]
        if link.done:
            return
        link.done = True
        for seat in self.job.seats:
            if seat.host != index or seat.number in self._ended:
                continue
            place = self.job.places[seat.number]
            self.run_dir.write_failure(
                Failure(
                    rank=seat.number,
                    host=link.host.name,
                    pid=0,
                    code=1,
                    at=time.time(),
                    kind=(HOST_LOST,),
                    message=f"the host was lost: {why}",
                    told=self._stopping,
                    task=place.task,
                )
            )
            self.run_dir.report("end", seat.number, code=1)
            self._codes[seat.number] = 1

    def end_when_alone(self) -> None:
        """Wait (in a thread) for the end of the supervisor; agents end with their connections."""
        self.run_dir.wait_alone()
        self.run_dir.remove()
        os._exit(128 + signal.SIGTERM)

    def close(self) -> None:
        """End all agents."""
        self._over.set()
        threads = [threading.Thread(target=link.close) for link in self.links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def refuse(lines: Sequence[str]) -> None:
    """HostError with these lines, if there are any."""
    if lines:
        raise HostError("\n".join(lines))


def main() -> None:
    """Start the job that the command line describes; leave with its exit code."""
    job, path, terminal = hosts_plan.parse(sys.argv[1:])
    os.environ.pop("TF_CONFIG", None)
    os.environ[MARK] = path
    spread = Spread(job, RunDir(path), terminal)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, spread.interrupt)
    for task in (spread.end_when_alone, spread.beat):
        threading.Thread(target=task, daemon=True).start()
    code = 1
    try:
        spread.start()
        code = spread.pass_on()
    except HostError as error:
        print(error, flush=True)
    finally:
        spread.close()
    sys.exit(code)


if __name__ == "__main__":
    main()
