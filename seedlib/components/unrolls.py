"""Time-step rows in, whole unrolls out.

The assembler keeps the last steps of every environment in arrays `[slots, L, ...]`. A batch of rows
of different environments is scattered into them with one indexed assignment per leaf, and the
unrolls that became whole are gathered with another: no Python loop over environments.

Consecutive unrolls of an environment share `L - period` steps, so with the default period each
transition is in exactly one unroll. An unroll may hold several episodes.
"""

import numpy as np
import tree

from seedlib import specs, types
from seedlib.agents.agent import UnrollShape


class UnrollAssembler:
    """Cuts the steps of many environments into unrolls. Owned by one thread."""

    def __init__(
        self,
        step_spec: types.Unroll,
        state_spec: types.Nested,
        shape: UnrollShape,
        slots: int,
    ) -> None:
        """Allocates the arrays.

        Args:
          step_spec: specs of one step: an `Unroll` of leaves with `shape` and `dtype`, without a
            leading dimension; its `initial_state` is `()`.
          state_spec: specs of one environment's recurrent state; `()` where there is none.
          shape: how unrolls are cut.
          slots: how many environments.
        """
        self._window = shape.window
        self._stride = shape.stride
        self._overlap = shape.window - shape.stride
        self._steps = specs.zeros(step_spec._replace(initial_state=()), (slots, self._window))
        self._step_leaves = tree.flatten(self._steps)
        # States are wanted only where an unroll may start: every `stride` steps of the window.
        starts = -(-self._window // self._stride)
        self._states = specs.zeros(state_spec, (slots, starts))
        self._state_leaves = tree.flatten(self._states)
        self._length = np.zeros(slots, np.int64)

    def append(
        self, slots: np.ndarray, steps: types.Unroll, states: types.Nested
    ) -> types.Unroll | None:
        """Adds one step to each of some environments.

        Args:
          slots: int `[n]`, which environments; none twice.
          steps: leaves `[n, ...]`; `initial_state` is ignored.
          states: the recurrent state before the step, leaves `[n, ...]`. Read only where an unroll
            may start.

        Returns:
          The unrolls that are whole now, leaves `[k, L, ...]`, the caller's to keep; None where
          there are none.
        """
        position = self._length[slots]
        for stored, leaf in zip(
            self._step_leaves, tree.flatten(steps._replace(initial_state=())), strict=True
        ):
            stored[slots, position] = leaf
        if self._state_leaves:
            starts = np.flatnonzero(position % self._stride == 0)
            if len(starts):
                where = (slots[starts], position[starts] // self._stride)
                for stored, leaf in zip(self._state_leaves, tree.flatten(states), strict=True):
                    stored[where] = np.asarray(leaf)[starts]
        self._length[slots] = position + 1
        whole = slots[position + 1 == self._window]
        return self._take(whole) if len(whole) else None

    def _take(self, whole: np.ndarray) -> types.Unroll:
        """Gathers the unrolls of slots whose window is full, and keeps their overlap."""
        unrolls: types.Unroll = tree.map_structure(lambda stored: stored[whole], self._steps)
        states = tree.map_structure(lambda stored: stored[whole, 0], self._states)
        overlap, stride = self._overlap, self._stride
        gathered = tree.flatten(unrolls._replace(initial_state=()))
        for stored, leaf in zip(self._step_leaves, gathered, strict=True):
            stored[whole, :overlap] = leaf[:, stride:]
        for stored in self._state_leaves:
            stored[whole, :-1] = stored[whole, 1:]
        self._length[whole] = overlap
        return unrolls._replace(initial_state=states)

    def reset(self, slots: np.ndarray) -> int:
        """Drops the steps that are not yet in an unroll of their own.

        Args:
          slots: int `[n]`, environments that begin anew.

        Returns:
          How many steps were dropped (steps that an earlier unroll holds too are counted).
        """
        dropped = int(self._length[slots].sum())
        self._length[slots] = 0
        return dropped
