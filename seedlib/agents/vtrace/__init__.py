"""V-trace: the off-policy actor-critic of IMPALA and SEED RL, learning each unroll once.

Espeholt et al., 2018, https://arxiv.org/abs/1802.01561.

What needs JAX is imported when it is first asked for, so that `Config` is cheap.
"""

import importlib
from typing import TYPE_CHECKING, Any

from seedlib.agents.vtrace.config import Config

if TYPE_CHECKING:
    from seedlib.agents.vtrace.agent import TrainingState, make_agent
    from seedlib.agents.vtrace.losses import (
        Loss,
        SequenceLoss,
        Transitions,
        VTrace,
        vtrace,
        vtrace_loss,
    )
    from seedlib.agents.vtrace.networks import PolicyValue, make_network

__all__ = [
    "Config",
    "Loss",
    "PolicyValue",
    "SequenceLoss",
    "TrainingState",
    "Transitions",
    "VTrace",
    "make_agent",
    "make_network",
    "vtrace",
    "vtrace_loss",
]

_MODULES = {
    "TrainingState": "agent",
    "make_agent": "agent",
    "PolicyValue": "networks",
    "make_network": "networks",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'losses')}")
    return getattr(module, name)
