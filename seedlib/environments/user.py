"""Environments of the user's own, named `module:function`.

`function` is any callable of an importable module (dots lead to attributes of attributes). It is
called with the seed where it takes one, and with the factory's options as keyword arguments:

- a parameter called `seed` gets the seed by name;
- otherwise, one required positional parameter gets it by position;
- otherwise it is called without a seed.

It returns a `dm_env.Environment`, used as it is, or a Gymnasium (or Gym) environment, which is
adapted and gets the seed with its first reset. An `action_repeat` attribute on the function says
how many frames one agent step is.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dm_env

from seedlib.environments import errors, gymnasium_adapter, kinds

_DM_ENV_METHODS = ("reset", "step", "observation_spec", "action_spec")


def adapt(environment: Any, seed: int, name: str) -> dm_env.Environment:
    """Returns `environment` as a `dm_env.Environment`.

    Args:
      environment: a dm_env, Gymnasium or Gym environment.
      seed: for the first reset of the latter two.
      name: what to call it in messages.

    Raises:
      UnsupportedEnvironmentError: where it is neither, or cannot be handled.
    """
    if isinstance(environment, dm_env.Environment) or all(
        callable(getattr(environment, method, None)) for method in _DM_ENV_METHODS
    ):
        return environment
    if callable(getattr(environment, "step", None)):
        return gymnasium_adapter.GymnasiumEnvironment(environment, seed, name=name)
    raise errors.UnsupportedEnvironmentError(
        f"{name}: expected a dm_env or Gymnasium environment, got {type(environment).__name__}"
    )


def check(argument: str, options: Mapping[str, Any]) -> None:
    """Refuses what is not there, or does not take the options, without calling it.

    Raises:
      UnknownEnvironmentError: naming the module or attribute.
      EnvironmentLoadError: naming the option.
    """
    function = _seeded(_find(argument), 0, options)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some functions written in C do not tell.
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise errors.EnvironmentLoadError(f"environment {argument}: {error}") from None


def make(argument: str, seed: int, options: Mapping[str, Any]) -> dm_env.Environment:
    """Calls the function and adapts what it returns."""
    function = _seeded(_find(argument), seed, options)
    return adapt(function(**options), seed, argument)


def action_repeat(argument: str, options: Mapping[str, Any]) -> int:
    """Returns the function's own `action_repeat`, else 1."""
    del options
    return int(getattr(_find(argument), "action_repeat", 1))


def _find(name: str) -> Callable[..., Any]:
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that is there but misses one of its own imports is another matter.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise errors.UnknownEnvironmentError(
            f"unknown environment {name!r}: there is no module {error.name!r}; possible are "
            f"{kinds.USAGE}"
        ) from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise errors.UnknownEnvironmentError(
                f"unknown environment {name!r}: {module_name!r} has no attribute {path!r}"
            )
        found = getattr(found, attribute)
    if not callable(found):
        raise errors.UnknownEnvironmentError(
            f"unknown environment {name!r}: {path!r} is no function but {type(found).__name__}"
        )
    return found


def _seeded(
    function: Callable[..., Any], seed: int, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Binds the seed to the parameter that wants it, if any."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some functions written in C do not tell.
        return function
    wanted = parameters.get("seed")
    if wanted is not None and wanted.kind is not inspect.Parameter.POSITIONAL_ONLY:
        return functools.partial(function, seed=seed)
    required = [
        parameter
        for parameter in parameters.values()
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is inspect.Parameter.empty
        and parameter.name not in options
    ]
    return functools.partial(function, seed) if required else function
