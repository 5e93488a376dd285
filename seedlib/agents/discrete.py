"""Which action specs are discrete, and what their numbers may be; needs no JAX."""

from typing import Any

import numpy as np
import tree
from dm_env import specs as dm_specs

from seedlib import types

MAXIMUM_VALUES = 1 << 16
"""An integer action with more values than this per component is not treated as a choice."""


def bounds(path: tuple[Any, ...], leaf: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the least value and the number of values of each number in an action leaf, `[K]`.

    Args:
      path: of the leaf, for messages.
      leaf: a `dm_env.specs.Array`.

    Raises:
      ValueError: where the leaf is not discrete; the message names path, dtype and shape.
    """
    where = "/".join(["action", *map(str, path)])
    if isinstance(leaf, dm_specs.DiscreteArray):
        return np.zeros(1, np.int64), np.array([leaf.num_values], np.int64)
    if not isinstance(leaf, dm_specs.BoundedArray) or not np.issubdtype(leaf.dtype, np.integer):
        raise ValueError(
            f"{where}: {type(leaf).__name__} of dtype {getattr(leaf, 'dtype', None)} and shape "
            f"{getattr(leaf, 'shape', None)} is not supported; only discrete actions and bounded "
            "integer ones are"
        )
    minimum = np.broadcast_to(leaf.minimum, leaf.shape).astype(np.int64).ravel()
    sizes = np.broadcast_to(leaf.maximum, leaf.shape).astype(np.int64).ravel() - minimum + 1
    if sizes.size and sizes.max() > MAXIMUM_VALUES:
        raise ValueError(
            f"{where}: {sizes.max()} values per number are too many to choose from, at most "
            f"{MAXIMUM_VALUES}"
        )
    return minimum, sizes


def check(action_spec: types.Nested) -> None:
    """Refuses actions that are not discrete.

    Args:
      action_spec: nested `dm_env.specs.Array`.

    Raises:
      ValueError: naming the leaf, or where there is nothing to choose.
    """
    sizes = [bounds(path, leaf)[1] for path, leaf in tree.flatten_with_path(action_spec)]
    if not sum(int(size.sum()) for size in sizes):
        raise ValueError(f"action: {action_spec} holds no number to choose")
