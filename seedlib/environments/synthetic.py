"""Synthetic images: an environment that costs nothing per step, to measure everything else with.

All time steps are made in advance and handed out in turn, so a step is one list access.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from seedlib.environments import errors
from seedlib.environments import options as options_lib

# Images that are handed out in turn. Enough that neighbours in a batch differ, few enough that
# they stay in cache and measuring does not turn into measuring memory.
_IMAGES = 10


@dataclasses.dataclass(frozen=True)
class SyntheticSettings:
    """What an episode looks like.

    Attributes:
      episode_length: transitions in an episode; its end is a termination.
      num_actions: actions 0 to `num_actions - 1`, none of which matters.
    """

    episode_length: int = 1000
    num_actions: int = 4

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be.

        Raises:
          EnvironmentLoadError: naming the field and its value.
        """
        options_lib.at_least(1, episode_length=self.episode_length, num_actions=self.num_actions)


class Synthetic(dm_env.Environment):
    """Random uint8 images in a fixed cycle; reward 1 on every tenth transition, else 0.

    The observation of a step is the same array each time it comes round: do not write to it.
    """

    def __init__(
        self, shape: tuple[int, ...], seed: int, settings: SyntheticSettings | None = None
    ) -> None:
        """Makes all time steps.

        Args:
          shape: of an observation.
          seed: of the pixels.
          settings: length of an episode and number of actions.
        """
        settings = settings or SyntheticSettings()
        self._shape, self._settings = tuple(shape), settings
        random = np.random.default_rng(seed)
        images = random.integers(0, 256, size=(_IMAGES, *self._shape), dtype=np.uint8)
        images.flags.writeable = False
        self._cycle = [
            dm_env.transition(1.0 if index == 0 else 0.0, image)
            for index, image in enumerate(images)
        ]
        last = self._cycle[settings.episode_length % _IMAGES]
        self._first = dm_env.restart(images[0])
        self._last = dm_env.termination(last.reward, last.observation)
        self._length = settings.episode_length
        self._taken = self._length  # Transitions taken in this episode; the first step resets.

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode."""
        self._taken = 0
        return self._first

    def step(self, action: Any) -> dm_env.TimeStep:
        """Hands out the next time step; the action does not matter."""
        taken = self._taken + 1
        if taken > self._length:
            return self.reset()
        self._taken = taken
        return self._last if taken == self._length else self._cycle[taken % _IMAGES]

    def observation_spec(self) -> specs.BoundedArray:
        """A uint8 image."""
        return specs.BoundedArray(self._shape, np.uint8, 0, 255, name="observation")

    def action_spec(self) -> specs.DiscreteArray:
        """One of `num_actions`."""
        return specs.DiscreteArray(self._settings.num_actions, name="action")


def check(argument: str, options: Mapping[str, Any]) -> None:
    """Refuses a shape or an option that cannot be.

    Raises:
      EnvironmentLoadError: naming the value.
    """
    _shape(argument)
    options_lib.settings(SyntheticSettings, "synthetic", options)


def make(argument: str, seed: int, options: Mapping[str, Any]) -> Synthetic:
    """Returns a synthetic environment with observations of shape `argument`, such as `84x84x4`."""
    settings = options_lib.settings(SyntheticSettings, "synthetic", options)
    return Synthetic(_shape(argument), seed, settings)


def action_repeat(argument: str, options: Mapping[str, Any]) -> int:
    """Returns 1."""
    del argument, options
    return 1


def _shape(argument: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", argument, flags=re.ASCII):
        raise errors.UnknownEnvironmentError(
            f"unknown environment 'synthetic:{argument}': expected a shape of positive sizes such "
            "as synthetic:84x84x4"
        )
    return tuple(int(size) for size in argument.split("x"))
