"""The commands of the build, and the variables they run with. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.build.versions import HOROVOD


def tool_environment(inherited: Mapping[str, str], tools: str | None) -> dict[str, str]:
    """Variables for running Horovod's setup.py: with the build tools, without HOROVOD_* ones.

    Stray HOROVOD_* variables go because the key does not know them: a wheel must be what its key
    says.

    Args:
        inherited: the variables of this process.
        tools: directory where pip has put `Plan.tools`, or None.
    """
    env = {name: value for name, value in inherited.items() if not name.startswith("HOROVOD_")}
    env["PIP_NO_INPUT"] = "1"
    if tools is not None:
        env["PYTHONPATH"] = _before(tools, inherited.get("PYTHONPATH"))
        env["PATH"] = _before(f"{tools}/bin", inherited.get("PATH"))
    return env


def tools_command(python: str, tools: tuple[str, ...], target: str) -> list[str]:
    """The command of pip that puts the build tools into a directory of their own."""
    return [*_pip(python), "install", "--target", target, *tools]


def download_command(python: str, target: str) -> list[str]:
    """The command of pip that fetches Horovod's sdist into `target`."""
    return [
        *_pip(python),
        *("download", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"),
        *("--dest", target, f"horovod=={HOROVOD}"),
    ]


def wheel_command(python: str, source: str, target: str) -> list[str]:
    """The command of pip that compiles the unpacked `source` into a wheel in `target`.

    Verbose, because a compiler's error is otherwise cut from pip's output.
    """
    return [
        *_pip(python),
        *("wheel", "--verbose", "--no-deps", "--no-build-isolation", "--no-cache-dir"),
        *("--wheel-dir", target, source),
    ]


def install_command(python: str, wheel: str) -> list[str]:
    """The command of pip that installs the wheel and nothing else."""
    return [*_pip(python), "install", "--no-deps", "--force-reinstall", wheel]


def runtime_command(python: str, requirements: tuple[str, ...]) -> list[str]:
    """The command of pip that installs what Horovod needs at run time."""
    return [*_pip(python), "install", *requirements]


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check"]


def _before(first: str, rest: str | None) -> str:
    return f"{first}:{rest}" if rest else first
