"""Environments as a user may bring them: one that tells what it sees, and several that go wrong.

What an environment does depends on the name of its process, which is how a test tells training
from evaluation and one actor from another.
"""

import json
import os
import pathlib
import sys
import threading
import time

import dm_env
import gymnasium
import numpy as np
import psutil
from dm_env import specs

from seedlib import nodes
from seedlib.environments import catch

EVALUATION_REWARD = 1e6


def process_name() -> str:
    """Returns what the launcher called this process."""
    return os.environ.get(nodes.PROCESS_VARIABLE, "")


class Spy(catch.Catch):
    """Catch that writes to a folder who makes it and what its process has loaded by then."""

    def __init__(self, seed: int, directory: str, close_seconds: float = 0.0) -> None:
        super().__init__(seed)
        self._folder = pathlib.Path(directory)
        self._steps = 0
        self._close_seconds = close_seconds
        self._evaluates = process_name().startswith("evaluator")
        self._tell("made", seed=seed, restarts=os.environ.get(nodes.RESTARTS_VARIABLE))

    def step(self, action: int) -> dm_env.TimeStep:
        self._steps += 1
        if self._steps == 50:  # The session is open, and everything is loaded.
            rss = psutil.Process().memory_info().rss
            self._tell("stepped", modules=sorted(sys.modules), rss=rss)
        time_step = super().step(action)
        if self._evaluates and time_step.last():
            time_step = time_step._replace(reward=EVALUATION_REWARD)
        return time_step

    def close(self) -> None:
        self._tell("closing")
        time.sleep(self._close_seconds)

    def _tell(self, event: str, **facts: object) -> None:
        line = json.dumps({"event": event, "process": process_name(), "pid": os.getpid(), **facts})
        with open(self._folder / f"{process_name() or 'launcher'}.jsonl", "a") as file:
            file.write(line + "\n")


def told(directory: pathlib.Path, event: str) -> list[dict]:
    """Returns what the spies of all processes have written about an event."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [fact for fact in map(json.loads, lines) if fact["event"] == event]


def spy(seed: int, directory: str, close_seconds: float = 0.0) -> Spy:
    return Spy(seed, directory, close_seconds)


class Broken(catch.Catch):
    """Catch that raises after some steps."""

    def __init__(self, seed: int, after: int) -> None:
        super().__init__(seed)
        self._left = after

    def step(self, action: int) -> dm_env.TimeStep:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the simulator has lost its ball")
        return super().step(action)


def broken(seed: int) -> catch.Catch:
    return Broken(seed, after=100)


def broken_in_evaluation(seed: int) -> catch.Catch:
    return Broken(seed, after=5) if process_name().startswith("evaluator") else catch.Catch(seed)


class Hanging(catch.Catch):
    """Catch whose first life in the first actor never comes back from a step."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        first = os.environ.get(nodes.RESTARTS_VARIABLE) == "0"
        self._left = 200 if first and process_name() == "actor-0" else -1

    def step(self, action: int) -> dm_env.TimeStep:
        self._left -= 1
        if self._left == 0:
            threading.Event().wait()
        return super().step(action)


def hanging(seed: int) -> catch.Catch:
    return Hanging(seed)


class NotANumber(catch.Catch):
    """Catch whose rewards stop being numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._steps = 0

    def step(self, action: int) -> dm_env.TimeStep:
        self._steps += 1
        time_step = super().step(action)
        return time_step._replace(reward=np.nan) if self._steps == 100 else time_step


def not_a_number(seed: int) -> catch.Catch:
    return NotANumber(seed)


class Text(catch.Catch):
    """Observations that no device can hold."""

    def observation_spec(self) -> dict:
        return {"board": super().observation_spec(), "hint": specs.StringArray((2,))}


def text(seed: int) -> catch.Catch:
    return Text(seed)


class Steering(catch.Catch):
    """Continuous actions."""

    def action_spec(self) -> dict:
        return {"wheel": specs.BoundedArray((3,), np.float32, -1.0, 1.0)}


def steering(seed: int) -> catch.Catch:
    return Steering(seed)


def unmade(seed: int) -> gymnasium.Env:
    raise OSError(f"no licence for the simulator with seed {seed}")
