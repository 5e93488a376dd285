"""bsuite experiments (Osband et al., "Behaviour suite for reinforcement learning", 2020), by id.

They are dm_env environments already. Here they get our seed, plain action specs, and none of
bsuite's logging.
"""

from collections.abc import Mapping
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from seedlib.environments import errors

# bsuite 0.3.5 writes `np.int` in the action specs of these, which NumPy 1.24 removed; all of them
# have three actions.
_THREE_ACTIONS = ("catch", "cartpole")


class BsuiteEnvironment(dm_env.Environment):
    """One setting of one bsuite experiment. Observations keep bsuite's shape, mostly `[1, n]`."""

    def __init__(self, bsuite_id: str, seed: int) -> None:
        """Makes the experiment and seeds it.

        The task itself (lengths, and mappings of actions that the id fixes) does not depend on
        `seed`; what is random within it does. Some experiments have nothing random in them.

        Args:
          bsuite_id: for example `memory_len/8`.
          seed: of the experiment's random numbers.

        Raises:
          EnvironmentLoadError: where the id is unknown or its data set is out of reach.
        """
        sweep = _check_id(bsuite_id)
        # `load` instead of `load_from_id`, which prints.
        from bsuite.bsuite import load

        self._experiment = bsuite_id.partition("/")[0]
        try:
            self._environment = load(self._experiment, sweep.SETTINGS[bsuite_id])
        except OSError as error:
            raise errors.EnvironmentLoadError(
                f"bsuite environment {bsuite_id!r} cannot read or fetch its data set: {error}"
            ) from error
        _reseed(self._environment, seed)

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode."""
        return self._environment.reset()

    def step(self, action: Any) -> dm_env.TimeStep:
        """Takes one step; after a LAST step, begins an episode."""
        return self._environment.step(action)

    def observation_spec(self) -> specs.Array:
        """As bsuite says."""
        return self._environment.observation_spec()

    def action_spec(self) -> specs.DiscreteArray:
        """A discrete action; every bsuite experiment has one."""
        if self._experiment.startswith(_THREE_ACTIONS):
            return specs.DiscreteArray(3, name="action")
        return self._environment.action_spec()


def check(argument: str, options: Mapping[str, Any]) -> None:
    """Refuses an id that bsuite does not know, and any option.

    Raises:
      EnvironmentLoadError: naming the value.
    """
    _check_id(argument)
    for name in options:
        raise errors.EnvironmentLoadError(
            f"bsuite environments have no options, got {name!r}; the id holds the setting"
        )


def make(argument: str, seed: int, options: Mapping[str, Any]) -> BsuiteEnvironment:
    """Returns the experiment with the id `argument`."""
    del options
    return BsuiteEnvironment(argument, seed)


def action_repeat(argument: str, options: Mapping[str, Any]) -> int:
    """Returns 1."""
    del argument, options
    return 1


def _check_id(bsuite_id: str) -> Any:
    """Returns `bsuite.sweep` after looking up the id in it."""
    try:
        # Here and not at the top: bsuite brings pandas and scikit-image.
        from bsuite import sweep
    except ImportError as error:
        raise errors.EnvironmentLoadError(
            f"environment 'bsuite:{bsuite_id}' needs the bsuite package: install seedlib[bsuite] "
            f"({error})"
        ) from error
    if bsuite_id in sweep.SETTINGS:
        return sweep
    last_setting: dict[str, str] = {}
    for known in sweep.SWEEP:
        experiment, _, setting = known.partition("/")
        last_setting[experiment] = setting
    experiment = bsuite_id.partition("/")[0]
    if experiment in last_setting:
        possible = f"possible are {experiment}/0 to {experiment}/{last_setting[experiment]}"
    else:
        possible = f"possible are {', '.join(last_setting)}, each with /<setting>"
    raise errors.UnknownEnvironmentError(f"unknown environment 'bsuite:{bsuite_id}'; {possible}")


def _reseed(environment: Any, seed: int) -> None:
    """Seeds the random state of an experiment and of every wrapper around it.

    Seeded in place, because some hold on to their generator in closures. The generators of action
    mappings have done their work when an experiment is made, and stay as the id says.
    """
    layers = [environment]
    while "_env" in vars(layers[-1]):
        layers.append(vars(layers[-1])["_env"])
    states = np.random.SeedSequence(seed).generate_state(len(layers))
    for layer, state in zip(layers, states, strict=True):
        if "_rng" in vars(layer):
            vars(layer)["_rng"].seed(int(state))
