"""An environment of one's own: a walker on a line looks for a target.

python -m programs.seed --env=programs.examples.own_environment:make --num_steps=30000 \
    --logdir=runs/own_environment
"""

import dm_env
import numpy as np
from dm_env import specs


class Line(dm_env.Environment):
    """The walker starts in the middle; reaching the target pays 1 and ends the episode.

    The observation is the way to the target as a part of the line, float32 `[1]`.
    """

    def __init__(self, seed: int, size: int = 11, time_limit: int = 20) -> None:
        """Makes a line of `size` places."""
        self._random = np.random.default_rng(seed)
        self._size = size
        self._time_limit = time_limit
        self._position = self._target = self._steps = 0
        self._over = True

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode."""
        self._over = False
        self._steps = 0
        self._position = self._size // 2
        self._target = int(self._random.choice([0, self._size - 1]))
        return dm_env.restart(self._observation())

    def step(self, action: int) -> dm_env.TimeStep:
        """Moves by `action - 1`. The action after a LAST step is ignored: that one resets."""
        if self._over:
            return self.reset()
        self._position = int(np.clip(self._position + action - 1, 0, self._size - 1))
        self._steps += 1
        if self._position == self._target:
            self._over = True
            return dm_env.termination(1.0, self._observation())
        if self._steps == self._time_limit:
            # The line goes on, our patience does not: a truncation, whose discount is not 0.
            self._over = True
            return dm_env.truncation(0.0, self._observation())
        return dm_env.transition(0.0, self._observation())

    def observation_spec(self) -> specs.BoundedArray:
        """The way to the target."""
        return specs.BoundedArray((1,), np.float32, -1.0, 1.0, name="way")

    def action_spec(self) -> specs.DiscreteArray:
        """0 left, 1 stay, 2 right."""
        return specs.DiscreteArray(3, name="step")

    def _observation(self) -> np.ndarray:
        return np.array([(self._target - self._position) / self._size], np.float32)


def make(seed: int, size: int = 11) -> Line:
    """Returns an environment; `--env_option=size=21` arrives here."""
    return Line(seed, size)
