"""The contract that an algorithm fulfils: one value made of pure functions.

The machinery (inference server, tables, learner) knows an algorithm by this value alone; it never
asks for a name. See `seedlib.agents.vtrace` for a complete one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from seedlib import types


class Policy(NamedTuple):
    """How to act.

    Attributes:
      initial_state: `initial_state(batch_size) -> state`, leaves `[batch_size, ...]`; `()` where
        the policy has no recurrent state.
      step: `step(params, keys, inputs, state) -> PolicyOutput`. `keys` is one JAX PRNG key per row
        (uint32 `[B, 2]`), so that the random stream of a row belongs to its environment and step
        and not to its place in a batch. `inputs` is a `types.PolicyInput` with leaves `[B, ...]`.
        The policy itself resets `state` (and whatever else it carries) to the initial one in rows
        whose step is FIRST. Rows must not influence each other.
    """

    initial_state: Callable[[int], types.Nested]
    step: Callable[[Any, types.Array, types.PolicyInput, types.Nested], types.PolicyOutput]


class Batch(NamedTuple):
    """What an update learns from.

    Attributes:
      unrolls: a `types.Unroll`, leaves `[B, L, ...]`, `info` is `()`.
      weight: float32 `[B]`, importance weight of each sequence (ones from a queue).
    """

    unrolls: types.Unroll
    weight: types.Array


class Update(NamedTuple):
    """What an update returns.

    Attributes:
      state: the training state after it.
      metrics: a flat dict of scalar arrays.
      priorities: float32 `[B]`, the new priority of each sequence, or None (from a queue).
    """

    state: Any
    metrics: dict[str, types.Array]
    priorities: types.Array | None


@dataclasses.dataclass(frozen=True)
class UnrollShape:
    """How the steps of an environment are cut into unrolls.

    Attributes:
      length: T, the transitions that an unroll is trained on.
      burn_in: steps in front of them that only warm up the recurrent state.
      period: steps between the starts of consecutive unrolls; `None` means `length`, so that each
        transition is trained on once.
    """

    length: int
    burn_in: int = 0
    period: int | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be.

        Raises:
          ValueError: where a size is out of range, naming it.
        """
        if self.length < 1:
            raise ValueError(f"unroll length must be at least 1, got {self.length}")
        if self.burn_in < 0:
            raise ValueError(f"burn_in must not be negative, got {self.burn_in}")
        if not 1 <= self.stride <= self.window:
            raise ValueError(
                f"unroll period must be in 1..{self.window} (burn_in + length + 1), "
                f"got {self.period}"
            )

    @property
    def window(self) -> int:
        """L, the steps in an unroll: `burn_in + length + 1`."""
        return self.burn_in + self.length + 1

    @property
    def stride(self) -> int:
        """The period, resolved."""
        return self.length if self.period is None else self.period


@dataclasses.dataclass(frozen=True)
class Agent:
    """An algorithm. Every function is pure and can be traced by `jax.jit`.

    Attributes:
      policy: how to act.
      init: `init(key) -> state`, the first training state (parameters, optimiser, targets, ...).
      update: `update(state, batch, key) -> Update`. The loss is a mean over *valid transitions* of
        the whole batch, so that the update does not depend on how many devices share the batch.
      policy_params: `policy_params(state) -> params`, what `policy.step` takes: parameters and
        whatever statistics travel with them.
      unroll: how unrolls are cut.
      batch_size: unrolls in a batch.
      replay: `None` for a FIFO queue (each unroll used once), or the settings of a replay table.
      initial_priority: `initial_priority(unrolls) -> float32 [B]` for fresh sequences in a
        replay, or None.
    """

    policy: Policy
    init: Callable[[types.Array], Any]
    update: Callable[[Any, Batch, types.Array], Update]
    policy_params: Callable[[Any], Any]
    unroll: UnrollShape
    batch_size: int
    replay: Any = None
    initial_priority: Callable[[types.Unroll], types.Array] | None = None

    def __post_init__(self) -> None:
        """Refuses a batch that cannot be.

        Raises:
          ValueError: where `batch_size` is below 1.
        """
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
