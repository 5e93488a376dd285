"""R2D2: recurrent Q-learning from a prioritised replay of sequences.

Kapturowski et al., 2019, https://openreview.net/forum?id=r1lyTjAqYX.

What needs JAX is imported when it is first asked for, so that `Config` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

from seedlib.agents.r2d2.config import Config, ReplaySettings, atari_config

if TYPE_CHECKING:
    from seedlib.agents.r2d2.agent import TrainingState, make_agent, make_network
    from seedlib.agents.r2d2.losses import (
        TemporalDifference,
        double_q_learning,
        n_step_returns,
        n_step_temporal_difference,
        sequence_priority,
        signed_hyperbolic,
        signed_parabolic,
        value_transform,
    )

__all__ = [
    "Config",
    "ReplaySettings",
    "TemporalDifference",
    "TrainingState",
    "atari_config",
    "double_q_learning",
    "make_agent",
    "make_network",
    "n_step_returns",
    "n_step_temporal_difference",
    "sequence_priority",
    "signed_hyperbolic",
    "signed_parabolic",
    "value_transform",
]

_OF_AGENT = ("TrainingState", "make_agent", "make_network")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{'agent' if name in _OF_AGENT else 'losses'}")
    return getattr(module, name)
