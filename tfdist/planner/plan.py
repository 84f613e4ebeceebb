"""Which operations of a model are on which device: a value to print, save, load and change. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
KEY = "tfdist model parallel plan"


@dataclass(frozen=True)
class StagePlan:
    """Operations that are computed together.

    Attributes:
        device: its number in the strategy's list.
        operations: by name, in the order in which they are computed; none in a last stage that only has the loss.
    """

    device: int
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The stages of a model, each after those that it takes from.

    An operation is a call of a layer and has its name; further calls of the same layer are "name (2)" and so on.

    ```python
    plan = strategy.plan(model)
    print(plan)
    plan.save("plan.json")
    again = tfdist.ModelParallelStrategy(devices, balance=tfdist.Plan.load("plan.json"))
    other = tfdist.ModelParallelStrategy(devices, balance={**plan.mapping(), "conv_3": 1})
    ```

    Raises:
        ValueError: no stages, or an operation twice.
    """

    model: str
    stages: tuple[StagePlan, ...]

    def __post_init__(self) -> None:
        names = [name for stage in self.stages for name in stage.operations]
        twice = sorted({name for name in names if names.count(name) > 1})
        if not names or twice:
            what = f"has {', '.join(twice)} twice" if twice else "has no operations"
            raise ValueError(f"the plan of model {self.model!r} {what}; each operation is on one stage.")

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return 1 + max(stage.device for stage in self.stages)

    def mapping(self) -> dict[str, int]:
        """From operations to the number of their device, as `balance` takes it."""
        return {name: stage.device for stage in self.stages for name in stage.operations}

    def positions(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """By stage: where its operations stand among `names`, all operations of the model.

        Raises:
            ValueError: the plan is for another model.
        """
        at = {name: i for i, name in enumerate(names)}
        mine = self.mapping()
        strange, missing = [n for n in mine if n not in at], [n for n in names if n not in mine]
        if strange or missing:
            found = [f"knows {', '.join(strange)}, which the model has not"] if strange else []
            found += [f"says nothing of {', '.join(missing)}"] if missing else []
            raise ValueError(
                f"the plan of model {self.model!r} is for another model: it {' and '.join(found)}. Make a new one, or "
                "build the layers with the names that they had."
            )
        return [tuple(sorted(at[name] for name in stage.operations)) for stage in self.stages]

    def to_json(self) -> str:
        """The plan as text, see `from_json`."""
        stages = [{"device": stage.device, "operations": list(stage.operations)} for stage in self.stages]
        return json.dumps({KEY: FORMAT, "model": self.model, "stages": stages}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote, perhaps changed by hand.

        Raises:
            ValueError: it is none.
        """
        try:
            read = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"this is no plan, but no JSON at all: {error}") from None
        if not isinstance(read, dict) or read.get(KEY) != FORMAT:
            raise ValueError(f'this is no plan: expected an object with "{KEY}": {FORMAT}, as Plan.save writes it.')
        stages = read.get("stages")
        if not isinstance(read.get("model"), str) or not isinstance(stages, list) or not all(map(_is_stage, stages)):
            raise ValueError(
                'a plan has a "model" (a name) and "stages", each with a "device" (a number from 0) and "operations" '
                f"(a list of names); this one has {', '.join(map(repr, read))}, of another form."
            )
        return cls(read["model"], tuple(StagePlan(stage["device"], tuple(stage["operations"])) for stage in stages))

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file holds no plan (the message names it).
            OSError: it cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def __str__(self) -> str:
        lines = [f"{self.model}: {len(self.stages)} stages on {self.devices} devices"]
        for number, stage in enumerate(self.stages):
            names = ", ".join(stage.operations) or "(the loss)"
            lines.append(f"  stage {number} on device {stage.device}: {names}")
        return "\n".join(lines)


def _is_stage(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and type(value.get("device")) is int
        and value["device"] >= 0
        and isinstance(value.get("operations"), list)
        and all(isinstance(name, str) for name in value["operations"])
    )
