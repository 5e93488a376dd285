"""Environment factories: small values that travel to an actor and make environments there.

A name is `kind:argument`. Each kind (see `kinds`) is a module of this package with three functions:
`check(argument, options)` refuses what cannot be made, `make(argument, seed, options)` makes it,
and `action_repeat(argument, options)` counts environment frames per agent step. The module, and
through it the simulator, is imported when first needed.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import dm_env

from seedlib.environments import errors, kinds


@dataclasses.dataclass(frozen=True)
class EnvironmentFactory:
    """Makes environments of one name. Cheap to make, compare and pickle; holds no simulator.

    Attributes:
      name: for example `catch`, `gymnasium:CartPole-v1`, `atari:Pong`, `bsuite:memory_len/8`,
        `synthetic:84x84x4` or `my_module:make`; see `load`.
      options: keyword arguments of the kind, checked when the factory is made.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Refuses a name or an option that cannot be.

        Raises:
          EnvironmentLoadError: naming it, and what is possible.
        """
        object.__setattr__(self, "options", dict(self.options))
        module, argument = _resolve(self.name)
        module.check(argument, self.options)

    def __call__(self, seed: int) -> dm_env.Environment:
        """Returns a new environment.

        Args:
          seed: at least 0; the same seed and actions give the same episodes, as far as the
            simulator can be seeded.

        Raises:
          EnvironmentLoadError: where it cannot be made or handled.
        """
        module, argument = _resolve(self.name)
        return module.make(argument, int(seed), self.options)

    @property
    def action_repeat(self) -> int:
        """Environment frames per agent step."""
        module, argument = _resolve(self.name)
        return module.action_repeat(argument, self.options)


def load(name: str, **options: Any) -> EnvironmentFactory:
    """Returns the factory of an environment by name, after checking name and options.

    Args:
      name: one of
        `catch`: a falling ball and a paddle (options `rows`, `columns`);
        `gymnasium:<id>`: a registered Gymnasium environment (options go to `gymnasium.make`);
        `atari:<Game>`: see `seedlib.environments.atari` (options are `AtariSettings`);
        `bsuite:<experiment>/<setting>`: for example `bsuite:memory_len/8`;
        `synthetic:<HxWxC>`: uint8 images that cost nothing, to measure with (options
        `episode_length`, `num_actions`);
        `<module>:<function>`: your own, see `seedlib.environments.user` (options go to the
        function).
      **options: keyword arguments of that kind.

    Raises:
      UnknownEnvironmentError: where there is no such environment; lists what is possible.
      EnvironmentLoadError: where an option is refused.
    """
    return EnvironmentFactory(name, options)


def _resolve(name: str) -> tuple[ModuleType, str]:
    """Returns the module of the kind that `name` belongs to, and the rest of the name."""
    prefix, colon, argument = name.partition(":") if isinstance(name, str) else ("", "", "")
    if prefix in kinds.KINDS:
        module, usage = kinds.KINDS[prefix]
        if not argument and (colon or ":" in usage):
            raise errors.UnknownEnvironmentError(f"unknown environment {name!r}: expected {usage}")
    elif prefix and argument:
        module, argument = "user", name
    else:
        raise errors.UnknownEnvironmentError(
            f"unknown environment {name!r}; possible are {kinds.USAGE}"
        )
    return importlib.import_module(f"seedlib.environments.{module}"), argument
