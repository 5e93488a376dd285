"""Time-step rows in, whole unrolls out.

The assembler keeps the last `L` steps of every environment: a record of each, and an array for each
leaf that is too large for one. A batch of rows of different environments is scattered with one
indexed assignment for the records and one per large leaf, and the unrolls that became whole are
gathered with another: no Python loop over environments.

Consecutive unrolls of an environment share `L - period` steps, so with the default period each
transition is in exactly one unroll. An unroll may hold several episodes.
"""

from typing import Any

import numpy as np
import tree

from seedlib import specs, types
from seedlib.agents.agent import UnrollShape
from seedlib.components import records


class UnrollAssembler:
    """Cuts the steps of many environments into unrolls. Owned by one thread."""

    def __init__(
        self,
        layout: records.RecordLayout,
        state_spec: types.Nested,
        shape: UnrollShape,
        slots: int,
    ) -> None:
        """Allocates the arrays.

        Args:
          layout: of one step: an `Unroll` of leaves without a leading dimension; its
            `initial_state` is `()`.
          state_spec: specs of one environment's recurrent state; `()` where there is none.
          shape: how unrolls are cut.
          slots: how many environments.
        """
        self._layout = layout
        self._window = shape.window
        self._stride = shape.stride
        self._overlap = shape.window - shape.stride
        self._slots = slots
        # Flat `[slots * L]`: one index array is faster than two, and there is one for all leaves.
        cells = slots * self._window
        self._records = np.zeros(cells, layout.dtype)
        self._large = [np.zeros((cells, *shape), dtype) for shape, dtype in layout.large_specs]
        # States are wanted only where an unroll may start: every `stride` steps of the window.
        starts = -(-self._window // self._stride)
        self._states = specs.zeros(state_spec, (slots, starts))
        self._state_leaves = tree.flatten(self._states)
        self._length = np.zeros(slots, np.int64)

    def append(
        self, slots: np.ndarray, steps: records.Records, states: types.Nested
    ) -> types.Unroll | None:
        """Adds one step to each of some environments.

        Args:
          slots: int `[n]`, which environments; none twice.
          steps: of the layout, `[n]`.
          states: the recurrent state before the step, leaves `[n, ...]`. Read only where an unroll
            may start.

        Returns:
          The unrolls that are whole now, leaves `[k, L, ...]`, the caller's to keep; None where
          there are none.
        """
        position = self._length[slots]
        cells = slots * self._window + position
        self._records[cells] = np.ascontiguousarray(steps.small).view(self._layout.dtype)[:, 0]
        for stored, leaf in zip(self._large, steps.large, strict=True):
            stored[cells] = leaf
        if self._state_leaves:
            starts = np.flatnonzero(position % self._stride == 0)
            if len(starts):
                where = (slots[starts], position[starts] // self._stride)
                for stored, leaf in zip(self._state_leaves, tree.flatten(states), strict=True):
                    stored[where] = np.asarray(leaf)[starts]
        position += 1
        self._length[slots] = position
        whole = position == self._window
        return self._take(slots[whole]) if whole.any() else None

    def _take(self, whole: np.ndarray) -> types.Unroll:
        """Gathers the unrolls of slots whose window is full, and keeps their overlap."""
        gathered: list[Any] = []
        for stored in (self._records, *self._large):
            by_slot = stored.reshape(self._slots, self._window, *stored.shape[1:])
            leaf = by_slot[whole]
            by_slot[whole, : self._overlap] = leaf[:, self._stride :]
            gathered.append(leaf)
        unrolls: types.Unroll = self._layout.unpack(gathered[0], tuple(gathered[1:]))
        states = tree.map_structure(lambda stored: stored[whole, 0], self._states)
        for stored in self._state_leaves:
            stored[whole, :-1] = stored[whole, 1:]
        self._length[whole] = self._overlap
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
