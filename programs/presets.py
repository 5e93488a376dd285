"""Sizes that suit an environment, where the user names none: a machine of a few cores."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Preset:
    """Defaults of a run.

    Attributes:
      num_actors: actor processes.
      envs_per_actor: environments in each.
      num_steps: agent steps over all training environments.
      agent: settings of the agent, by agent name.
      threshold: the return that counts as solved, drawn in the curve; None for none.
    """

    num_actors: int = 2
    envs_per_actor: int = 16
    num_steps: int = 1_000_000
    agent: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    threshold: float | None = None


_SMALL = {"batch_size": 16, "learning_rate": 1e-3, "entropy_cost": 3e-3}

_PRESETS = {
    "catch": Preset(2, 16, 500_000, {"vtrace": _SMALL}, threshold=0.95),
    # Rewards of 1 a step make values near 100; scaled down, the value loss leaves the policy room.
    "gymnasium:CartPole-v1": Preset(
        2,
        32,
        1_500_000,
        {
            "vtrace": {
                **_SMALL,
                "reward_scale": 0.1,
                "learning_rate_schedule": "linear",
                "schedule_steps": 4_700,
            }
        },
        threshold=475.0,
    ),
    "bsuite:memory_len/": Preset(
        2, 32, 500_000, {"vtrace": {**_SMALL, "lstm_size": 64}}, threshold=0.9
    ),
    "synthetic:": Preset(2, 8, 200_000, {"vtrace": {"batch_size": 8}}),
    "atari:": Preset(
        2,
        16,
        10_000_000,
        {
            "vtrace": {
                # Small batches: steps of the optimiser are what the first points wait for.
                "batch_size": 4,
                "learning_rate": 6e-4,
                "entropy_cost": 5e-3,
                "epsilon": 1e-5,
                "max_gradient_norm": 1.0,
                "reward_clip": 1.0,
            }
        },
    ),
}


def preset(environment: str) -> Preset:
    """Returns the preset with the longest name that `environment` begins with, else the default."""
    names = [name for name in _PRESETS if environment.startswith(name)]
    return _PRESETS[max(names, key=len)] if names else Preset()
