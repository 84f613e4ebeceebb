"""TF_CONFIG: which processes a job of tasks has, and which of them this one is.

Every process of such a job gets the same addresses and a task of its own in one variable, as JSON.
This module reads it once into frozen values, writes it for processes that are to be started, and
refuses what would make TensorFlow wait without end later. It imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

JOBS = ("chief", "worker", "ps", "evaluator")

# Names for a job in other tools and in TensorFlow 1's flags, and what people write by mistake.
MISNAMED = {
    "chief": ("chief_hosts", "master_hosts"),
    "worker": ("worker_hosts", "workers"),
    "ps": ("parameter_server", "parameter_servers", "ps_hosts"),
    "evaluator": ("evaluators",),
}
EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
LOOPBACK = "localhost"


@dataclass(frozen=True)
class Task:
    """One process of the cluster.

    Attributes:
        job: what it does, one of `JOBS`.
        index: its number among those of the same job, from 0.

    Raises:
        ValueError: no such job, or no such index in any job.
    """

    job: str
    index: int

    def __post_init__(self) -> None:
        if self.job not in JOBS:
            raise _error("task.type", _is(self.job), f"one of {', '.join(JOBS)}", _hint(self.job))
        # Not isinstance: True is an int to Python.
        if type(self.index) is not int or self.index < 0:
            cure = 'Write the number as it is, without quotes: "index": 0.'
            raise _error("task.index", _is(self.index), "an integer of 0 or more", cure)

    @classmethod
    def parse(cls, name: str) -> Task:
        """The opposite of `name`."""
        job, _, index = name.partition("/")
        return cls(job, int(index))

    @property
    def name(self) -> str:
        """Short and unique within the cluster: "worker/1"."""
        return f"{self.job}/{self.index}"

    @property
    def is_chief(self) -> bool:
        """True on the task that runs the program and writes files."""
        return self.job == "chief"


@dataclass(frozen=True)
class Cluster:
    """The addresses, "host:port", of all processes by job.

    Attributes:
        chief: None if TF_CONFIG names none.
        workers: those of the job "worker".
        ps: the parameter servers.
        evaluators: often empty although there is one, as not every tool lists it.

    Raises:
        ValueError: an address is malformed, given twice, or out of reach of the others.
    """

    chief: str | None
    workers: tuple[str, ...]
    ps: tuple[str, ...] = ()
    evaluators: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_addresses({f"cluster.{t.job}[{t.index}]": self.address(t) for t in self.tasks()})

    @property
    def first(self) -> Task:
        """The task that runs the program and writes files: the chief, or worker/0 without one."""
        return Task("worker", 0) if self.chief is None else Task("chief", 0)

    def tasks(self) -> tuple[Task, ...]:
        """All tasks that have an address: chief, ps, workers, evaluators."""
        return tuple(Task(job, i) for job, all_ in self._by_job().items() for i in range(len(all_)))

    def address(self, task: Task) -> str:
        """The "host:port" of the task; ValueError if the cluster does not list it."""
        self._check(task)
        addresses = self._by_job()[task.job]
        if not addresses:
            cure = "An evaluator works without one; if it needs one, list it there."
            raise _error("cluster.evaluator", "is not given", f"the address of {task.name}", cure)
        return addresses[task.index]

    def spec(self) -> dict[str, list[str]]:
        """For `tf.train.ClusterSpec`: jobs that have addresses, without the evaluators.

        TensorFlow's coordinator hangs if its cluster holds an evaluator.
        """
        jobs = self._by_job().items()
        return {job: list(each) for job, each in jobs if each and job != "evaluator"}

    def tf_config(self, task: Task) -> str:
        """The value of TF_CONFIG for the process of `task`; ValueError if the cluster lacks it."""
        self._check(task)
        cluster = self.spec()
        if self.evaluators:
            cluster["evaluator"] = list(self.evaluators)
        return json.dumps({"cluster": cluster, "task": {"type": task.job, "index": task.index}})

    def _by_job(self) -> dict[str, tuple[str, ...]]:
        chief = () if self.chief is None else (self.chief,)
        return {"chief": chief, "ps": self.ps, "worker": self.workers, "evaluator": self.evaluators}

    def _check(self, task: Task) -> None:
        count = len(self._by_job()[task.job])
        # Some tools do not list the evaluator, as nobody connects to it. There is one then.
        end = 1 if task.job == "evaluator" and count == 0 else count
        if task.index >= end:
            found = f"is {task.index}, but cluster.{task.job} has {count} address"
            found += "" if count == 1 else "es"
            expected = f"0 to {end - 1}" if end > 1 else "0" if end else "another task.type"
            cure = f"Correct the task, or add its address to cluster.{task.job} of every process."
            raise _error("task.index", found, expected, cure)


def from_env(env: Mapping[str, str] | None = None) -> tuple[Cluster, Task] | None:
    """Read TF_CONFIG from `env`, `os.environ` by default; see `parse`. Unset is a process alone."""
    env = os.environ if env is None else env
    return parse(env.get("TF_CONFIG", ""))


def parse(text: str) -> tuple[Cluster, Task] | None:
    """Read the text of TF_CONFIG; None if it is blank or holds no cluster: a process alone.

    Raises:
        ValueError: the message names the key, what it holds, what was expected and what to do.
    """
    if not text.strip():
        return None
    config = _object("the value", _json(text), "Write it like this: " + EXAMPLE)
    cure = 'Map each job to its addresses: "cluster": {"chief": ["host0:2222"]}.'
    cluster = _object("cluster", config.get("cluster", {}), cure)
    if not cluster:
        return None
    if config.get("rpc_layer", "grpc") != "grpc":
        cure = "Remove the key: TensorFlow's servers are started with gRPC."
        raise _error("rpc_layer", _is(config["rpc_layer"]), "'grpc'", cure)
    parsed = _cluster(cluster)
    task = _task(config)
    parsed._check(task)
    return parsed, task


def check_job(cluster: Cluster) -> None:
    """ValueError unless the cluster can run a job: of a parameter server, or of workers alone."""
    if cluster.ps:
        need_chief(cluster)
    else:
        need_workers(cluster)


def need_chief(cluster: Cluster) -> None:
    """ValueError unless the cluster can run a parameter-server job: a chief, workers and ps."""
    counts = {job: len(cluster._by_job()[job]) for job in ("chief", "worker", "ps")}
    missing = [f"cluster.{job}" for job, count in counts.items() if count == 0]
    if missing:
        found = ", ".join(f"{count} {job}" for job, count in counts.items())
        expected = "1 chief, 1 worker or more and 1 ps or more, as a parameter-server job needs"
        cure = f"Add addresses under {' and '.join(missing)} in TF_CONFIG of every process."
        if not cluster.ps:
            cure += " Workers alone are for RingAllReduceStrategy and ModelParallelStrategy."
        raise _error("cluster", f"has {found}", expected, cure)


def need_workers(cluster: Cluster) -> None:
    """ValueError unless the cluster can hold one model's stages: workers, and a chief besides if it likes."""
    for job, count in (("ps", len(cluster.ps)), ("evaluator", len(cluster.evaluators))):
        if count:
            cure = f"Remove cluster.{job} in TF_CONFIG of every process, or use ParameterServerStrategy."
            raise _error(f"cluster.{job}", f"has {count}", "none, as a model's stages are on workers", cure)
    if not cluster.workers:
        cure = "List the addresses of the tasks there, in TF_CONFIG of every process."
        raise _error("cluster.worker", "is not given", "1 worker or more", cure)


def _error(where: str, found: str, expected: str, cure: str) -> ValueError:
    return ValueError(f"TF_CONFIG: {where} {found}, expected {expected}. {cure}")


def _is(value: object) -> str:
    text = repr(value)
    return f"is {text}" if len(text) <= 120 else f"is {text[:120]}..."


def _hint(key: object) -> str:
    for job, names in MISNAMED.items():
        if str(key).lower() in (job, *names):
            return f"Write {job!r} instead."
    return "Correct the name, or remove it."


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 20) : error.pos + 20]
        found = f"is no JSON: {error.msg}, line {error.lineno} column {error.colno}, near {near!r}"
        cure = (
            "Often the names stand in single quotes, or a shell has removed the double quotes: put "
            "the whole value into single quotes in a shell, and write it by json.dumps in Python."
        )
        raise _error("the value", found, f"an object like {EXAMPLE}", cure) from None


def _object(where: str, value: object, cure: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise _error(where, _is(value), "a JSON object", cure)
    return value


def _cluster(given: dict[str, object]) -> Cluster:
    if "master" in given and "chief" in given:
        cure = "Remove cluster.master: it is the older name of the same task."
        raise _error("cluster.master", "stands beside cluster.chief", "one of the two", cure)
    jobs: dict[str, tuple[str, ...]] = dict.fromkeys(JOBS, ())
    places: dict[str, str] = {}  # by the keys as written, for messages: "master" stays "master"
    for key, value in given.items():
        where = f"cluster.{key}"
        job = "chief" if key == "master" else key
        if job not in JOBS:
            raise _error(where, "is no known job", f"one of {', '.join(JOBS)}", _hint(key))
        jobs[job] = _addresses(where, value)
        if job == "chief" and len(jobs[job]) > 1:
            cure = "Keep the one that runs the program, and list the others under cluster.worker."
            raise _error(where, _is(value), "one address", cure)
        places.update({f"{where}[{index}]": each for index, each in enumerate(jobs[job])})
    _check_addresses(places)
    chief = jobs["chief"][0] if jobs["chief"] else None
    return Cluster(chief, jobs["worker"], jobs["ps"], jobs["evaluator"])


def _addresses(where: str, value: object) -> tuple[str, ...]:
    if isinstance(value, dict):
        order = [str(index) for index in range(len(value))]
        if set(value) != set(order):
            expected = f"the indices 0 to {len(value) - 1} without a gap"
            raise _error(where, f"has the keys {list(value)}", expected, "List every address.")
        value = [value[index] for index in order]
    if not isinstance(value, list):
        raise _error(where, _is(value), "a list", 'Write it as a list: ["host0:2222"].')
    for index, address in enumerate(value):
        if not isinstance(address, str):
            cure = "Put host and port into one pair of quotes."
            raise _error(f"{where}[{index}]", _is(address), '"host:port"', cure)
    return tuple(value)


def _task(config: dict[str, object]) -> Task:
    like = 'Say which process this is: "task": {"type": "worker", "index": 0}.'
    if "task" not in config:
        raise _error("task", "is missing", "an object with type and index", like)
    task = _object("task", config["task"], like)
    for key in ("type", "index"):
        if key not in task:
            raise _error(f"task.{key}", "is missing", "both type and index", like)
    job = "chief" if task["type"] == "master" else task["type"]
    return Task(job, task["index"])  # type: ignore[arg-type]  # it checks both


def _check_addresses(places: Mapping[str, str]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for where, address in places.items():
        endpoint = _endpoint(where, address)
        if endpoint in seen:
            first = seen[endpoint]
            found = f"{_is(address)}, the same address as {first} ({places[first]!r})"
            cure = "Give one of the two another port."
            raise _error(where, found, "an address of its own for every process", cure)
        seen[endpoint] = where
    local = [where for (host, _), where in seen.items() if host == LOOPBACK]
    remote = [where for (host, _), where in seen.items() if host != LOOPBACK]
    if local and remote:
        expected = f"an address that other hosts reach, since {remote[0]} is {places[remote[0]]!r}"
        cure = "Write the host's name, or loopback addresses for all if all run on this host."
        raise _error(local[0], _is(places[local[0]]), expected, cure)


def host_and_port(address: str) -> tuple[str, int]:
    """Of an address that was checked, an IPv6 one without its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _endpoint(where: str, address: str) -> tuple[str, int]:
    """Host and port to compare; loopback hosts are one, as a server listens on all interfaces."""
    host, colon, port = address.rpartition(":")
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        ip = ipaddress.ip_address(name)
    except ValueError:
        ip = None
    cure = ""
    if "://" in address:
        cure = f"Remove {address[: address.index('://') + 3]!r}."
    elif not colon or not host or address.endswith("]"):
        cure = "Write host and port: host0:2222."
    elif not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        cure = f"The port is {port!r}: write a number from 1 to 65535."
    elif name != host and (ip is None or ip.version != 6):
        cure = "Only an IPv6 address stands in brackets: host0:2222, [::1]:2222."
    elif name == host and not re.fullmatch("[A-Za-z0-9._-]+", host):
        cure = "One name of a host, or an IPv6 address in brackets: host0:2222, [::1]:2222."
    if cure:
        raise _error(where, _is(address), '"host:port" with a port from 1 to 65535', cure)
    if ip is not None:
        name = LOOPBACK if ip.is_loopback else str(ip)
    return name.lower(), int(port)
