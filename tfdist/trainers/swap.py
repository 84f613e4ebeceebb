"""Changing the class of a living object, so that saved files do not notice.

PyTorch's FSDP2 (`fully_shard`) gives a module new behaviour the same way: the object stays, its class becomes
`(<mixin>, <its class>)`. Here the new class also answers `obj.__class__` with the original, because that is what
Keras writes into a saved file and looks up in its registry.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def swap(obj: T, mixin: type) -> T:
    """Puts `mixin` before the class of `obj`, in place, and returns `obj`. Twice is once."""
    cls = type(obj)
    if issubclass(cls, mixin):
        return obj
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__class__": property(lambda self: cls),
    }
    # Past Keras' __setattr__, which would try to track the class as a layer's attribute.
    object.__setattr__(obj, "__class__", type(cls.__name__, (mixin, cls), namespace))
    return obj


def has(obj: Any, mixin: type) -> bool:
    """Whether `swap(obj, mixin)` was done. `isinstance` would say so too; this one says what is meant."""
    return issubclass(type(obj), mixin)
