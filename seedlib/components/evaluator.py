"""Evaluation: rounds of whole episodes with greedy actions, apart from training.

An evaluator is an actor whose sessions say so: the policy then takes its mode, and no step of it
reaches a table or a training counter.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import dm_env
import numpy as np

from seedlib.components import actor as actor_lib
from seedlib.components.transport import service


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig:
    """How an evaluator works.

    Attributes:
      episodes: whole episodes per round.
      period: seconds from the start of one round to that of the next, if the round took less.
      actor: what to do when things go wrong; its `evaluate` is taken as true.
    """

    episodes: int = 10
    period: float = 30.0
    actor: actor_lib.ActorConfig = dataclasses.field(
        default_factory=lambda: actor_lib.ActorConfig(evaluate=True)
    )

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        if self.episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {self.episodes}")
        if self.period < 0:
            raise ValueError(f"period must not be negative, got {self.period}")


class Evaluator:
    """Plays rounds against a policy service. Owned by one thread."""

    def __init__(
        self,
        environment: actor_lib.BatchedEnvironment,
        policy: service.PolicyService,
        environment_ids: Sequence[int],
        name: str = "evaluator",
        config: EvaluatorConfig | None = None,
    ) -> None:
        """Connects nothing yet.

        Args:
          environment: what to play; it must have been made for evaluation.
          policy: who answers.
          environment_ids: one for each environment, unique in the run.
          name: for messages.
          config: how to play.
        """
        self._config = config or EvaluatorConfig()
        self._environment = environment
        self._make_actor: Callable[[], actor_lib.EnvironmentActor] = lambda: (
            actor_lib.EnvironmentActor(
                environment,
                policy,
                environment_ids,
                name,
                dataclasses.replace(self._config.actor, evaluate=True),
            )
        )

    def play_round(self, stop: Callable[[], bool] = lambda: False) -> np.ndarray | None:
        """Plays exactly `episodes` fresh whole episodes.

        Every environment plays its share, so that short episodes are not preferred.

        Returns:
          Their returns, float64 `[episodes]`, or None where it was told to stop before the end.

        Raises:
          Whatever `EnvironmentActor.step` raises.
        """
        size = self._environment.size
        share = [
            self._config.episodes // size + (index < self._config.episodes % size)
            for index in range(size)
        ]
        sums = np.zeros(size, np.float64)
        played: list[list[float]] = [[] for _ in range(size)]
        actor = self._make_actor()
        try:
            while any(len(done) < wanted for done, wanted in zip(played, share, strict=True)):
                if not actor.step(stop):
                    return None
                time_steps: dm_env.TimeStep = actor.time_steps
                first = time_steps.step_type == int(dm_env.StepType.FIRST)
                # The round's first FIRST step was answered before this loop looked.
                sums = np.where(first, 0.0, sums + time_steps.reward)
                for index in np.flatnonzero(time_steps.step_type == int(dm_env.StepType.LAST)):
                    if len(played[index]) < share[index]:
                        played[index].append(float(sums[index]))
        finally:
            actor.disconnect()
        return np.array([episode for done in played for episode in done])

    def run(
        self,
        stop: Callable[[], bool],
        report: Callable[[dict[str, Any]], None],
        wait: Callable[[float], Any] = time.sleep,
    ) -> None:
        """Plays rounds until told to stop.

        Args:
          stop: asked before each step.
          report: takes each round's figures.
          wait: waits for some seconds, or less when the program ends.
        """
        try:
            while not stop():
                started = time.monotonic()
                returns = self.play_round(stop)
                if returns is None:
                    return
                seconds = time.monotonic() - started
                report(
                    {
                        "episodes": len(returns),
                        "return_mean": float(returns.mean()),
                        "return_median": float(np.median(returns)),
                        "return_min": float(returns.min()),
                        "return_max": float(returns.max()),
                        "seconds": seconds,
                    }
                )
                wait(max(0.0, self._config.period - seconds))
        finally:
            self._environment.close()
