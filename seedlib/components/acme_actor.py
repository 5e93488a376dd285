"""An actor for Acme's loops whose policy is a service: the parameters stay in central inference.

`acme.EnvironmentLoop(environment, PolicyActor(...))` plays against any `PolicyService`, near or
far. The service sees every time step once and in order, LAST steps included, since unrolls and
episodes are cut there; so it has to choose every action.
"""

import dataclasses

import dm_env
import numpy as np
import tree
from acme import core
from dm_env import specs as dm_specs

from seedlib import specs, types
from seedlib.components import actor as actor_lib
from seedlib.components.transport import service


class _Seat:
    """One environment that somebody else steps. A `BatchedEnvironment`.

    It answers with the same arrays every time. They are sent with the next step of the actor, and
    whoever steps the environment has filled them until then.
    """

    size = 1

    def __init__(self, spec: specs.EnvironmentSpec) -> None:
        self.spec = spec
        self.time_steps: dm_env.TimeStep = specs.zeros(specs.time_step_spec(spec), (1,))
        self.actions: types.Nested = None

    def step(self, actions: types.Nested | None) -> dm_env.TimeStep:
        self.actions = actions
        return self.time_steps

    def close(self) -> None:
        """There is nothing to free."""


class PolicyActor(core.Actor):
    """Asks a policy service for the actions of one environment that an Acme loop steps.

    It holds neither weights nor data: `update` does nothing, and unrolls are made by the service.
    Owned by one thread.
    """

    def __init__(
        self,
        environment_spec: specs.EnvironmentSpec,
        policy: service.PolicyService,
        environment_id: int,
        actor_id: str = "acme",
        evaluate: bool = False,
        config: actor_lib.ActorConfig | None = None,
    ) -> None:
        """Connects nothing yet; the first action does.

        Args:
          environment_spec: of the environment that is stepped; Acme's, or that of `seedlib.specs`.
          policy: who answers.
          environment_id: unique in the run.
          actor_id: a name for messages.
          evaluate: whether the environment only evaluates; its data never reaches training.
          config: what to do when the service is out of reach. Its `evaluate` does not count.

        Raises:
          specs.SpecError: an observation or action leaf is not numeric.
        """
        self._name = actor_id
        self._action_spec = environment_spec.actions
        self._seat = _Seat(
            specs.EnvironmentSpec(
                observations=specs.canonical(environment_spec.observations, "observation"),
                actions=specs.canonical(environment_spec.actions, "action"),
                rewards=dm_specs.Array((), np.float32, name="reward"),
                discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0, name="discount"),
            )
        )
        self._leaves = [
            ("/".join(map(str, path)), leaf[0, ...])
            for path, leaf in tree.flatten_with_path(self._seat.time_steps)
        ]
        self._actor = actor_lib.EnvironmentActor(
            self._seat,
            policy,
            (environment_id,),
            actor_id,
            dataclasses.replace(config or actor_lib.ActorConfig(), evaluate=evaluate),
        )
        self._unsent = False  # Whether the seat holds a time step that the service has not seen.
        self._action: types.Nested = None  # The answer to the newest time step, where it has one.
        self._closed = False

    def observe_first(self, timestep: dm_env.TimeStep) -> None:
        """Takes the time step that an episode begins with.

        An episode that broke off stays so: to the service its newest step is followed by FIRST.

        Raises:
          specs.SpecError: the time step does not fit the spec.
          service.PolicyServiceError: as `select_action` does, for a step that was not sent yet.
        """
        if self._unsent:
            self._send()
        self._take(timestep)

    def select_action(self, observation: types.Nested) -> types.Nested:
        """Returns the action for the time step that was handed over last.

        A service that went away is looked for again; see `EnvironmentActor.step`.

        Args:
          observation: not looked at; it came with the time step.

        Returns:
          An action in the dtypes and shapes of the environment's own spec.

        Raises:
          RuntimeError: no episode is under way, or the actor is closed.
          service.Refused: the service does not want this environment or time step.
          service.Unavailable: it stayed out of reach for `connect_timeout` seconds.
          service.Fenced: another actor has taken over the environment id.
        """
        if self._unsent:
            self._send()
        if self._action is None:
            raise RuntimeError(
                f"{self._name}: no episode is under way; call observe_first with its first time "
                "step before select_action"
            )
        return self._action

    def observe(self, action: types.Nested, next_timestep: dm_env.TimeStep) -> None:
        """Takes the time step that followed an action; sends a LAST one, which nobody asks about.

        Args:
          action: what `select_action` returned.
          next_timestep: what the environment answered.

        Raises:
          RuntimeError: no action was asked for, or the actor is closed.
          ValueError: the action is not the one that the service chose, and has recorded.
          specs.SpecError: the time step does not fit the spec.
          service.PolicyServiceError: as `select_action` does.
        """
        if self._unsent or self._action is None:
            raise RuntimeError(
                f"{self._name}: observe was called without select_action before it; the service "
                "has to choose every action"
            )
        chosen, taken = tree.flatten(self._action), tree.flatten(action)
        if len(chosen) != len(taken) or not all(map(np.array_equal, chosen, taken)):
            raise ValueError(
                f"{self._name}: the service chose the action {self._action}, but {action} was taken"
            )
        self._take(next_timestep)

    def update(self, wait: bool = False) -> None:
        """Does nothing: the service has the parameters."""

    def close(self) -> None:
        """Ends the session; the environment stays as it is. May be called twice."""
        self._closed = True
        self._actor.disconnect()

    def _take(self, time_step: dm_env.TimeStep) -> None:
        """Puts a time step into the seat; sends it where no action will be asked for."""
        reward, discount = time_step.reward, time_step.discount
        values = tree.flatten(
            time_step._replace(
                reward=0.0 if reward is None else actor_lib.scalar("reward", reward),
                discount=1.0 if discount is None else actor_lib.scalar("discount", discount),
            )
        )
        if len(values) != len(self._leaves):
            raise specs.SpecError(
                f"observation: expected {len(self._leaves) - 3} arrays, got {len(values) - 3}"
            )
        for (path, array), leaf in zip(self._leaves, values, strict=True):
            value = np.asarray(leaf)
            actor_lib.check_leaf(path, array.shape, array.dtype, value)
            array[...] = value
        self._unsent, self._action = True, None
        if time_step.last():
            self._send()

    def _send(self) -> None:
        """Sends what is in the seat; keeps the answer, which means nothing to a LAST step."""
        if self._closed:
            raise RuntimeError(f"{self._name}: the actor is closed")
        self._actor.step()
        self._unsent = False
        if self._seat.time_steps.step_type[0] != int(dm_env.StepType.LAST):
            # A copy, since answers may be read-only and environments may write to theirs.
            self._action = tree.map_structure(
                lambda spec, leaf: np.array(leaf, spec.dtype)[0],
                self._action_spec,
                self._seat.actions,
            )
