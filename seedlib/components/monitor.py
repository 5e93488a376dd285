"""Counts what a run's environments did, and knows when the run is over."""

import collections
import threading
import time
from typing import Any

import numpy as np
from acme.utils import counting

from seedlib.components import episodes as episodes_lib

_RECENT = 100


class RunMonitor:
    """A `StepObserver`: the counters of a run. Any thread may use it.

    Counters are Python integers in an Acme counter, so they neither overflow nor start again when
    a run goes on.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        action_repeat: int = 1,
        counter: counting.Counter | None = None,
    ) -> None:
        """Starts with nothing counted.

        Args:
          num_steps: agent steps, over all training environments, that end the run; None never.
          action_repeat: environment frames per agent step.
          counter: where to count, for one that is shared; None makes one.
        """
        self.counter = counter or counting.Counter()
        self._num_steps = num_steps
        self._action_repeat = action_repeat
        self._lock = threading.Lock()
        self._returns: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._evaluation_returns: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._lengths: collections.deque[int] = collections.deque(maxlen=_RECENT)
        self._started = time.monotonic()
        self._steps_before = 0
        self._wall_before = 0.0
        self._done = threading.Event()
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether `num_steps` is reached."""
        return self._done.is_set()

    def start_clock(self) -> None:
        """Begins to measure wall time and rates: when training starts, compiling included."""
        with self._lock:
            self._started = time.monotonic()

    def finish(self) -> None:
        """Ends the counting, so that a summary and a checkpoint of the run's end agree."""
        with self._lock:
            self._finished = True

    def observe(self, agent_steps: int, episodes: episodes_lib.Episodes | None) -> None:
        """See `StepObserver.observe`. What comes after the end is not counted."""
        with self._lock:
            if self._done.is_set() or self._finished:
                return
            new = {"agent_steps": agent_steps}
            if episodes is not None:
                training = ~episodes.evaluate
                self._returns.extend(episodes.returns[training].tolist())
                self._lengths.extend(episodes.lengths[training].tolist())
                self._evaluation_returns.extend(episodes.returns[~training].tolist())
                new["episodes"] = int(np.count_nonzero(training))
                new["evaluation_episodes"] = int(np.count_nonzero(~training))
            counts = self.counter.increment(**new)
            if self._num_steps is not None and counts["agent_steps"] >= self._num_steps:
                self._done.set()

    def figures(self) -> dict[str, Any]:
        """Returns the run's figures; means over the last 100 episodes are None before the first.

        `steps_per_second` is over the wall time since the (re)start, waiting included;
        `wall_seconds` is over all the run's starts.
        """
        with self._lock:
            counts = self.counter.get_counts()
            steps = counts.get("agent_steps", 0)
            wall = time.monotonic() - self._started
            return {
                "agent_steps": steps,
                "environment_frames": steps * self._action_repeat,
                "episodes": counts.get("episodes", 0),
                "return_mean_100": _mean(self._returns),
                "episode_length_mean_100": _mean(self._lengths),
                "evaluation_episodes": counts.get("evaluation_episodes", 0),
                "evaluation_return_mean_100": _mean(self._evaluation_returns),
                "steps_per_second": (steps - self._steps_before) / max(wall, 1e-9),
                "wall_seconds": self._wall_before + wall,
            }

    def save(self) -> dict[str, Any]:
        """Returns what `restore` needs, as JSON values."""
        figures = self.figures()
        with self._lock:
            return {
                "counts": dict(self.counter.get_counts()),
                "wall_seconds": figures["wall_seconds"],
                "returns": list(self._returns),
                "lengths": list(self._lengths),
                "evaluation_returns": list(self._evaluation_returns),
            }

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on from what `save` returned."""
        with self._lock:
            self.counter.restore({"counts": dict(saved["counts"]), "cache": {}})
            self._steps_before = saved["counts"].get("agent_steps", 0)
            self._wall_before = saved["wall_seconds"]
            self._returns.extend(saved["returns"])
            self._lengths.extend(saved["lengths"])
            self._evaluation_returns.extend(saved["evaluation_returns"])
            if self._num_steps is not None and self._steps_before >= self._num_steps:
                self._done.set()


def _mean(values: collections.deque[Any]) -> float | None:
    return float(np.mean(values)) if values else None
