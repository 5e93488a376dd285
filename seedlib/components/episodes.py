"""Returns and lengths of episodes, from time-step rows of many environments."""

from typing import NamedTuple

import numpy as np


class Episodes(NamedTuple):
    """Episodes that ended. Arrays `[k]`.

    Attributes:
      environment_id: int32, which environment.
      returns: float64, the sum of unclipped rewards.
      lengths: int64, agent steps.
      evaluate: bool, whether it was an evaluation.
    """

    environment_id: np.ndarray
    returns: np.ndarray
    lengths: np.ndarray
    evaluate: np.ndarray


class EpisodeTracker:
    """Sums rewards of each environment from FIRST to LAST, whether terminated or truncated.

    An episode whose FIRST step was not seen (the environment joined in the middle), or that broke
    off without a LAST step, is never reported. Owned by one thread.
    """

    def __init__(self, slots: int) -> None:
        """Starts with no episode under way in any of `slots` environments."""
        self._returns = np.zeros(slots, np.float64)
        self._lengths = np.zeros(slots, np.int64)
        self._whole = np.zeros(slots, np.bool_)

    def append(
        self,
        slots: np.ndarray,
        step_type: np.ndarray,
        reward: np.ndarray,
        environment_id: np.ndarray,
        evaluate: np.ndarray,
    ) -> Episodes | None:
        """Adds one step of each of some environments; arrays `[n]`.

        Returns:
          The episodes that ended with these steps, or None.
        """
        first = step_type == 0
        self._returns[slots] = np.where(first, 0.0, self._returns[slots] + reward)
        self._lengths[slots] = np.where(first, 0, self._lengths[slots] + 1)
        self._whole[slots] |= first
        last = np.flatnonzero(step_type == 2)
        if not len(last):
            return None
        ended = last[self._whole[slots[last]]]
        where = slots[ended]
        episodes = Episodes(
            environment_id[ended].copy(),
            self._returns[where],
            self._lengths[where],
            evaluate[ended].copy(),
        )
        self._whole[slots[last]] = False
        return episodes if len(ended) else None

    def reset(self, slots: np.ndarray) -> None:
        """Forgets the episodes under way in `slots`."""
        self._whole[slots] = False
