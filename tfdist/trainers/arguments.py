"""The arguments with which a user called one of Keras' methods."""

from __future__ import annotations

import inspect
from typing import Any


def arguments(method: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults filled in; unknown ones are the method's own TypeError."""
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    named.update(named.pop("kwargs", {}))
    return named


def refuse_jit(method: Any, args: tuple, kwargs: dict[str, Any], why: str) -> None:
    """Refuses `jit_compile=True` in a call of `compile`; `why` ends the message."""
    try:
        given = inspect.signature(method).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return  # the method's own message is better
    if given.get("jit_compile", given.get("kwargs", {}).get("jit_compile")) is True:
        raise ValueError(f"compile(jit_compile=True) was passed, but {why}")
