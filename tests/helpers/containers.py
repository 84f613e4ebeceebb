"""For tests in containers: the images of docker/Dockerfile, and jobs of Docker Compose that leave nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tfdist.build import cache

ROOT = Path(__file__).parents[2]
# The first that is there is built on; nothing is pulled.
BASES = ("tfdist-base:bookworm", "python:3.11-slim-bookworm")
NAMES = {"tfdist": "tfdist-test", "tfdist:ssh": "tfdist-test:ssh"}
BUILDER = "tfdist-test:builder"
WHEELS = "/root/.cache/tfdist/wheels"
# What docker/Dockerfile copies, as .dockerignore lists it.
CONTEXT = (
    *("docker/Dockerfile", "docker/wheels/README.md", "examples", "requirements/constraints.txt", "tfdist"),
    *("LICENSE", "README.md", "pyproject.toml", "setup.cfg"),
)


def docker(*words: str, seconds: float = 60, check: bool = True) -> str:
    """What the command prints, its errors too; CalledProcessError where `check` and it fails."""
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(["docker", *words], timeout=seconds, **pipe)
    if check and done.returncode:
        raise AssertionError(f"docker {' '.join(words)} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout.strip()


def base() -> tuple[str, str]:
    """The image to build on, and why there is none: one of them is empty."""
    if shutil.which("docker") is None:
        return "", "there is no docker on PATH"
    if compose() is None:
        return "", "there is no Docker Compose"
    if subprocess.run(["docker", "info"], capture_output=True, timeout=60).returncode:
        return "", "no Docker engine answers"
    for name in BASES:
        if subprocess.run(["docker", "image", "inspect", name], capture_output=True, timeout=60).returncode == 0:
            return name, ""
    return "", f"none of the base images {', '.join(BASES)} is there; docker pull {BASES[-1]}"


def compose() -> list[str] | None:
    """Compose's command line: the newer one where it is there."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True).returncode:
            return command
    return None


def build(base_image: str, scratch: Path) -> None:
    """Builds the images called `NAMES`. Horovod is compiled only where no wheel that was kept fits; it is kept then."""
    for name in CONTEXT:
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, scratch / name)
    known = cache.root() / "wheels"
    for entry in known.glob("*/build.json"):
        shutil.copytree(entry.parent, scratch / "docker/wheels" / entry.parent.name)
    # The host's network: in a network of its own a build may not reach the package index.
    command = ["build", "--network", "host", "--build-arg", f"BASE_IMAGE={base_image}"]
    command += ["-f", str(scratch / "docker/Dockerfile")]
    for target, name in (("builder", BUILDER), ("ssh", NAMES["tfdist:ssh"]), ("runtime", NAMES["tfdist"])):
        docker(*command, "--target", target, "-t", name, str(scratch), seconds=1500)
    _keep_wheels(known, scratch / "kept")


def _keep_wheels(known: Path, scratch: Path) -> None:
    container = docker("create", BUILDER, "true").split()[-1]
    try:
        docker("cp", f"{container}:{WHEELS}", str(scratch))
    finally:
        docker("rm", container)
    for entry in scratch.glob("*/build.json"):
        wheel = next(entry.parent.glob("*.whl"))
        if not (known / entry.parent.name).exists():
            cache.replace_file(wheel, known / entry.parent.name / wheel.name)
            cache.replace_file(entry, known / entry.parent.name / entry.name)


def services(file: str) -> dict:
    """A file of docker/ as values, with the tests' images."""
    value = yaml.safe_load((ROOT / "docker" / file).read_text())
    for each in value["services"].values():
        each["image"] = NAMES[each["image"]]
    return value


class Job:
    """One `up` of a Compose file; its output is in `text`, as far as it was read."""

    def __init__(self, file: Path, first: str, seconds: float) -> None:
        self.project = f"test{uuid.uuid4().hex[:12]}"
        self._command = [*(compose() or []), "--ansi", "never", "-p", self.project, "-f", str(file)]
        up = ["up", "--abort-on-container-exit", "--exit-code-from", first]
        self.process = subprocess.Popen(
            [*self._command, *up], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.text = ""
        self._deadline = threading.Timer(seconds, self.process.kill)
        self._deadline.start()

    def read_until(self, words: str) -> None:
        """AssertionError if the job ends, or its time is over, before a line with `words`."""
        for line in self.process.stdout:
            self.text += line
            if words in line:
                return
        raise AssertionError(f"it ended without {words!r}:\n{self.text}")

    def wait(self) -> int:
        """The exit code of Compose, when it has ended."""
        for line in self.process.stdout:
            self.text += line
        return self.process.wait()

    def containers(self, service: str | None = None, everything: bool = False) -> list[str]:
        """The ids of those that run, or of all that are there, of the job or of one service."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [word for label in labels for word in ("--filter", label)]
        return docker("ps", "-q", *(["-a"] if everything else []), *filters).split()

    def end(self) -> None:
        """Removes containers, networks and volumes."""
        self._deadline.cancel()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        down = [*self._command, "down", "--volumes", "--timeout", "0"]
        subprocess.run(down, capture_output=True, timeout=120, env={**os.environ, "COMPOSE_HTTP_TIMEOUT": "100"})


@contextmanager
def job(value: dict, first: str, scratch: Path, seconds: float = 240) -> Iterator[Job]:
    """The Compose file of `value` while it runs; `first` is the service whose exit code counts."""
    file = scratch / "compose.yml"
    file.write_text(yaml.safe_dump(value))
    running = Job(file, first, seconds)
    try:
        yield running
    finally:
        running.end()
