"""Catch: a ball falls through a small board, and a paddle in the bottom row must be under it.

The game of Mnih et al., "Recurrent models of visual attention" (2014), in the form that bsuite
uses: the ball starts in a random column of the top row and falls one row per step, the paddle
starts in the middle. The last step has reward +1 (caught) or -1 and ends the episode.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from seedlib.environments import errors
from seedlib.environments import options as options_lib

_NUM_ACTIONS = 3  # Left, stay, right.


@dataclasses.dataclass(frozen=True)
class CatchSettings:
    """The size of the board.

    Attributes:
      rows: an episode has `rows - 1` transitions.
      columns: width of the board; the paddle starts at `columns // 2`.
    """

    rows: int = 10
    columns: int = 5

    def __post_init__(self) -> None:
        """Refuses a board that cannot be played.

        Raises:
          EnvironmentLoadError: naming the field and its value.
        """
        options_lib.at_least(2, rows=self.rows)
        options_lib.at_least(1, columns=self.columns)


class Catch(dm_env.Environment):
    """The game. Observations are float32 `[rows, columns]`: 1 at ball and paddle, else 0."""

    def __init__(self, seed: int, settings: CatchSettings | None = None) -> None:
        """Makes the game.

        Args:
          seed: of the ball's columns.
          settings: the size of the board.
        """
        settings = settings or CatchSettings()
        self._rows, self._columns = settings.rows, settings.columns
        self._random = np.random.default_rng(seed)
        self._ball = [0, 0]  # Row, column.
        self._paddle = 0
        self._needs_reset = True

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode."""
        self._ball = [0, int(self._random.integers(self._columns))]
        self._paddle = self._columns // 2
        self._needs_reset = False
        return dm_env.restart(self._board())

    def step(self, action: Any) -> dm_env.TimeStep:
        """Moves the paddle by `action - 1` (it stops at the walls), then drops the ball by one."""
        if self._needs_reset:
            return self.reset()
        self._paddle = min(max(self._paddle + int(action) - 1, 0), self._columns - 1)
        self._ball[0] += 1
        if self._ball[0] < self._rows - 1:
            return dm_env.transition(0.0, self._board())
        self._needs_reset = True
        return dm_env.termination(1.0 if self._paddle == self._ball[1] else -1.0, self._board())

    def observation_spec(self) -> specs.BoundedArray:
        """The board, float32 `[rows, columns]`."""
        return specs.BoundedArray(
            (self._rows, self._columns), np.float32, 0.0, 1.0, name="observation"
        )

    def action_spec(self) -> specs.DiscreteArray:
        """0 left, 1 stay, 2 right."""
        return specs.DiscreteArray(_NUM_ACTIONS, name="action")

    def _board(self) -> np.ndarray:
        board = np.zeros((self._rows, self._columns), np.float32)
        board[self._ball[0], self._ball[1]] = 1.0
        board[self._rows - 1, self._paddle] = 1.0
        return board


def check(argument: str, options: Mapping[str, Any]) -> None:
    """Refuses `catch:<anything>` and options that cannot be.

    Raises:
      EnvironmentLoadError: naming the value.
    """
    if argument:
        raise errors.UnknownEnvironmentError(
            f"unknown environment 'catch:{argument}': expected catch"
        )
    options_lib.settings(CatchSettings, "catch", options)


def make(argument: str, seed: int, options: Mapping[str, Any]) -> Catch:
    """Returns a game of catch; `argument` is empty."""
    del argument
    return Catch(seed, options_lib.settings(CatchSettings, "catch", options))


def action_repeat(argument: str, options: Mapping[str, Any]) -> int:
    """Returns 1."""
    del argument, options
    return 1
