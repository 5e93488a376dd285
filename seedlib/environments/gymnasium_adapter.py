"""Gymnasium environments as dm_env ones; environments of the older Gym interface too.

This module imports Gymnasium only where an environment is made by id.
"""

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import dm_env
import numpy as np

from seedlib import types
from seedlib.environments import errors, spaces

# Globals of this module cost less per step than attributes of another.
_TimeStep = dm_env.TimeStep
_MID = dm_env.StepType.MID
_LAST = dm_env.StepType.LAST

_STEP_RESULTS = 5  # observation, reward, terminated, truncated, info
_OLD_STEP_RESULTS = 4  # observation, reward, done, info


class GymnasiumEnvironment(dm_env.Environment):
    """One Gymnasium environment as a `dm_env.Environment`.

    Termination is a LAST step of discount 0, truncation one of discount 1, both at once discount 0.
    A step after a LAST one, or before the first reset, resets instead and ignores its action.

    Actions count from 0 (see `spaces.action_spec`). Rewards become Python floats. Observations have
    the structure of the spec, but their leaves are the environment's own objects: they are neither
    copied nor cast, and an environment that writes into the same array each step changes what it
    returned before. Copy a time step's observation before the next step, as the environment actor
    does. Their shapes are checked on the first reset and the first step.

    The older interface is adapted: `reset` may return the observation alone, and `step` four
    values, where `info["TimeLimit.truncated"]` tells truncation from termination.
    """

    def __init__(self, environment: Any, seed: int, name: str | None = None) -> None:
        """Adapts `environment`, which belongs to the adapter from now on.

        Args:
          environment: with `observation_space`, `action_space`, `reset` and `step`.
          seed: given to the first reset (or to the `seed` method of an old one) and to no other.
          name: what to call it in messages; by default its id or class.

        Raises:
          UnsupportedEnvironmentError: where it is one of several agents or environments, or a space
            is not supported; names the path of the space.
        """
        self._name = name or _name(environment)
        _check_single(environment, self._name)
        self._environment = environment
        self._seed: int | None = int(seed)
        self._observation_spec = spaces.observation_spec(
            environment.observation_space, f"{self._name}: observation"
        )
        self._action_spec = spaces.action_spec(environment.action_space, f"{self._name}: action")
        self._convert = spaces.observation_converter(environment.observation_space)
        self._to_environment = spaces.action_converter(environment.action_space)
        self._environment_step: Callable[[Any], Any] = environment.step
        self._needs_reset = True
        self._unchecked = True  # No step has been taken, so none has been looked at.

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode.

        Raises:
          UnsupportedEnvironmentError: where the first observation does not fit its space.
        """
        if self._seed is None:
            result = self._environment.reset()
        else:
            result = _seeded_reset(self._environment, self._seed)
            self._seed = None
        # The old interface returns the observation alone.
        new = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        observation = self._structured(result[0] if new else result)
        self._needs_reset = False
        return dm_env.restart(observation)

    def step(self, action: Any) -> dm_env.TimeStep:
        """Takes one step, or begins an episode where the last one is over.

        Args:
          action: as in `action_spec`.

        Raises:
          UnsupportedEnvironmentError: where a reward is not one number, or the first observation
            does not fit its space.
        """
        if self._needs_reset:
            return self.reset()
        result = self._environment_step(self._to_environment(action))
        if len(result) == _STEP_RESULTS:
            observation, reward, terminated, truncated, _ = result
        else:
            observation, reward, terminated, truncated = self._from_old(result)
        if type(reward) is not float:
            reward = self._scalar(reward)
        if self._unchecked:
            observation = self._structured(observation)
            self._unchecked = False
        elif self._convert is not None:
            observation = self._convert(observation)
        if terminated or truncated:
            self._needs_reset = True
            return _TimeStep(_LAST, reward, 0.0 if terminated else 1.0, observation)
        return _TimeStep(_MID, reward, 1.0, observation)

    def observation_spec(self) -> types.Nested:
        """Nested specs in the structure of the observation space."""
        return self._observation_spec

    def action_spec(self) -> types.Nested:
        """Nested specs in the structure of the action space; discrete actions count from 0."""
        return self._action_spec

    def close(self) -> None:
        """Closes the environment."""
        self._environment.close()

    def _structured(self, observation: Any) -> types.Nested:
        """Converts an observation, looking at it first where none has been stepped to yet."""
        if self._unchecked:
            spaces.check_observation(
                self._observation_spec, observation, f"{self._name}: observation"
            )
        return observation if self._convert is None else self._convert(observation)

    def _from_old(self, result: tuple[Any, ...]) -> tuple[Any, Any, bool, bool]:
        """Returns observation, reward, terminated and truncated of a step of the old interface."""
        if len(result) != _OLD_STEP_RESULTS:
            raise errors.UnsupportedEnvironmentError(
                f"{self._name}: step must return {_STEP_RESULTS} values "
                f"({_OLD_STEP_RESULTS} in the old interface), got {len(result)}"
            )
        observation, reward, done, info = result
        truncated = bool(done and info and info.get("TimeLimit.truncated", False))
        return observation, reward, bool(done) and not truncated, truncated

    def _scalar(self, reward: Any) -> float:
        array = np.asarray(reward)
        if array.shape not in ((), (1,)) or array.dtype.kind not in "biuf":
            raise errors.UnsupportedEnvironmentError(
                f"{self._name}: expected one number as reward, got {array.dtype} of shape "
                f"{array.shape}; environments of several agents are not supported"
            )
        return float(array.item())


def check(argument: str, options: Mapping[str, Any]) -> None:
    """Refuses an id that is not registered.

    Raises:
      UnknownEnvironmentError: naming the id, with Gymnasium's suggestions.
    """
    del options
    _spec(argument)


def make(argument: str, seed: int, options: Mapping[str, Any]) -> GymnasiumEnvironment:
    """Returns the environment with the id `argument`; options go to `gymnasium.make`."""
    import gymnasium

    spec = _spec(argument)
    # The adapter keeps the order of calls and checks the first values itself; Gymnasium's wrappers
    # for that cost time on every step.
    spec.order_enforce = False
    name = f"gymnasium:{argument}"
    try:
        environment = gymnasium.make(spec, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise errors.EnvironmentLoadError(
            f"environment {name!r} cannot be made: {_one_line(error)}"
        ) from error
    return GymnasiumEnvironment(environment, seed, name=name)


def action_repeat(argument: str, options: Mapping[str, Any]) -> int:
    """Returns the fixed frame skip of an id that has one (`ALE/...`), else 1."""
    frameskip = options.get("frameskip", _spec(argument).kwargs.get("frameskip", 1))
    return frameskip if isinstance(frameskip, int) else 1


def _spec(argument: str) -> Any:
    """Returns a copy of the registered `gymnasium.envs.registration.EnvSpec`."""
    name = f"gymnasium:{argument}"
    try:
        import gymnasium

        module, _, gymnasium_id = argument.rpartition(":")
        if module:  # Gymnasium's own `module:id`: importing the module registers the id.
            importlib.import_module(module)
        elif argument.startswith("ALE/"):
            importlib.import_module("ale_py")
    except ImportError as error:
        raise errors.EnvironmentLoadError(
            f"environment {name!r} needs a package that is not here: {_one_line(error)}"
        ) from error
    try:
        return copy.deepcopy(gymnasium.spec(gymnasium_id))
    except gymnasium.error.Error as error:
        raise errors.UnknownEnvironmentError(
            f"unknown environment {name!r}: {_one_line(error)}; gymnasium.registry lists all ids"
        ) from error


def _check_single(environment: Any, name: str) -> None:
    """Refuses environments of several agents and vectors of environments."""
    for layer in (environment, getattr(environment, "unwrapped", environment)):
        if hasattr(layer, "possible_agents"):
            raise errors.UnsupportedEnvironmentError(
                f"{name}: environments of several agents are not supported, and "
                f"{type(layer).__name__} has possible_agents"
            )
        if hasattr(layer, "single_action_space"):
            raise errors.UnsupportedEnvironmentError(
                f"{name}: {type(layer).__name__} is a vector of environments; give a single one"
            )
    for attribute in ("observation_space", "action_space", "reset", "step"):
        if not hasattr(environment, attribute):
            raise errors.UnsupportedEnvironmentError(
                f"{name}: {type(environment).__name__} has no {attribute}"
            )


def _seeded_reset(environment: Any, seed: int) -> Any:
    """Resets with a seed in whichever way an environment takes one, if any."""
    layers = (environment, getattr(environment, "unwrapped", environment))
    if all(_takes_seed(layer.reset) for layer in layers):
        return environment.reset(seed=seed)
    if callable(getattr(environment, "seed", None)):
        environment.seed(seed)
    return environment.reset()


def _takes_seed(reset: Callable[..., Any]) -> bool:
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _name(environment: Any) -> str:
    spec = getattr(environment, "spec", None)
    return getattr(spec, "id", None) or type(environment).__name__


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
