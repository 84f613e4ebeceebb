"""Values as YAML for people: in the order they were made, long texts in lines, nothing abbreviated."""

from __future__ import annotations

from collections.abc import Sequence

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # yaml has no types
    def ignore_aliases(self, data: object) -> bool:
        """Always: `*id001` in place of a value is not for people."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists are indented below their key, as in Docker's and Kubernetes' own examples."""
        super().increase_indent(flow, False)


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


def _list(dumper: _Dumper, value: Sequence[object]) -> yaml.SequenceNode:
    # A command and its like on one line; what holds mappings or lines of shell below each other.
    short = all(isinstance(each, (str, int)) and "\n" not in str(each) for each in value)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=short)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def as_yaml(value: object, comment: str) -> str:
    """`value` as YAML after `comment`, whose lines become YAML's comments."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.strip().split("\n"))
    # Wide: a folded line of JSON is hard to read and to edit.
    return head + str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000))
