"""A job as an object of Kubeflow: a TFJob, whose operator sets TF_CONFIG, or an MPIJob, whose operator makes keys."""

from __future__ import annotations

import re
from typing import Any

from tfdist.render import ssh
from tfdist.render.text import as_yaml
from tfdist.render.wanted import PORT, Wanted

# Pods and services are called after the job, "<name>-evaluator-0", in at most 63 characters.
NAME = re.compile("[a-z]([-a-z0-9]{0,48}[a-z0-9])?")

_REPLICAS = {"chief": "Chief", "ps": "PS", "worker": "Worker", "evaluator": "Evaluator"}


def render(wanted: Wanted, name: str, file: str = "job.yml") -> str:
    """The manifest's text.

    Args:
        wanted: the job.
        name: what it is called in the cluster.
        file: the manifest's name, for the lines that say how to start it.

    Raises:
        ValueError: Kubernetes takes no such name.
    """
    if not NAME.fullmatch(name):
        raise ValueError(
            f"the name is {name!r}, expected at most 50 small letters, digits and -, a letter first and no - last."
        )
    value = _mpijob(wanted, name) if wanted.ssh else _tfjob(wanted, name)
    kind = value["kind"].lower()
    operator = "MPI operator (v2beta1)" if wanted.ssh else "training operator (v1)"
    comment = (
        f"Written by `tfdist render k8s`, for Kubeflow's {operator}. Start it, look how it does, remove it:\n"
        f"  kubectl apply -f {file}\n"
        f"  kubectl get {kind}/{name}\n"
        f"  kubectl delete -f {file}"
    )
    return as_yaml(value, comment)


def _tfjob(wanted: Wanted, name: str) -> dict[str, Any]:
    replicas: dict[str, Any] = {}
    for task in wanted.cluster().tasks():
        if (kind := _REPLICAS[task.job]) in replicas:
            replicas[kind]["replicas"] += 1
            continue
        # The operator looks for the container and the port by these names.
        container = _container(wanted, "tensorflow", list(wanted.command))
        container["ports"] = [{"name": "tfjob-port", "containerPort": PORT}]
        if task.job == "worker":
            container.update(_gpus(wanted))
        # As under `tfdist run`: whoever is killed by a signal, other than the chief, is started again; an error of
        # the program ends the job. A ring has no place for one that comes later.
        again = "ExitCode" if wanted.ps and task.job != "chief" else "Never"
        replicas[kind] = _replica(1, again, container)
    spec: dict[str, Any] = {"runPolicy": {"cleanPodPolicy": "Running"}}
    if not wanted.ps:
        spec["successPolicy"] = "AllWorkers"
    spec["tfReplicaSpecs"] = replicas
    return _job("kubeflow.org/v1", "TFJob", name, spec)


def _mpijob(wanted: Wanted, name: str) -> dict[str, Any]:
    command = ssh.launcher(wanted.workers, "--hostfile /etc/mpi/hostfile", wanted.command)
    worker = _container(wanted, "worker", list(ssh.SSHD))
    worker["ports"] = [{"name": "ssh", "containerPort": PORT}]
    # The launcher is not made before all workers are ready.
    worker["readinessProbe"] = {"exec": {"command": list(ssh.ANSWERS)}, "periodSeconds": 2}
    worker.update(_gpus(wanted))
    spec = {
        "slotsPerWorker": 1,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "sshAuthMountPath": ssh.KEYS,
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "mpiReplicaSpecs": {
            "Launcher": _replica(1, "Never", _container(wanted, "launcher", command)),
            "Worker": _replica(wanted.workers, "Never", worker),
        },
    }
    return _job("kubeflow.org/v2beta1", "MPIJob", name, spec)


def _job(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _replica(number: int, again: str, container: dict[str, Any]) -> dict[str, Any]:
    # With the container's own securityContext this is what Kubernetes calls "restricted". uid 1000 is the image's user.
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {"securityContext": user, "containers": [container]}
    return {"replicas": number, "restartPolicy": again, "template": {"spec": pod}}


def _container(wanted: Wanted, name: str, command: list[str]) -> dict[str, Any]:
    context = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    # Kubernetes takes $(NAME) for a variable of its own, and $$ for $.
    escaped = [re.sub(r"\$(?=[$(])", "$$", word) for word in command]
    return {"name": name, "image": wanted.image_name, "command": escaped, "securityContext": context}


def _gpus(wanted: Wanted) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": str(wanted.gpus)}}} if wanted.gpus else {}
