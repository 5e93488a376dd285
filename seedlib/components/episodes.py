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
        # Return, length and whether FIRST was seen: one array, since each that is indexed costs a
        # call. Lengths are exact up to 2^53.
        self._totals = np.zeros((slots, 3), np.float64)

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
        totals = self._totals[slots]
        totals[:, 0] += reward
        totals[:, 1] += 1
        first = step_type == 0
        if first.any():
            totals[first] = 0.0, 0.0, 1.0
        last = step_type == 2
        episodes = None
        if last.any():
            ended = np.flatnonzero(last & (totals[:, 2] > 0))
            totals[last, 2] = 0.0
            if len(ended):
                episodes = Episodes(
                    environment_id[ended],
                    totals[ended, 0],
                    totals[ended, 1].astype(np.int64),
                    evaluate[ended],
                )
        self._totals[slots] = totals
        return episodes

    def reset(self, slots: np.ndarray) -> None:
        """Forgets the episodes under way in `slots`."""
        self._totals[slots, 2] = 0.0
