"""Networks as values of pure functions, and the torsos and recurrent core they are made of.

A network is torso -> recurrent core (optional) -> head. Torso and head take all frames of an unroll
at once; only the recurrence is a loop over time. Any other set of functions with the same meaning
is a `Network` too, whichever library it was written with.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import tree
from dm_env import specs as dm_specs

from seedlib import specs, types
from seedlib.agents import choices

_FIRST = 0
_IMAGE_RANK = 3
_IMAGE_FEATURES = 256
# Pixels along a side that one output of the shallow network's second layer sees: 8 + 4 * (4 - 1).
_SHALLOW_FIELD = 20

# By object, not by name: TensorFlow registers a bfloat16 of its own with NumPy, and JAX refuses it.
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

Params = Any
Torso = Callable[[types.PolicyInput], types.Array]
"""`torso(inputs [N, ...]) -> features [N, D]`, called inside a Haiku transform."""
Head = Callable[[types.Array], types.Nested]
"""`head(features [N, D]) -> outputs [N, ...]`, called inside a Haiku transform."""


class Network(NamedTuple):
    """A network, recurrent or not, as pure functions.

    `step` and `unroll` are the same function of inputs and state, for one step and for many: the
    behaviour policy and the learner must agree on what the parameters mean. Both reset the state to
    the initial one *before* a step whose `step_type` is FIRST. Rows do not influence each other.

    Attributes:
      init: `init(key) -> params`.
      step: `step(params, inputs [B, ...], state [B, ...]) -> (outputs [B, ...], new state)`.
      unroll: `unroll(params, inputs [T, B, ...], state [B, ...]) -> (outputs [T, B, ...], state
        after the last step)`.
      initial_state: `initial_state(batch_size) -> state`, `()` where there is none.
    """

    init: Callable[[types.Array], Params]
    step: Callable[[Params, types.PolicyInput, types.Nested], tuple[types.Nested, types.Nested]]
    unroll: Callable[[Params, types.PolicyInput, types.Nested], tuple[types.Nested, types.Nested]]
    initial_state: Callable[[int], types.Nested]


def make_network(
    environment_spec: specs.EnvironmentSpec,
    torso: Torso,
    head: Head,
    lstm_size: int | None = None,
    compute_dtype: str = "float32",
) -> Network:
    """Returns a network made of a torso, an LSTM where `lstm_size` is given, and a head.

    `torso` and `head` are plain functions that create their Haiku modules when they are called.

    Args:
      environment_spec: what the inputs look like.
      torso: from inputs to features; takes all frames at once.
      head: from features to outputs; takes all frames at once.
      lstm_size: units of the LSTM between them, or None for none.
      compute_dtype: one of `choices.COMPUTE_DTYPES`: what parameters are cast to in use. A
        torso should give features of this dtype.
    """
    dtype = _DTYPES[compute_dtype]

    def create_float32(create: Any, shape: Any, _: Any, init: Any, context: Any) -> types.Array:
        del context
        return create(shape, jnp.float32, init)

    def use_as_compute_dtype(get: Any, value: types.Array, context: Any) -> types.Array:
        del context
        return get(value.astype(dtype))

    def forward(
        inputs: types.PolicyInput, state: types.Nested, leading: int
    ) -> tuple[types.Nested, types.Nested]:
        with hk.custom_creator(create_float32), hk.custom_getter(use_as_compute_dtype):
            features = _on_frames(torso, leading)(inputs)
            if lstm_size is not None:
                first = inputs.step_type == _FIRST
                features, state = ResettingLSTM(lstm_size)(features, first, state)
            outputs = _on_frames(head, leading)(features)
        return jax.tree.map(_as_float32, outputs), state

    def build() -> tuple[Callable[..., Any], tuple[Callable[..., Any], Callable[..., Any]]]:
        step = functools.partial(forward, leading=1)
        unroll = functools.partial(forward, leading=2)
        return step, (step, unroll)

    transformed = hk.without_apply_rng(hk.multi_transform(build))
    step, unroll = transformed.apply

    def initial_state(batch_size: int) -> types.Nested:
        if lstm_size is None:
            return ()
        return ResettingLSTM.initial_state(batch_size, lstm_size)

    def init(key: types.Array) -> Params:
        inputs = specs.zeros(specs.policy_input_spec(environment_spec), (1,))
        return transformed.init(key, inputs, initial_state(1))

    return Network(init, step, unroll, initial_state)


class ResettingLSTM(hk.Module):
    """An LSTM that starts again from zeros where a step is FIRST; for one step or an unroll.

    Hochreiter and Schmidhuber, 1997, with forget gates that start open (Jozefowicz et al., 2015).
    The state is a pair (hidden, cell), float32 `[B, size]` each.
    """

    def __init__(self, size: int, name: str = "lstm") -> None:
        """Makes an LSTM of `size` units."""
        super().__init__(name=name)
        self._size = size

    @staticmethod
    def initial_state(batch_size: int, size: int) -> tuple[types.Array, types.Array]:
        """Returns zeros: (hidden, cell), float32 `[batch_size, size]` each."""
        return jnp.zeros((batch_size, size)), jnp.zeros((batch_size, size))

    def __call__(
        self, features: types.Array, first: types.Array, state: tuple[types.Array, types.Array]
    ) -> tuple[types.Array, tuple[types.Array, types.Array]]:
        """Takes one step, or one after the other along axis 0.

        Args:
          features: `[B, D]`, or `[T, B, D]`.
          first: bool `[B]`, or `[T, B]`: where the state is reset before the step.
          state: (hidden, cell) before the first step, float32 `[B, size]` each.

        Returns:
          The hidden state after each step, `[..., B, size]` of the features' dtype, and the state
          after the last.
        """
        # The inputs' share of the gates needs no recurrence: one product for all frames.
        gates = hk.Linear(4 * self._size, name="input")(features)
        recurrent = hk.get_parameter(
            "recurrent",
            (self._size, 4 * self._size),
            init=hk.initializers.TruncatedNormal(self._size**-0.5),
        )
        step = functools.partial(_lstm_step, recurrent)
        if gates.ndim == 2:
            state, hidden = step(state, (gates, first))
        else:
            state, hidden = jax.lax.scan(step, state, (gates, first))
        return hidden.astype(features.dtype), state


def _lstm_step(
    recurrent: types.Array,
    state: tuple[types.Array, types.Array],
    inputs: tuple[types.Array, types.Array],
) -> tuple[tuple[types.Array, types.Array], types.Array]:
    """One step of `ResettingLSTM`; gates `[B, 4 * size]`, first `[B]`, state `[B, size]`."""
    gates, first = inputs
    hidden, cell = jax.tree.map(lambda x: jnp.where(first[:, None], 0.0, x), state)
    gates = gates + hidden.astype(recurrent.dtype) @ recurrent
    update, candidate, forget, output = jnp.split(gates, 4, axis=-1)
    # The cell adds up over a whole episode, so it stays float32 whatever the gates are.
    cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(update) * jnp.tanh(candidate)
    hidden = jax.nn.sigmoid(output) * jnp.tanh(cell)
    return (hidden, cell), hidden


def default_torso(observation_spec: types.Nested) -> str:
    """Returns the torso that suits an observation: `shallow` where it holds a uint8 image."""
    leaves = tree.flatten(observation_spec)
    images = [leaf for leaf in leaves if len(leaf.shape) == _IMAGE_RANK and leaf.dtype == np.uint8]
    return "shallow" if images else "mlp"


def make_torso(
    environment_spec: specs.EnvironmentSpec,
    kind: str | None = None,
    hidden_sizes: Sequence[int] = (64, 64),
    use_previous_action: bool = False,
    use_previous_reward: bool = False,
    reward_clip: float | None = None,
    compute_dtype: str = "float32",
) -> Torso:
    """Returns a torso for the observations of an environment.

    `mlp` flattens and concatenates every leaf. `shallow` and `deep` (the two networks of IMPALA,
    https://arxiv.org/abs/1802.01561, figure 3) put every rank-3 leaf `[height, width, channels]`
    through convolutions, and append the other leaves, flattened. Discrete leaves become one-hot,
    uint8 leaves of rank 2 and more are pixels and are scaled by 1/255, other numbers are cast.

    Args:
      environment_spec: what the inputs look like.
      kind: one of `choices.TORSOS`, or None to choose by the observation.
      hidden_sizes: layers of the `mlp`; may be empty. The other torsos do not read it.
      use_previous_action: append the previous action (all zeros on a FIRST step).
      use_previous_reward: append the reward that came with the observation.
      reward_clip: clip that reward to `[-reward_clip, reward_clip]`; None for not at all.
      compute_dtype: dtype of the features.

    Raises:
      ValueError: where the kind is unknown or needs an image that the observation lacks.
    """
    kind = default_torso(environment_spec.observations) if kind is None else kind
    if kind not in choices.TORSOS:
        raise ValueError(f"torso must be one of {choices.TORSOS}, got {kind!r}")
    leaves = tree.flatten(environment_spec.observations)
    if kind != "mlp" and not any(len(leaf.shape) == _IMAGE_RANK for leaf in leaves):
        shapes = [tuple(leaf.shape) for leaf in leaves]
        raise ValueError(f"torso {kind!r} needs an observation of rank 3, got shapes {shapes}")
    dtype = _DTYPES[compute_dtype]

    def torso(inputs: types.PolicyInput) -> types.Array:
        encode = functools.partial(_encode, dtype=dtype)
        observation = tree.map_structure(encode, environment_spec.observations, inputs.observation)
        if kind == "mlp":
            x = jnp.concatenate([_flat(leaf) for leaf in tree.flatten(observation)], axis=-1)
            parts = [hk.nets.MLP(hidden_sizes, activate_final=True)(x) if hidden_sizes else x]
        else:
            convolutions = _shallow if kind == "shallow" else _deep
            parts = [
                convolutions(leaf) if leaf.ndim == _IMAGE_RANK + 1 else _flat(leaf)
                for leaf in tree.flatten(observation)
            ]
        if use_previous_action:
            action = tree.map_structure(encode, environment_spec.actions, inputs.previous_action)
            first = (inputs.step_type == _FIRST)[:, None]
            parts += [jnp.where(first, 0, _flat(leaf)) for leaf in tree.flatten(action)]
        if use_previous_reward:
            reward = inputs.reward[:, None].astype(dtype)
            parts += [reward if reward_clip is None else reward.clip(-reward_clip, reward_clip)]
        return jnp.concatenate(parts, axis=-1)

    return torso


def _encode(spec: dm_specs.Array, x: types.Array, dtype: Any) -> types.Array:
    """Turns a leaf `[N, ...]` into numbers of `dtype` that a layer can take."""
    if isinstance(spec, dm_specs.DiscreteArray):
        return jax.nn.one_hot(x, spec.num_values, dtype=dtype)
    is_pixels = spec.dtype == np.uint8 and len(spec.shape) > 1
    x = jnp.asarray(x).astype(dtype)
    return x * (1.0 / 255.0) if is_pixels else x


def _flat(x: types.Array) -> types.Array:
    return x.reshape(x.shape[0], -1)


def _shallow(x: types.Array) -> types.Array:
    """IMPALA's shallow network: images `[N, H, W, C]` to features `[N, 256]`.

    Without padding, as in the network of DQN and A3C that it is; images too small for that
    are padded.
    """
    padding = "VALID" if min(x.shape[1:3]) >= _SHALLOW_FIELD else "SAME"
    x = jax.nn.relu(hk.Conv2D(16, 8, stride=4, padding=padding)(x))
    x = jax.nn.relu(hk.Conv2D(32, 4, stride=2, padding=padding)(x))
    return jax.nn.relu(hk.Linear(_IMAGE_FEATURES)(_flat(x)))


def _deep(x: types.Array) -> types.Array:
    """IMPALA's deep network, 15 convolutions: images `[N, H, W, C]` to features `[N, 256]`."""
    for channels in (16, 32, 32):
        x = hk.Conv2D(channels, 3)(x)
        x = hk.max_pool(x, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for _ in range(2):
            residual = hk.Conv2D(channels, 3)(jax.nn.relu(x))
            x = x + hk.Conv2D(channels, 3)(jax.nn.relu(residual))
    return jax.nn.relu(hk.Linear(_IMAGE_FEATURES)(_flat(jax.nn.relu(x))))


def _on_frames(function: Callable[[Any], Any], leading: int) -> Callable[[Any], Any]:
    """Lets a function of frames `[N, ...]` take `[B, ...]` (leading 1) or `[T, B, ...]` (2)."""
    if leading == 1:
        return function

    def on_frames(x: Any) -> Any:
        steps, batch = jax.tree.leaves(x)[0].shape[:2]

        # Frames are laid out batch-major: where devices share the batch axis, each one's frames
        # stay together, and the compiler needs no exchange between devices.
        def merge(leaf: types.Array) -> types.Array:
            leaf = jnp.swapaxes(leaf, 0, 1)
            return leaf.reshape(steps * batch, *leaf.shape[2:])

        def split(leaf: types.Array) -> types.Array:
            return jnp.swapaxes(leaf.reshape(batch, steps, *leaf.shape[1:]), 0, 1)

        return jax.tree.map(split, function(jax.tree.map(merge, x)))

    return on_frames


def _as_float32(x: types.Array) -> types.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
