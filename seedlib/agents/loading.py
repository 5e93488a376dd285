"""From an agent's name and its settings to the agent, made where it is needed.

A factory is a small value that travels to another process; JAX is imported there, not here.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import numbers
import threading
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from seedlib import specs
from seedlib.agents.agent import Agent

AGENTS = ("vtrace",)
"""Packages of `seedlib.agents` that can be run by name. `r2d2` cannot yet: it needs a replay."""

# The learner and inference of one process ask at the same time, and shall get the same agent.
# Reentrant, since an agent of one's own may be made of another.
_MAKING = threading.RLock()


class AgentError(ValueError):
    """An agent, or one of its settings, that does not exist; one line for the user."""


@dataclasses.dataclass(frozen=True)
class AgentFactory:
    """Makes an agent for an environment.

    Attributes:
      name: a package of `seedlib.agents` (`vtrace`), or `my_module:make_agent` for one's own; that
        function is called as `make_agent(environment_spec, **options)`.
      environment_spec: canonical.
      options: fields of the agent's `Config`, or keyword arguments of one's own function.
    """

    name: str
    environment_spec: specs.EnvironmentSpec
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Agent:
        """Returns the agent; the same object for the same name and options in one process.

        Raises:
          AgentError: no such agent or option.
          ValueError: the agent refuses the environment or an option.
        """
        key = json.dumps([self.name, sorted(self.options.items())], default=list)
        with _MAKING:
            return _make(self, key)

    def check(self) -> None:
        """Refuses what can be refused without JAX: before any process is started.

        An agent of one's own is checked when it is made, in the process that needs it.

        Raises:
          AgentError: no such agent or setting.
          ValueError: a setting has a value that cannot be, or the environment does not suit.
        """
        if ":" in self.name:
            return
        config_of(self.name, self.options)
        module = importlib.import_module(f"{_package(self.name)}.config")
        module.check_environment(self.environment_spec)

    def __hash__(self) -> int:
        """Hashes the name alone: specs are not hashable."""
        return hash(self.name)


@functools.lru_cache(maxsize=8)
def _make(factory: AgentFactory, key: str) -> Agent:
    del key  # Equal factories compare equal; the key tells options apart in the cache's hash.
    if ":" in factory.name:
        return _make_own(factory)
    package = importlib.import_module(_package(factory.name))
    return package.make_agent(factory.environment_spec, config_of(factory.name, factory.options))


def _make_own(factory: AgentFactory) -> Agent:
    """Returns what a user's function makes."""
    name = factory.name
    module_name, _, function = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise AgentError(f"unknown agent {name!r}: {module_name!r} is not the name of a module")
    try:
        make = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise AgentError(f"unknown agent {name!r}: {error}") from error
    try:
        inspect.signature(make).bind(factory.environment_spec, **factory.options)
    except TypeError as error:
        raise AgentError(f"agent {name}: {error}") from error
    agent = make(factory.environment_spec, **factory.options)
    if not isinstance(agent, Agent):
        raise AgentError(f"agent {name}: returned a {type(agent).__name__}, not an Agent")
    return agent


def _package(name: str) -> str:
    if name not in AGENTS:
        possible = ", ".join(AGENTS)
        raise AgentError(f"unknown agent {name!r}; possible are {possible} and <module>:<function>")
    return f"seedlib.agents.{name}"


def config_of(name: str, options: Mapping[str, Any]) -> Any:
    """Returns the settings of an agent of this library as its `Config`.

    Raises:
      AgentError: no such agent or setting.
      ValueError: a setting has a value that cannot be.
    """
    package = _package(name)
    config = importlib.import_module(f"{package}.config").Config
    hints = typing.get_type_hints(config)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(config)}
    for option, value in options.items():
        if option not in fields:
            raise AgentError(
                f"agent {name} has no setting {option!r}; it has {', '.join(sorted(fields))}"
            )
        if not _fits(value, fields[option]):
            hint = fields[option]
            expected = str(hint) if typing.get_origin(hint) else hint.__name__
            raise AgentError(f"agent {name}: {option} must be {expected}, got {value!r}")
    return config(**options)


def _fits(value: Any, hint: Any) -> bool:
    """Returns whether a value is of a type; what is no plain type fits always."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple and arguments[1:] == (...,):
        return isinstance(value, tuple | list) and all(_fits(x, arguments[0]) for x in value)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return origin is not None or not isinstance(hint, type) or isinstance(value, hint)


def parse_options(texts: Iterable[str]) -> dict[str, Any]:
    """Returns `key=value` texts as a dict; values are JSON where they parse, else text.

    Raises:
      AgentError: a text without `=`.
    """
    options = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise AgentError(f"expected setting=value, got {text!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        options[key] = tuple(parsed) if isinstance(parsed, list) else parsed
    return options
