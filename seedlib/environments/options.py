"""Turns the options of a factory into the frozen settings of one kind of environment."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from seedlib.environments import errors

_Settings = TypeVar("_Settings")


def settings(cls: type[_Settings], kind: str, options: Mapping[str, Any]) -> _Settings:
    """Returns `cls(**options)` after checking that each option is one of its fields.

    Args:
      cls: a dataclass that validates its own values.
      kind: what to call the environments in messages.
      options: field names and values; the rest keep their defaults.

    Raises:
      EnvironmentLoadError: where an option is not a field, or a value is refused.
    """
    possible = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for name in options:
        if name not in possible:
            raise errors.EnvironmentLoadError(
                f"{kind} environments have no option {name!r}; possible are {', '.join(possible)}"
            )
    return cls(**options)


def at_least(minimum: int, **values: Any) -> None:
    """Checks that each of `values` is a whole number of at least `minimum`.

    Raises:
      EnvironmentLoadError: naming the first that is not, and its value.
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise errors.EnvironmentLoadError(
                f"{name} must be a whole number of at least {minimum}, got {value!r}"
            )


def boolean(**values: Any) -> None:
    """Checks that each of `values` is True or False.

    Raises:
      EnvironmentLoadError: naming the first that is not, and its value.
    """
    for name, value in values.items():
        if not isinstance(value, bool):
            raise errors.EnvironmentLoadError(f"{name} must be True or False, got {value!r}")
