"""The `tfdist` command. Its verbs are the other files of this package.

A file `build_horovod.py` is the verb `build-horovod` and holds a click command `build_horovod`.
Files are only imported when their verb is called or listed, and none imports TensorFlow at the
top, so `tfdist --help` is there at once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil

import click

import tfdist.cli


class Verbs(click.Group):
    """A click group that finds its commands in the files of `tfdist.cli`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs, sorted."""
        names = (module.name for module in pkgutil.iter_modules(tfdist.cli.__path__))
        # A file with a leading underscore holds options that verbs share.
        return sorted(name.replace("_", "-") for name in names if name != "main" and name[0] != "_")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The verb's command, None if there is no such verb."""
        if cmd_name not in self.list_commands(ctx):
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(importlib.import_module(f"tfdist.cli.{name}"), name)
        if not isinstance(command, click.Command):
            raise TypeError(f"tfdist/cli/{name}.py: {name} is no click command but {command!r}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's own, but an unknown verb is answered with the known ones."""
        verb = click.utils.make_str(args[0])
        if not verb.startswith("-") and self.get_command(ctx, verb) is None:
            ctx.fail(f"There is no verb {verb!r}. Known: {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"tfdist {importlib.metadata.version('tfdist')}")
        ctx.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    callback=_version,
    expose_value=False,
    is_eager=True,
    help="Print the version and exit.",
)
def main() -> None:
    """Train unchanged Keras models on many processes."""


if __name__ == "__main__":
    main()
