"""Environment specs: what they look like on the wire and on devices, and which are refused.

An `acme.specs.EnvironmentSpec` (a named tuple of dm_env specs) describes an environment. Devices
hold 32-bit numbers, so `canonical` narrows 64-bit leaves once, at the start, and logs it.
"""

from typing import Any, TypeAlias

import dm_env
import numpy as np
import tree
from absl import logging
from acme import specs as acme_specs
from dm_env import specs as dm_specs

from seedlib import types

EnvironmentSpec: TypeAlias = acme_specs.EnvironmentSpec

_NARROWED = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}


class SpecError(ValueError):
    """A spec that this library cannot handle; the message names path, dtype and shape."""


def canonical_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype that a leaf has on the wire and on devices: native order, at most 32 bit.

    Args:
      dtype: anything `numpy.dtype` takes.

    Raises:
      SpecError: where it is neither numeric nor boolean.
    """
    dtype = np.dtype(dtype)
    if dtype.kind not in "biuf":
        raise SpecError(f"dtype {dtype} is neither numeric nor boolean")
    dtype = dtype.newbyteorder("=")
    return _NARROWED.get(dtype, dtype)


def canonical(spec: types.Nested, name: str = "spec") -> types.Nested:
    """Returns `spec` with every leaf a `dm_env.specs.Array` of a dtype that devices have.

    Bounds and the number of discrete values are kept. Narrowing (float64 to float32, 64-bit
    integers to 32-bit) is logged with the path of the leaf.

    Args:
      spec: nested `dm_env.specs.Array`.
      name: what to call the structure in messages.

    Raises:
      SpecError: where a leaf is no array spec, or its dtype is neither numeric nor boolean.
    """

    def narrow(path: tuple[Any, ...], leaf: Any) -> dm_specs.Array:
        where = "/".join([name, *map(str, path)])
        if not isinstance(leaf, dm_specs.Array):
            raise SpecError(f"{where}: expected a dm_env.specs.Array, got {type(leaf).__name__}")
        try:
            dtype = canonical_dtype(leaf.dtype)
        except SpecError as error:
            raise SpecError(f"{where}: shape {leaf.shape}: {error}") from None
        if dtype == leaf.dtype:
            return leaf
        logging.log_first_n(
            logging.INFO, "%s: %s is stored and sent as %s", 100, where, leaf.dtype, dtype
        )
        return leaf.replace(dtype=dtype)

    return tree.map_structure_with_path(narrow, spec)


def make_environment_spec(environment: dm_env.Environment) -> EnvironmentSpec:
    """Returns the canonical spec of an environment, after checking that it can be handled.

    Raises:
      SpecError: where an observation or action leaf is not numeric, or the reward or discount is
        not one number per step (a multi-agent environment, for example).
    """
    spec = acme_specs.make_environment_spec(environment)
    for name, leaf in (("reward", spec.rewards), ("discount", spec.discounts)):
        if not isinstance(leaf, dm_specs.Array) or leaf.shape not in ((), (1,)):
            shown = leaf.shape if isinstance(leaf, dm_specs.Array) else type(leaf).__name__
            raise SpecError(
                f"{name}: expected one number per step, got {shown}; environments of several "
                "agents are not supported"
            )
    return EnvironmentSpec(
        observations=canonical(spec.observations, "observation"),
        actions=canonical(spec.actions, "action"),
        rewards=dm_specs.Array((), np.float32, name="reward"),
        discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0, name="discount"),
    )


def time_step_spec(spec: EnvironmentSpec) -> dm_env.TimeStep:
    """Returns the specs of one time step as it is sent: a `dm_env.TimeStep` of array specs."""
    return dm_env.TimeStep(
        step_type=dm_specs.BoundedArray((), np.uint8, 0, 2, name="step_type"),
        reward=spec.rewards,
        discount=spec.discounts,
        observation=spec.observations,
    )


def policy_input_spec(spec: EnvironmentSpec) -> types.PolicyInput:
    """Returns the specs of what a policy sees at one step."""
    time_step = time_step_spec(spec)
    return types.PolicyInput(
        time_step.step_type,
        time_step.reward,
        time_step.discount,
        time_step.observation,
        previous_action=spec.actions,
        environment_id=dm_specs.Array((), np.int32, name="environment_id"),
        evaluate=dm_specs.Array((), np.bool_, name="evaluate"),
    )


def zeros(spec: types.Nested, leading: tuple[int, ...] = ()) -> types.Nested:
    """Returns arrays of zeros for `spec`, each `leading + leaf.shape`.

    Args:
      spec: nested leaves with `shape` and `dtype`.
      leading: dimensions in front, for example `(batch_size,)`.
    """
    return tree.map_structure(lambda leaf: np.zeros(leading + tuple(leaf.shape), leaf.dtype), spec)
