"""A job as a file of Docker Compose: one service a task, no port published."""

from __future__ import annotations

from typing import Any

from tfdist.render import ssh
from tfdist.render.text import as_yaml
from tfdist.render.wanted import Wanted, service

# The exit code that counts is the first task's; but Compose stops the job at the first container that ends, and tasks
# end in any order. A signal is passed on, as a shell would not do by itself.
_STAY = """\
# Stay until the job is stopped, unless it fails here.
"$@" &
trap "kill $!; wait $!; exit" TERM
wait $! && exec sleep infinity
"""

_MADE_WHEN_STARTED = "The keys are made when the job starts, in memory, and are gone when it ends."


def render(wanted: Wanted, volumes: tuple[str, ...] = (), file: str = "compose.yml") -> str:
    """The file's text.

    Args:
        wanted: the job.
        volumes: what every task sees of this machine, as Compose writes it: "./data:/work/data".
        file: its name, for the line that says how to start it.
    """
    services = _over_ssh(wanted) if wanted.ssh else _by_tf_config(wanted)
    for name, each in services.items():
        if volumes and name != "keys":
            each["volumes"] = [*each.get("volumes", []), *volumes]
    value: dict[str, Any] = {"services": services}
    if wanted.ssh:
        # uid 1000 is the image's user.
        options = {"type": "tmpfs", "device": "tmpfs", "o": "uid=1000,gid=1000,mode=0700"}
        value["volumes"] = {"keys": {"driver": "local", "driver_opts": options}}
    first = "launcher" if wanted.ssh else service(wanted.cluster().first)
    comment = (
        f"Written by `tfdist render compose`. Start it, and remove what is left of it:\n"
        f"  docker compose -f {file} up --abort-on-container-exit --exit-code-from {first}\n"
        f"  docker compose -f {file} down --volumes\n"
        f"The exit code is that of {first}. When a container ends or is killed, all end."
    )
    return as_yaml(_escaped(value), f"{comment}\n{_MADE_WHEN_STARTED}" if wanted.ssh else comment)


def _by_tf_config(wanted: Wanted) -> dict[str, Any]:
    cluster, services = wanted.cluster(), {}
    for task in cluster.tasks():
        command = list(wanted.command)
        if task != cluster.first:
            command = ["sh", "-c", _STAY, "sh", *command]
        each = _service(wanted, command)
        each["environment"] = {"TF_CONFIG": cluster.tf_config(task)}
        if task.job == "worker":
            each.update(_gpus(wanted, task.index))
        services[service(task)] = each
    return services


def _over_ssh(wanted: Wanted) -> dict[str, Any]:
    hosts = [f"host-{i}" for i in range(wanted.workers)]
    keys = _service(wanted, ["sh", "-ec", f"{ssh.MAKE_KEYS}exec sleep infinity\n"])
    there = ["CMD", "test", "-f", f"{ssh.KEYS}/id_rsa"]
    services = {"keys": {**keys, "healthcheck": _check(there)}}
    for i, host in enumerate(hosts):
        each = _service(wanted, list(ssh.SSHD))
        each["depends_on"] = {"keys": {"condition": "service_healthy"}}
        each["healthcheck"] = _check(["CMD", *ssh.ANSWERS])
        services[host] = {**each, **_gpus(wanted, i)}
    listed = ",".join(f"{host}:1" for host in hosts)
    launcher = _service(wanted, ssh.launcher(wanted.workers, f"-H {listed}", wanted.command))
    launcher["depends_on"] = {host: {"condition": "service_healthy"} for host in hosts}
    services["launcher"] = launcher
    for each in services.values():
        each["volumes"] = [f"keys:{ssh.KEYS}"]
    return services


def _service(wanted: Wanted, command: list[str]) -> dict[str, Any]:
    """What all services have in common. `init` is a process 1 that passes signals on, which Python is not."""
    return {
        "image": wanted.image_name,
        "command": command,
        "init": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _check(test: list[str]) -> dict[str, Any]:
    return {"test": test, "interval": "2s", "timeout": "10s", "retries": 30}


def _gpus(wanted: Wanted, worker: int) -> dict[str, Any]:
    """GPUs by number, as `count` would give every container the same ones."""
    if not wanted.gpus:
        return {}
    ids = [str(worker * wanted.gpus + i) for i in range(wanted.gpus)]
    device = {"driver": "nvidia", "device_ids": ids, "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [device]}}}}


def _escaped(value: Any) -> Any:
    """With `$$` for `$`, which Compose would take for one of its own variables."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    return [_escaped(each) for each in value] if isinstance(value, list) else value
