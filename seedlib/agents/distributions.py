"""Distributions over actions: what losses and policies ask of one, and which fits an action spec.

A loss or a policy talks to an `ActionDistribution` alone, so that it is the same for every kind of
action. A network's head gives *parameters*: one unconstrained float32 vector `[P]` per step, for
which zeros are always valid.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import distrax
import jax
import jax.numpy as jnp
import numpy as np
import tree

from seedlib import types
from seedlib.agents import discrete


class ActionDistribution(NamedTuple):
    """A family of distributions over actions, as pure functions of its parameters.

    Attributes:
      parameter_size: P, the numbers that a network's head must give per step.
      log_prob: `log_prob(parameters [..., P], action [..., *leaf]) -> float32 [...]`.
      entropy: `entropy(parameters [..., P]) -> float32 [...]`, in nats.
      sample: `sample(keys, parameters [B, P]) -> action [B, *leaf]`, with one PRNG key per row
        (uint32 `[B, 2]`); a row's sample depends on its own key and parameters alone.
      mode: `mode(parameters [..., P]) -> action [..., *leaf]`.
    """

    parameter_size: int
    log_prob: Callable[[types.Array, types.Nested], types.Array]
    entropy: Callable[[types.Array], types.Array]
    sample: Callable[[types.Array, types.Array], types.Nested]
    mode: Callable[[types.Array], types.Nested]


def make_action_distribution(action_spec: types.Nested) -> ActionDistribution:
    """Returns the distribution for an action spec.

    Discrete leaves, and integer leaves with bounds (what Gymnasium calls MultiDiscrete), nested in
    any way, give independent categorical distributions, one for each number of the action; their
    logits lie one after the other in the parameters.

    Args:
      action_spec: nested `dm_env.specs.Array`.

    Raises:
      ValueError: where no distribution here fits a leaf; the message names the leaf.
    """
    return _factorised_categorical(action_spec)


class _Choices(NamedTuple):
    """One leaf of the action: `len(sizes)` independent choices.

    Attributes:
      shape: of the leaf.
      dtype: of the leaf.
      minimum: int array `[K]`, the first value of each choice.
      slices: K slices of the parameters, the logits of each choice.
    """

    shape: tuple[int, ...]
    dtype: Any
    minimum: np.ndarray
    slices: tuple[slice, ...]


def _factorised_categorical(action_spec: types.Nested) -> ActionDistribution:
    """Independent categorical distributions, one for each number of the action."""
    discrete.check(action_spec)
    leaves: list[_Choices] = []
    size = 0
    for path, leaf in tree.flatten_with_path(action_spec):
        minimum, sizes = discrete.bounds(path, leaf)
        ends = size + np.cumsum(sizes)
        slices = tuple(slice(int(end - n), int(end)) for end, n in zip(ends, sizes, strict=True))
        leaves.append(_Choices(tuple(leaf.shape), leaf.dtype, minimum, slices))
        size += int(sizes.sum())

    def log_prob(parameters: types.Array, action: types.Nested) -> types.Array:
        total = jnp.zeros(parameters.shape[:-1], parameters.dtype)
        for choices, values in zip(leaves, tree.flatten(action), strict=True):
            index = values.reshape(*parameters.shape[:-1], len(choices.slices)) - choices.minimum
            for i, part in enumerate(choices.slices):
                total += distrax.Categorical(logits=parameters[..., part]).log_prob(index[..., i])
        return total

    def entropy(parameters: types.Array) -> types.Array:
        parts = [part for choices in leaves for part in choices.slices]
        return sum(distrax.Categorical(logits=parameters[..., part]).entropy() for part in parts)

    def mode(parameters: types.Array) -> types.Nested:
        action = []
        for choices in leaves:
            index = [jnp.argmax(parameters[..., part], axis=-1) for part in choices.slices]
            values = jnp.stack(index, axis=-1) + choices.minimum
            shape = parameters.shape[:-1] + choices.shape
            action.append(values.astype(choices.dtype).reshape(shape))
        return tree.unflatten_as(action_spec, action)

    def sample(keys: types.Array, parameters: types.Array) -> types.Nested:
        # The Gumbel-max trick (what `jax.random.categorical` does), with one draw for all choices.
        noise = jax.vmap(lambda key: jax.random.gumbel(key, (size,), parameters.dtype))(keys)
        return mode(parameters + noise)

    return ActionDistribution(size, log_prob, entropy, sample, mode)
