"""The R2D2 agent (https://openreview.net/forum?id=r1lyTjAqYX) as a value of pure functions."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tree

from seedlib import specs, types
from seedlib.agents import agent, discrete, networks
from seedlib.agents.r2d2 import config as config_lib
from seedlib.agents.r2d2 import losses

_FIRST = 0


class TrainingState(NamedTuple):
    """Everything that an update changes.

    Attributes:
      params: the online network's parameters, float32.
      target_params: the target network's: those of some updates ago.
      optimizer_state: the optimiser's.
      target_age: int32, updates since the target network was copied. It travels with the rest, so
        a resumed run copies when the run before would have.
    """

    params: Any
    target_params: Any
    optimizer_state: Any
    target_age: types.Array


def make_agent(
    environment_spec: specs.EnvironmentSpec,
    config: config_lib.Config | None = None,
    network: networks.Network | None = None,
) -> agent.Agent:
    """Returns an R2D2 agent.

    The learner's batches come from a replay. A new sequence enters it with the priority that its
    own errors give, by the values that it was acted with; every update gives anew those of its
    batch.

    Args:
      environment_spec: canonical (see `specs.make_environment_spec`).
      config: settings; None for the defaults.
      network: a network of one's own in place of the one that `config` describes. Its output is
        float32 `[..., A]`, a value for each of the A actions, rescaled as the config says.

    Raises:
      ValueError: in one line, where the action spec is not supported or the network does not fit.
    """
    config = config_lib.Config() if config is None else config
    config_lib.check_environment(environment_spec)
    choice = _make_choice(environment_spec.actions)
    if network is None:
        network = make_network(environment_spec, config)
    _check_network(environment_spec, network, choice.size)
    optimizer = _make_optimizer(config)

    def init(key: types.Array) -> TrainingState:
        params = network.init(key)
        # Copied, since a state whose parts share memory cannot be given away to an update.
        target_params = jax.tree.map(jnp.copy, params)
        return TrainingState(
            params, target_params, optimizer.init(params), jnp.zeros((), jnp.int32)
        )

    return agent.Agent(
        policy=_make_policy(config, network, choice),
        init=init,
        update=functools.partial(_update, config, network, choice, optimizer),
        policy_params=lambda state: state.params,
        unroll=agent.UnrollShape(config.unroll_length, config.burn_in, config.unroll_period),
        batch_size=config.batch_size,
        replay=config_lib.ReplaySettings(
            capacity=config.replay_capacity,
            minimum=config.replay_minimum,
            samples_per_sequence=config.samples_per_sequence,
            priority_exponent=config.priority_exponent,
            importance_exponent=config.importance_exponent,
        ),
        initial_priority=functools.partial(_initial_priority, config),
    )


def make_network(
    environment_spec: specs.EnvironmentSpec, config: config_lib.Config
) -> networks.Network:
    """Returns the dueling network that a configuration asks for; its outputs are `[..., A]`.

    Wang et al., 2015, https://arxiv.org/abs/1511.06581.

    Args:
      environment_spec: what the inputs look like.
      config: the agent's settings.

    Raises:
      ValueError: where the torso does not fit the observation.
    """
    num_actions = _make_choice(environment_spec.actions).size
    torso = networks.make_torso(
        environment_spec,
        kind=config.torso,
        hidden_sizes=config.hidden_sizes,
        use_previous_action=config.use_previous_action,
        use_previous_reward=config.use_previous_reward,
        reward_clip=config.reward_clip,
        compute_dtype=config.compute_dtype,
    )

    def head(features: types.Array) -> types.Array:
        value = hk.nets.MLP((config.dueling_size, 1), name="value")(features)
        advantage = hk.nets.MLP((config.dueling_size, num_actions), name="advantage")(features)
        # Without its mean the advantage says nothing of the value, so each stream has its own part.
        return value + advantage - advantage.mean(axis=-1, keepdims=True)

    return networks.make_network(
        environment_spec, torso, head, config.lstm_size, config.compute_dtype
    )


class _Choice(NamedTuple):
    """The one number that an action consists of.

    Attributes:
      size: A, how many values it may have.
      to_action: from an index int `[...]` in 0..A-1 to the action, leaves `[..., *leaf]`.
      to_index: the other way round, int32.
    """

    size: int
    to_action: Callable[[types.Array], types.Nested]
    to_index: Callable[[types.Nested], types.Array]


def _make_choice(action_spec: types.Nested) -> _Choice:
    """Returns the choice of an action spec that `config.check_environment` lets pass."""
    leaf_specs = tree.flatten(action_spec)
    bounds = [discrete.bounds(path, leaf) for path, leaf in tree.flatten_with_path(action_spec)]
    # Leaves without a number may lie beside the one that has it.
    chosen = next(i for i, (minimum, _) in enumerate(bounds) if len(minimum))
    minimum, size = int(bounds[chosen][0][0]), int(bounds[chosen][1][0])

    def to_action(index: types.Array) -> types.Nested:
        leaves = [jnp.zeros((*index.shape, *spec.shape), spec.dtype) for spec in leaf_specs]
        shape = leaves[chosen].shape
        leaves[chosen] = (index + minimum).astype(leaf_specs[chosen].dtype).reshape(shape)
        return tree.unflatten_as(action_spec, leaves)

    def to_index(action: types.Nested) -> types.Array:
        leaf, rank = tree.flatten(action)[chosen], len(leaf_specs[chosen].shape)
        return leaf.reshape(leaf.shape[: leaf.ndim - rank]).astype(jnp.int32) - minimum

    return _Choice(size, to_action, to_index)


def _make_policy(
    config: config_lib.Config, network: networks.Network, choice: _Choice
) -> agent.Policy:
    """Takes the best action, or with the probability of the row's environment any.

    Its extras are what a new sequence's priority is made of, both as the network gives them:
    `action_value` of the action taken, and `best_value`.
    """
    powers = np.linspace(1.0, config.exploration_exponent, config.num_environments)
    epsilons = np.power(config.exploration, powers).astype(np.float32)

    def step(
        params: Any, keys: types.Array, inputs: types.PolicyInput, state: types.Nested
    ) -> types.PolicyOutput:
        q, state = network.step(params, inputs, state)
        epsilon = jnp.asarray(epsilons)[inputs.environment_id % config.num_environments]
        epsilon = jnp.where(inputs.evaluate, 0.0, epsilon)
        # Two numbers in [0, 1) of each row's own stream: whether to explore, and where to.
        draws = jax.vmap(lambda key: jax.random.uniform(key, (2,)))(keys)
        anywhere = jnp.minimum((draws[:, 1] * choice.size).astype(jnp.int32), choice.size - 1)
        index = jnp.where(draws[:, 0] < epsilon, anywhere, jnp.argmax(q, axis=-1))
        extras = {
            "action_value": jnp.take_along_axis(q, index[:, None], axis=-1)[:, 0],
            "best_value": q.max(axis=-1),
        }
        return types.PolicyOutput(choice.to_action(index), extras, state)

    return agent.Policy(network.initial_state, step)


def _update(
    config: config_lib.Config,
    network: networks.Network,
    choice: _Choice,
    optimizer: optax.GradientTransformation,
    state: TrainingState,
    batch: agent.Batch,
    key: types.Array,
) -> agent.Update:
    """One step of the optimiser on one batch; see `agent.Agent.update`."""
    del key  # Nothing here is random.
    gradient_of = jax.value_and_grad(_batch_loss, argnums=3, has_aux=True)
    (loss, (metrics, priorities)), gradient = gradient_of(
        config, network, choice, state.params, state.target_params, batch
    )
    step, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params)
    params = optax.apply_updates(state.params, step)
    copy = state.target_age + 1 >= config.target_period
    metrics = {**metrics, "loss": loss, "gradient_norm": optax.tree.norm(gradient)}
    state = TrainingState(
        params=params,
        target_params=jax.tree.map(
            lambda new, old: jnp.where(copy, new, old), params, state.target_params
        ),
        optimizer_state=optimizer_state,
        target_age=jnp.where(copy, 0, state.target_age + 1),
    )
    return agent.Update(state, metrics, priorities)


def _batch_loss(
    config: config_lib.Config,
    network: networks.Network,
    choice: _Choice,
    params: Any,
    target_params: Any,
    batch: agent.Batch,
) -> tuple[types.Array, tuple[dict[str, types.Array], types.Array]]:
    """Returns the loss of a batch, metrics, and the new priority of each sequence."""
    unrolls = batch.unrolls
    learnt = _transitions(config, unrolls)
    action_tm1 = choice.to_index(unrolls.action)[:, config.burn_in : -1]

    error_of = functools.partial(
        losses.double_q_learning,
        n=config.n_step,
        transform=losses.value_transform(config.rescaling_epsilon),
    )
    result = jax.vmap(error_of)(
        _q_after_burn_in(config, network, params, unrolls),
        jax.lax.stop_gradient(_q_after_burn_in(config, network, target_params, unrolls)),
        action_tm1,
        *learnt,
    )
    # Sums and one count over the whole batch, never a mean of means: the result is then the same
    # however the batch is shared out, and every transition counts the same.
    valid_t = learnt.valid_t
    count = jnp.maximum(valid_t.sum(), 1)

    def mean(x: types.Array) -> types.Array:
        return jnp.where(valid_t, x, 0.0).sum() / count

    weight = _normalise(batch.weight)
    size_tm1 = jax.lax.stop_gradient(jnp.abs(result.error_tm1))
    priorities = _priorities(config, size_tm1, valid_t)
    metrics = {
        "value": mean(result.value_tm1),
        "target": mean(result.target_tm1),
        "error": mean(size_tm1),
        "priority": priorities.mean(),
        "priority_max": priorities.max(),
        "importance_weight": weight.mean(),
        "valid_transitions": valid_t.sum(),
    }
    # Published settings of the optimiser (epsilon, norm) are for the sum over a sequence, so the
    # mean over transitions is multiplied by how many a sequence has.
    loss = config.unroll_length * mean(weight[:, None] * 0.5 * jnp.square(result.error_tm1))
    return loss, (metrics, priorities)


class _Transitions(NamedTuple):
    """What was paid on the transitions after the burn-in; leaves `[B, T]`, see `losses`."""

    reward_t: types.Array
    discount_t: types.Array
    valid_t: types.Array


def _transitions(config: config_lib.Config, unrolls: types.Unroll) -> _Transitions:
    reached = jax.tree.map(
        lambda x: x[:, config.burn_in + 1 :],
        (unrolls.inputs.reward, unrolls.inputs.discount, unrolls.inputs.step_type),
    )
    reward_t, discount_t, step_type_t = reached
    reward_t = reward_t * config.reward_scale
    if config.reward_clip is not None:
        reward_t = jnp.clip(reward_t, -config.reward_clip, config.reward_clip)
    return _Transitions(reward_t, discount_t * config.discount, step_type_t != _FIRST)


def _q_after_burn_in(
    config: config_lib.Config, network: networks.Network, params: Any, unrolls: types.Unroll
) -> types.Array:
    """Returns values `[B, T+1, A]` of the steps after the burn-in.

    The burn-in starts from the stored state, which is the one before its first step. No gradient
    flows through it.
    """
    # [B, L, ...] -> [L, B, ...]
    inputs = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), unrolls.inputs)
    state = unrolls.initial_state
    if config.burn_in and jax.tree.leaves(state):
        before = jax.tree.map(lambda x: x[: config.burn_in], inputs)
        state = jax.lax.stop_gradient(network.unroll(params, before, state)[1])
    after = jax.tree.map(lambda x: x[config.burn_in :], inputs)
    return jnp.swapaxes(network.unroll(params, after, state)[0], 0, 1)


def _initial_priority(config: config_lib.Config, unrolls: types.Unroll) -> types.Array:
    """Returns priorities `[B]` by the values that sequences were acted with.

    The target network is the learner's alone, so the best value takes its place here.
    """
    learnt = _transitions(config, unrolls)

    error_of = functools.partial(
        losses.n_step_temporal_difference,
        n=config.n_step,
        transform=losses.value_transform(config.rescaling_epsilon),
    )
    result = jax.vmap(error_of)(
        unrolls.extras["action_value"][:, config.burn_in : -1],
        unrolls.extras["best_value"][:, config.burn_in + 1 :],
        *learnt,
    )
    return _priorities(config, result.error_tm1, learnt.valid_t)


def _priorities(
    config: config_lib.Config, error_tm1: types.Array, valid_t: types.Array
) -> types.Array:
    priority = functools.partial(losses.sequence_priority, eta=config.priority_eta)
    return jax.vmap(priority)(error_tm1, valid_t)


def _normalise(weight: types.Array) -> types.Array:
    """Returns weights of which the largest is 1, so that they never enlarge a step."""
    return weight / jnp.maximum(weight.max(), jnp.finfo(jnp.float32).tiny)


def _make_optimizer(config: config_lib.Config) -> optax.GradientTransformation:
    adam = optax.adam(config.learning_rate, config.beta1, config.beta2, config.adam_epsilon)
    if config.max_gradient_norm is None:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.max_gradient_norm), adam)


def _check_network(
    environment_spec: specs.EnvironmentSpec, network: networks.Network, num_actions: int
) -> None:
    """Refuses a network that does not fit the action, by its shapes alone."""

    def one_step(key: types.Array) -> Any:
        inputs = specs.zeros(specs.policy_input_spec(environment_spec), (1,))
        return network.step(network.init(key), inputs, network.initial_state(1))[0]

    output = jax.eval_shape(one_step, jax.ShapeDtypeStruct((2,), jnp.uint32))
    got = getattr(output, "shape", None)
    if got != (1, num_actions):
        raise ValueError(f"network output must have shape {(1, num_actions)} [B=1, A], got {got}")
