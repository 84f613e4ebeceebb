"""Manifests for Kubeflow, read by the typed models of its own Python package."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from tfdist.render import k8s
from tfdist.render.wanted import Wanted

training = pytest.importorskip("kubeflow.training", reason="needs kubeflow-training")

TRAIN = ("python", "train.py")

# Fields with their types that v2beta1 has (kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go) and the v1 of
# kubeflow-training's MPIJob has not, and the other way round.
NEW_IN_V2BETA1 = {
    "sshAuthMountPath": str,
    "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
    "runLauncherAsWorker": bool,
    "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
}
GONE_IN_V2BETA1 = {"mainContainer", "cleanPodPolicy"}


def manifest(*args, name="job", **options):
    return yaml.safe_load(k8s.render(Wanted(TRAIN, *args, **options), name))


def as_typed(value, kind):
    """`value` read as the model `kind`; what the model does not know, or has under another type, fails."""
    client = training.ApiClient()

    class Answer:
        data = json.dumps(value)

    typed = client.deserialize(Answer, kind)
    assert client.sanitize_for_serialization(typed) == value
    return typed


@pytest.mark.parametrize(
    "options",
    [{"ps": 1}, {"ps": 2, "evaluator": True}, {"ps": 0}, {"ps": 1, "image": "mine", "gpus": 2}],
    ids=str,
)
def test_a_tfjob_is_one(options):
    job = as_typed(manifest(2, **options), "KubeflowOrgV1TFJob")
    assert (job.api_version, job.kind, job.metadata.name) == ("kubeflow.org/v1", "TFJob", "job")
    replicas = job.spec.tf_replica_specs
    number = {kind: each.replicas for kind, each in replicas.items()}
    ps = options["ps"]
    expected = {"Chief": 1, "PS": ps, "Worker": 2, "Evaluator": 1} if ps else {"Worker": 2}
    assert number == {kind: n for kind, n in expected.items() if kind != "Evaluator" or options.get("evaluator")}
    for kind, each in replicas.items():
        (container,) = each.template.spec.containers
        # The training operator sets TF_CONFIG in the container of this name, with the port of this name.
        assert container.name == "tensorflow"
        assert [(port.name, port.container_port) for port in container.ports] == [("tfjob-port", 2222)]
        assert container.command == list(TRAIN)
        limits = container.resources.limits if container.resources else {}
        assert limits == ({"nvidia.com/gpu": "2"} if kind == "Worker" and "gpus" in options else {})


def test_a_field_that_kubeflow_does_not_know_is_noticed():
    value = manifest(2)
    value["spec"]["tfReplicaSpecs"]["Worker"]["replica"] = 3
    with pytest.raises(AssertionError):
        as_typed(value, "KubeflowOrgV1TFJob")


def test_who_is_started_again():
    replicas = manifest(2, 1, evaluator=True)["spec"]["tfReplicaSpecs"]
    again = {kind: each["restartPolicy"] for kind, each in replicas.items()}
    assert again == {"Chief": "Never", "PS": "ExitCode", "Worker": "ExitCode", "Evaluator": "ExitCode"}
    ring = manifest(2)["spec"]
    assert ring["tfReplicaSpecs"]["Worker"]["restartPolicy"] == "Never"
    assert ring["successPolicy"] == "AllWorkers"


@pytest.mark.parametrize("options", [{}, {"image": "mine", "gpus": 1}], ids=str)
def test_an_mpijob_is_one(options):
    value = manifest(3, ssh=True, **options)
    assert value["apiVersion"] == "kubeflow.org/v2beta1"
    spec = value["spec"]
    for field in NEW_IN_V2BETA1.keys() & spec.keys():
        kind, given = NEW_IN_V2BETA1[field], spec.pop(field)
        assert given in kind if isinstance(kind, tuple) else isinstance(given, kind)
    assert not GONE_IN_V2BETA1 & spec.keys()
    job = as_typed(value, "KubeflowOrgV1MPIJob")
    assert (job.kind, job.metadata.name, job.spec.slots_per_worker) == ("MPIJob", "job", 1)
    assert {kind: each.replicas for kind, each in job.spec.mpi_replica_specs.items()} == {"Launcher": 1, "Worker": 3}
    launcher, worker = (job.spec.mpi_replica_specs[kind].template.spec.containers[0] for kind in ("Launcher", "Worker"))
    assert "-np 3 --hostfile /etc/mpi/hostfile " in launcher.command[2]
    assert launcher.command[4:] == list(TRAIN)
    assert launcher.resources is None
    assert worker.command[0] == "/usr/sbin/sshd"
    assert worker.readiness_probe._exec.command[0] == "ssh-keyscan"
    assert (worker.resources is not None) == bool(options)


@pytest.mark.parametrize("wanted", [(2, 1), (2,), (2, 0, False, True)], ids=str)
def test_pods_are_what_kubernetes_calls_restricted(wanted):
    # https://kubernetes.io/docs/concepts/security/pod-security-standards
    spec = manifest(*wanted)["spec"]
    for each in (spec.get("tfReplicaSpecs") or spec["mpiReplicaSpecs"]).values():
        pod = each["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] != 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC", "volumes"}


@pytest.mark.parametrize("word", ["$(date)", "$$", "$$(x)", "$", "a$b", "$$$", "${x}"])
def test_a_dollar_of_the_program_is_no_variable_of_kubernetes(word):
    value = yaml.safe_load(k8s.render(Wanted((*TRAIN, word), 2, 1), "job"))
    (container,) = value["spec"]["tfReplicaSpecs"]["Chief"]["template"]["spec"]["containers"]
    # As Kubernetes reads it: $$ is $, and $(NAME) a variable, left as it is where there is none of that name.
    special = re.compile(r"\$\$|\$\([^)]*\)")
    assert special.sub(lambda found: "$" if found[0] == "$$" else "?", container["command"][-1]) == word


@pytest.mark.parametrize("name", ["", "Job", "1job", "job-", "a.b", "a" * 51])
def test_a_name_that_kubernetes_refuses(name):
    with pytest.raises(ValueError, match="expected at most 50 small letters"):
        manifest(2, name=name)
