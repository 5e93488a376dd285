"""Gymnasium and Gym spaces as dm_env specs, and the conversions of values between the two.

Spaces are told apart by the names of their classes, so that neither package is imported here and
both work.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dm_env import specs

from seedlib import types
from seedlib.environments import errors

_Converter = Callable[[Any], Any]

_SUPPORTED = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple")


def observation_spec(space: Any, path: str) -> types.Nested:
    """Returns the specs of the observations in a space.

    Dict becomes a plain dict, Tuple a tuple, everything else a `BoundedArray` of the space's dtype
    (`DiscreteArray` for a Discrete space from 0). A Discrete space with another start keeps its
    values, start to start + n - 1.

    Args:
      space: a Gymnasium or Gym space.
      path: what to call it in messages.

    Raises:
      UnsupportedEnvironmentError: naming the path of the first space that cannot be handled.
    """
    kind = _kind(space, path)
    if kind == "Dict":
        return {key: observation_spec(part, f"{path}/{key}") for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(
            observation_spec(part, f"{path}/{index}") for index, part in enumerate(space.spaces)
        )
    dtype = np.dtype(space.dtype)
    if kind == "Box":
        return _box_spec(space, path)
    if kind == "MultiBinary":
        return specs.BoundedArray(space.shape, dtype, 0, 1, name=path)
    start = getattr(space, "start", 0)
    if kind == "MultiDiscrete":
        start = np.asarray(start, np.int64)
        return specs.BoundedArray(space.shape, dtype, start, start + space.nvec - 1, name=path)
    if start == 0:
        return specs.DiscreteArray(int(space.n), dtype=dtype, name=path)
    return specs.BoundedArray((), dtype, int(start), int(start) + int(space.n) - 1, name=path)


def action_spec(space: Any, path: str) -> types.Nested:
    """Returns the specs of the actions for a space, as an agent sees them.

    Like `observation_spec`, but discrete actions count from 0 whatever the space's start, and are
    int32, as they are on devices.

    Args:
      space: a Gymnasium or Gym space.
      path: what to call it in messages.

    Raises:
      UnsupportedEnvironmentError: naming the path of the first space that cannot be handled.
    """
    kind = _kind(space, path)
    if kind == "Dict":
        return {key: action_spec(part, f"{path}/{key}") for key, part in space.spaces.items()}
    if kind == "Tuple":
        return tuple(
            action_spec(part, f"{path}/{index}") for index, part in enumerate(space.spaces)
        )
    if kind == "Box":
        return _box_spec(space, path)
    if kind == "Discrete":
        return specs.DiscreteArray(int(space.n), dtype=np.int32, name=path)
    highest = 1 if kind == "MultiBinary" else np.asarray(space.nvec, np.int64) - 1
    return specs.BoundedArray(space.shape, np.int32, 0, highest, name=path)


def observation_converter(space: Any) -> _Converter | None:
    """Returns what turns an observation of `space` into the structure of its spec.

    Leaves are passed on as they are, neither copied nor cast.

    Returns:
      A function, or None where observations are leaves already.
    """
    kind = _kind(space, "observation")
    if kind == "Dict":
        parts = {key: observation_converter(part) for key, part in space.spaces.items()}
        return lambda value: {
            key: value[key] if part is None else part(value[key]) for key, part in parts.items()
        }
    if kind == "Tuple":
        items = tuple(observation_converter(part) for part in space.spaces)
        return lambda value: tuple(
            item if part is None else part(item) for part, item in zip(items, value, strict=True)
        )
    return None


def action_converter(space: Any) -> _Converter:
    """Returns what turns an agent's action into one of `space`.

    A discrete action becomes a Python int, counted from the space's start. Arrays are new ones of
    the space's dtype, so that an environment may keep them.
    """
    kind = _kind(space, "action")
    if kind == "Dict":
        parts = {key: action_converter(part) for key, part in space.spaces.items()}
        return lambda value: {key: part(value[key]) for key, part in parts.items()}
    if kind == "Tuple":
        items = tuple(action_converter(part) for part in space.spaces)
        return lambda value: tuple(part(item) for part, item in zip(items, value, strict=True))
    start = getattr(space, "start", 0)
    if kind == "Discrete":
        if start == 0:
            return int
        first = int(start)
        return lambda value: int(value) + first
    dtype = np.dtype(space.dtype)
    if kind == "MultiDiscrete" and np.any(start):
        offset = np.asarray(start, np.int64)
        return lambda value: (np.asarray(value, np.int64) + offset).astype(dtype)
    if kind == "Box" and dtype == np.float64:
        # Agents act in float32, where a bound such as 0.1 rounds to a number beyond it.
        low, high = space.low, space.high
        if np.any(low.astype(np.float32) < low) or np.any(high.astype(np.float32) > high):
            return lambda value: np.clip(np.asarray(value, dtype), low, high)
    return lambda value: np.array(value, dtype)


def check_observation(spec: types.Nested, observation: Any, path: str) -> None:
    """Checks structure, shapes and kinds of numbers of one observation.

    A leaf of another dtype than its spec's is let through where it can be stored as the spec's
    (float64 for float32, for example).

    Args:
      spec: as from `observation_spec`.
      observation: what an environment returned.
      path: what to call it in messages.

    Raises:
      UnsupportedEnvironmentError: naming the path of the first difference.
    """
    if isinstance(spec, dict):
        keys = list(observation) if isinstance(observation, Mapping) else None
        if keys is None or set(keys) != set(spec):
            shown = type(observation).__name__ if keys is None else f"keys {keys}"
            raise errors.UnsupportedEnvironmentError(
                f"{path}: the space has keys {list(spec)}, the environment returned {shown}"
            )
        for key, part in spec.items():
            check_observation(part, observation[key], f"{path}/{key}")
    elif isinstance(spec, tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(spec):
            raise errors.UnsupportedEnvironmentError(
                f"{path}: the space is a tuple of {len(spec)}, the environment returned "
                f"{observation!r}"
            )
        for index, part in enumerate(spec):
            check_observation(part, observation[index], f"{path}/{index}")
    else:
        _check_leaf(spec, observation, path)


def _check_leaf(spec: specs.Array, observation: Any, path: str) -> None:
    try:
        array = np.asarray(observation)
    except ValueError:  # Ragged lists.
        shown = type(observation).__name__
    else:
        floating = array.dtype.kind == "f"
        storable = array.dtype.kind in "biuf" and (spec.dtype.kind == "f" or not floating)
        if array.shape == spec.shape and storable:
            return
        shown = f"{array.dtype} {array.shape}"
    raise errors.UnsupportedEnvironmentError(
        f"{path}: the space says {spec.dtype} {spec.shape}, the environment returned {shown}"
    )


def _kind(space: Any, path: str) -> str:
    """Returns which of the supported spaces `space` is, or an heir of."""
    for cls in type(space).__mro__:
        if cls.__module__.partition(".")[0] in ("gymnasium", "gym"):
            if cls.__name__ in _SUPPORTED:
                return cls.__name__
            break
    raise errors.UnsupportedEnvironmentError(
        f"{path}: {type(space).__name__} spaces are not supported, only {', '.join(_SUPPORTED)}"
    )


def _box_spec(space: Any, path: str) -> specs.BoundedArray:
    dtype = np.dtype(space.dtype)
    if dtype.kind not in "biuf":
        raise errors.UnsupportedEnvironmentError(
            f"{path}: dtype {dtype} is neither numeric nor boolean"
        )
    return specs.BoundedArray(
        space.shape, dtype, _smallest(space.low), _smallest(space.high), name=path
    )


def _smallest(bound: np.ndarray) -> np.ndarray:
    """Returns one number for a bound that is the same everywhere, so that specs stay small."""
    return bound.flat[0] if bound.size and np.all(bound == bound.flat[0]) else bound
