"""The V-trace agent (IMPALA, https://arxiv.org/abs/1802.01561) as a value of pure functions."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from seedlib import specs, types
from seedlib.agents import agent, distributions, networks
from seedlib.agents.vtrace import config as config_lib
from seedlib.agents.vtrace import losses
from seedlib.agents.vtrace import networks as vtrace_networks

_FIRST = 0


class TrainingState(NamedTuple):
    """Everything that an update changes.

    Attributes:
      params: the network's parameters, float32.
      optimizer_state: the optimiser's.
      updates: int32, updates made so far.
    """

    params: Any
    optimizer_state: Any
    updates: types.Array


def make_agent(
    environment_spec: specs.EnvironmentSpec,
    config: config_lib.Config | None = None,
    network: networks.Network | None = None,
    loss: losses.Loss | None = None,
) -> agent.Agent:
    """Returns a V-trace agent.

    Args:
      environment_spec: canonical (see `specs.make_environment_spec`).
      config: settings; None for the defaults.
      network: a network of one's own in place of the one that `config` describes. Its outputs have
        `parameters` `[..., P]` and `value` `[...]`, as `PolicyValue` does, with the P of
        `distributions.make_action_distribution`; they may have more, for a loss of one's own.
      loss: a pure function of one sequence in place of `losses.vtrace_loss`. The agent takes it
        over a batch, and minimises the mean over valid transitions.

    Raises:
      ValueError: in one line, where the action spec is not supported or the network does not fit.
    """
    config = config_lib.Config() if config is None else config
    distribution = distributions.make_action_distribution(environment_spec.actions)
    if network is None:
        network = vtrace_networks.make_network(
            environment_spec, config, distribution.parameter_size
        )
    _check_network(environment_spec, network, distribution.parameter_size)
    if loss is None:
        loss = functools.partial(
            losses.vtrace_loss,
            distribution=distribution,
            lambda_=config.lambda_,
            clip_rho=config.clip_rho,
            clip_pg_rho=config.clip_pg_rho,
            entropy_cost=config.entropy_cost,
            baseline_cost=config.baseline_cost,
        )
    optimizer = _make_optimizer(config)

    def init(key: types.Array) -> TrainingState:
        params = network.init(key)
        return TrainingState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    return agent.Agent(
        policy=_make_policy(network, distribution),
        init=init,
        update=functools.partial(_update, config, network, loss, optimizer),
        policy_params=lambda state: state.params,
        unroll=agent.UnrollShape(config.unroll_length),
        batch_size=config.batch_size,
    )


def _make_policy(
    network: networks.Network, distribution: distributions.ActionDistribution
) -> agent.Policy:
    """Samples from the network's distribution; takes its mode where a row is evaluated."""

    def step(
        params: Any, keys: types.Array, inputs: types.PolicyInput, state: types.Nested
    ) -> types.PolicyOutput:
        outputs, state = network.step(params, inputs, state)
        sampled = distribution.sample(keys, outputs.parameters)
        best = distribution.mode(outputs.parameters)

        def choose(best: types.Array, sampled: types.Array) -> types.Array:
            evaluate = jnp.expand_dims(inputs.evaluate, tuple(range(1, best.ndim)))
            return jnp.where(evaluate, best, sampled)

        action = jax.tree.map(choose, best, sampled)
        return types.PolicyOutput(action, {"logits": outputs.parameters}, state)

    return agent.Policy(network.initial_state, step)


def _update(
    config: config_lib.Config,
    network: networks.Network,
    loss: losses.Loss,
    optimizer: optax.GradientTransformation,
    state: TrainingState,
    batch: agent.Batch,
    key: types.Array,
) -> agent.Update:
    """One step of the optimiser on one batch; see `agent.Agent.update`."""
    del key  # Nothing here is random.
    gradient_of = jax.value_and_grad(_batch_loss, argnums=3, has_aux=True)
    (value, metrics), gradient = gradient_of(config, network, loss, state.params, batch)
    step, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params)
    learning_rate = _learning_rate(config, state.updates)
    params = jax.tree.map(lambda param, x: param - learning_rate * x, state.params, step)
    metrics = {
        **metrics,
        "loss": value,
        "gradient_norm": optax.tree.norm(gradient),
        "learning_rate": learning_rate,
    }
    return agent.Update(TrainingState(params, optimizer_state, state.updates + 1), metrics, None)


def _batch_loss(
    config: config_lib.Config,
    network: networks.Network,
    loss: losses.Loss,
    params: Any,
    batch: agent.Batch,
) -> tuple[types.Array, dict[str, types.Array]]:
    """Returns the mean of a loss over the valid transitions of a batch, and metrics."""
    unrolls = batch.unrolls
    swap = lambda nested: jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), nested)
    # [B, T+1, ...] -> [T+1, B, ...] -> [B, T+1, ...]
    outputs = swap(network.unroll(params, swap(unrolls.inputs), unrolls.initial_state)[0])

    reward_t = unrolls.inputs.reward[:, 1:] * config.reward_scale
    if config.reward_clip is not None:
        reward_t = jnp.clip(reward_t, -config.reward_clip, config.reward_clip)
    valid_t = unrolls.inputs.step_type[:, 1:] != _FIRST
    result = jax.vmap(loss)(
        losses.Transitions(
            outputs=outputs,
            behaviour_parameters_tm1=unrolls.extras["logits"][:, :-1],
            action_tm1=jax.tree.map(lambda x: x[:, :-1], unrolls.action),
            reward_t=reward_t,
            discount_t=unrolls.inputs.discount[:, 1:] * config.discount,
            valid_t=valid_t,
        )
    )
    # Sums and one count over the whole batch, never a mean of means: the result is then the same
    # however the batch is shared out, and every transition counts the same.
    count = jnp.maximum(valid_t.sum(), 1)

    def mean(x: types.Array) -> types.Array:
        return jnp.where(valid_t, x, 0.0).sum() / count

    value_tm1 = outputs.value[:, :-1]
    target_tm1 = result.target_tm1
    spread = mean(jnp.square(target_tm1 - mean(target_tm1)))
    error_tm1 = target_tm1 - value_tm1
    unexplained = mean(jnp.square(error_tm1 - mean(error_tm1)))
    metrics = {
        **jax.tree.map(mean, result.metrics),
        "value": mean(value_tm1),
        "target": mean(target_tm1),
        # 1 where values follow their targets, 0 where they might as well be constant.
        "explained_variance": 1.0 - unexplained / jnp.maximum(spread, 1e-8),
        "valid_transitions": valid_t.sum(),
    }
    return mean(batch.weight[:, None] * result.loss_tm1), metrics


def _make_optimizer(config: config_lib.Config) -> optax.GradientTransformation:
    """Returns the optimiser without its step size, which `_update` applies by its own count."""
    if config.optimizer == "adam":
        scale = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    else:
        scale = optax.scale_by_rms(config.decay, config.epsilon)
    if config.max_gradient_norm is None:
        return scale
    return optax.chain(optax.clip_by_global_norm(config.max_gradient_norm), scale)


def _learning_rate(config: config_lib.Config, updates: types.Array) -> types.Array:
    """Returns the step size after `updates` updates, float32."""
    start, end = config.learning_rate, config.final_learning_rate
    if config.learning_rate_schedule == "constant":
        end = start
    return start + (end - start) * jnp.minimum(updates / config.schedule_steps, 1.0)


def _check_network(
    environment_spec: specs.EnvironmentSpec, network: networks.Network, parameter_size: int
) -> None:
    """Refuses a network that does not fit the action, by its shapes alone."""

    def one_step(key: types.Array) -> Any:
        inputs = specs.zeros(specs.policy_input_spec(environment_spec), (1,))
        return network.step(network.init(key), inputs, network.initial_state(1))[0]

    outputs = jax.eval_shape(one_step, jax.ShapeDtypeStruct((2,), jnp.uint32))
    for name, shape in (("parameters", (1, parameter_size)), ("value", (1,))):
        got = getattr(getattr(outputs, name, None), "shape", None)
        if got != shape:
            raise ValueError(f"network output {name!r} must have shape {shape} [B=1], got {got}")
