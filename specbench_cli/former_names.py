"""Old names in the plug-in API and in stored files. The names have changed, but still work.

Older plug-ins, runs, baselines and certificates use the old names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

DRAW_MODES = {
    "point": "deterministic",
    "iid": "independent",
    "wor": "without_replacement",
}
"""Value of `Draft.draw_mode` by its former name. The attribute was called `Draft.law`."""

CHECKS = {"law": "distribution"}
"""Current name of a check of the audit by its former name."""


def current_draw_mode(mode: str) -> str:
    """Return the current name of a draw mode (how draft tokens are drawn). Warn if the name is
    old.
    """
    if mode not in DRAW_MODES:
        return mode
    current = DRAW_MODES[mode]
    warnings.warn(
        f"`law={mode!r}` of a draft is now `draw_mode={current!r}`", DeprecationWarning, 4
    )
    return current


def current_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's parameters with current names and values. An old example is `law=wor`."""
    if params.get("law") not in DRAW_MODES:
        return dict(params)
    return {
        "draw_mode" if name == "law" else name: DRAW_MODES[value] if name == "law" else value
        for name, value in params.items()
    }


def current_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a model forward under their current names. Warn of old
    names.
    """
    warn_renamed("forward(taps=...)", "captured_layers=...", 4)
    return {"captured_layers" if key == "taps" else key: value for key, value in options.items()}


T = TypeVar("T")


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that the name `old` was replaced by `new`."""
    warnings.warn(f"`{old}` is now `{new}`", DeprecationWarning, stacklevel)


class FormerMember:
    """Descriptor that gives a class member its old name as a second name. It warns when it is used.

    Attributes:
        current: Current name of the member.
    """

    def __init__(self, owner: str, old: str, new: str) -> None:
        self._former, self.current = f"{owner}.{old}", new

    def __get__(self, instance: object, owner: type) -> Any:
        warn_renamed(self._former, self.current)
        return getattr(owner if instance is None else instance, self.current)

    def __set__(self, instance: object, value: Any) -> None:
        warn_renamed(self._former, self.current)
        setattr(instance, self.current, value)


def renamed_members(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that keeps the old names of renamed members.

    If a subclass overrides a member under its old name, the current member is overridden too.

    Args:
        new_names: The current name for each old name.
    """

    def decorate(cls: type[T]) -> type[T]:
        owner: Any = cls
        for old, new in new_names.items():
            setattr(owner, old, FormerMember(owner.__name__, old, new))

        def init_subclass(subclass: Any, /, **options: Any) -> None:
            for old, new in new_names.items():
                if old in vars(subclass):
                    warn_renamed(f"{owner.__name__}.{old}", new)
                    setattr(subclass, new, vars(subclass)[old])
                    delattr(subclass, old)
            super(owner, subclass).__init_subclass__(**options)

        owner.__init_subclass__ = classmethod(init_subclass)
        return cls

    return decorate


def get_renamed(module: str, new_names: Mapping[str, str], name: str) -> Any:
    """Return a module's member by its old name. The module's `__getattr__` calls this.

    Args:
        new_names: The current name for each old name.

    Raises:
        AttributeError: `name` is not an old name.
    """
    if name not in new_names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warn_renamed(f"{module}.{name}", new_names[name])
    return getattr(sys.modules[module], new_names[name])
