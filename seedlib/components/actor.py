"""The environment actor: steps environments and asks a policy service for actions.

It has no network weights and imports neither JAX nor TensorFlow nor Reverb. All environments of an
actor go in one request, so that their number sets how much a message carries.
"""

import dataclasses
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import dm_env
import numpy as np
import tree
from absl import logging

from seedlib import specs, types
from seedlib.components.transport import backoff, service

# Kinds of numbers that an array of a kind can hold; fractions and text are not cut to fit.
_STORABLE = {"f": "fiub", "i": "iub", "u": "iub", "b": "iub"}
# Longest attempt to open a session, so that an actor that is told to stop does.
_OPEN_TIMEOUT = 5.0


class EnvironmentFailure(Exception):
    """An environment failed more often than an actor may rebuild it."""


class BatchedEnvironment(Protocol):
    """E environments that step together.

    An environment that answered LAST ignores the next action and answers FIRST.
    """

    @property
    def size(self) -> int:
        """E, the number of environments."""
        ...

    @property
    def spec(self) -> specs.EnvironmentSpec:
        """The canonical spec of one of them."""
        ...

    def step(self, actions: types.Nested | None) -> dm_env.TimeStep:
        """Steps every environment once.

        Args:
          actions: leaves `[E, ...]`; None resets every environment.

        Returns:
          Time steps, leaves `[E, ...]` as `specs.time_step_spec` says, valid until the next call.
        """
        ...

    def close(self) -> None:
        """Frees the environments."""
        ...


@dataclasses.dataclass(frozen=True)
class ActorConfig:
    """How an actor behaves when things go wrong.

    Attributes:
      max_failures: failures of environments that an actor survives within `failure_window` seconds;
        one more ends it.
      failure_window: see there.
      connect_timeout: seconds, from the first failed call, that the service may be out of reach
        before the actor gives up.
      step_timeout: seconds to wait for an answer.
      environment_timeout: seconds after which an environment that does not come back from one step
        or reset is taken to hang; the actor's process then ends, since nothing can end a call.
      run_token: what the service asks for.
      evaluate: whether the environments only evaluate.
      pipeline: groups of environments that take turns: one steps while the others wait for their
        actions; see `run_in_turns`.
    """

    max_failures: int = 5
    failure_window: float = 600.0
    connect_timeout: float = 300.0
    step_timeout: float = 300.0
    environment_timeout: float = 300.0
    run_token: str = ""
    evaluate: bool = False
    pipeline: int = 1

    def __post_init__(self) -> None:
        """Refuses settings that cannot be.

        Raises:
          ValueError: naming the field and the value.
        """
        if self.max_failures < 0:
            raise ValueError(f"max_failures must not be negative, got {self.max_failures}")
        if self.pipeline < 1:
            raise ValueError(f"pipeline must be at least 1, got {self.pipeline}")
        for field in ("failure_window", "connect_timeout", "step_timeout", "environment_timeout"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")


def environment_seed(seed: int, environment_id: int, incarnation: int, evaluate: bool) -> int:
    """Returns a seed that differs per run, environment, incarnation and role; in 0..2^31-1."""
    sequence = np.random.SeedSequence([seed, environment_id, incarnation, int(evaluate)])
    return int(sequence.generate_state(1)[0] & 0x7FFFFFFF)


class SerialEnvironments:
    """Any dm_env environments, stepped one after the other. A `BatchedEnvironment`.

    An environment that raises, or shows a value that is not finite, is rebuilt with another seed,
    and again with growing pauses while that fails; its episode breaks off without a LAST step. The
    actor's other environments wait meanwhile, and keep their episodes.
    """

    def __init__(
        self,
        factory: Callable[[int], dm_env.Environment],
        environment_ids: Sequence[int],
        seed: int = 0,
        evaluate: bool = False,
        max_failures: int = 5,
        failure_window: float = 600.0,
        incarnation: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
          factory: `factory(seed) -> dm_env.Environment`.
          environment_ids: one for each.
          seed: the run's.
          evaluate: whether they evaluate; evaluation seeds differ from all training seeds.
          max_failures: within `failure_window` seconds; one more is raised.
          failure_window: see there.
          incarnation: how often these environments were started before, so that a restarted actor
            does not replay its old streams.
        """
        self._factory = factory
        self._ids = tuple(environment_ids)
        self._seed = seed
        self._evaluate = evaluate
        self._max_failures = max_failures
        self._window = failure_window
        self._builds = [incarnation << 16] * len(self._ids)
        self._failures: list[float] = []
        # The environment that is being stepped, and since when; for those who watch.
        self._busy: tuple[int, float] | None = None
        self.failures = 0
        self._environments = [self._build(index) for index in range(len(self._ids))]
        self._spec = specs.make_environment_spec(self._environments[0])
        self._time_steps = specs.zeros(specs.time_step_spec(self._spec), (len(self._ids),))
        paths = tree.flatten_with_path(self._spec.observations)
        self._observations = tree.flatten(self._time_steps.observation)
        self._leaves = [
            ("/".join(["observation", *map(str, path)]), tuple(leaf.shape), array)
            for (path, leaf), array in zip(paths, self._observations, strict=True)
        ]
        self._single = len(paths) == 1 and paths[0][0] == ()
        self._floats = [
            ("reward", (), self._time_steps.reward),
            ("discount", (), self._time_steps.discount),
            *(leaf for leaf in self._leaves if leaf[2].dtype.kind == "f"),
        ]
        # Actions are handed over in the dtype of the environment's own spec.
        self._action_spec = self._environments[0].action_spec()
        self._plain_action = not tree.is_nested(self._action_spec)

    def _build(self, index: int) -> dm_env.Environment:
        build = self._builds[index]
        self._builds[index] = build + 1
        return self._factory(environment_seed(self._seed, self._ids[index], build, self._evaluate))

    @property
    def size(self) -> int:
        """See `BatchedEnvironment.size`."""
        return len(self._ids)

    @property
    def spec(self) -> specs.EnvironmentSpec:
        """See `BatchedEnvironment.spec`."""
        return self._spec

    def step(self, actions: types.Nested | None) -> dm_env.TimeStep:
        """See `BatchedEnvironment.step`.

        Raises:
          EnvironmentFailure: one failure too many; caused by the environment's own exception.
        """
        handed = self._split(actions)
        steps: list[dm_env.TimeStep] = []
        for index in range(self.size):
            self._busy = (index, time.monotonic())
            try:
                environment = self._environments[index]
                steps.append(
                    environment.reset() if handed is None else environment.step(handed[index])
                )
            except Exception as error:
                steps.append(self._rebuild(index, error))
        try:
            self._store_all(steps)
        except Exception:  # Of one of them; which one is found by storing each alone.
            for index, time_step in enumerate(steps):
                try:
                    self._store(index, time_step)
                except Exception as error:
                    self._rebuild(index, error)
        self._check_finite()
        self._busy = None
        return self._time_steps

    def _split(self, actions: types.Nested | None) -> Sequence[types.Nested] | np.ndarray | None:
        """Returns the action of each environment, in the dtype of its own spec."""
        if actions is None:
            return None
        if self._plain_action:
            # A copy, since actions may be read-only and environments may write to theirs.
            return np.array(actions, self._action_spec.dtype)
        return [
            tree.map_structure(
                lambda spec, leaf, row=index: np.array(leaf[row], spec.dtype),
                self._action_spec,
                actions,
            )
            for index in range(self.size)
        ]

    def stuck(self, seconds: float) -> str | None:
        """Says which environment has not come back for `seconds`, or None. Any thread may ask."""
        busy = self._busy
        if busy is None or time.monotonic() - busy[1] < seconds:
            return None
        return f"environment {self._ids[busy[0]]} has not come back for {seconds:.0f} s"

    def _rebuild(self, index: int, error: Exception) -> dm_env.TimeStep:
        """Replaces a failed environment by a new one; stores and returns its FIRST step."""
        self._note_failure(index, error)
        delays = backoff.Backoff(initial=0.05, maximum=5.0, seed=self._builds[index])
        while True:
            try:
                self._environments[index] = self._build(index)
                first = self._environments[index].reset()
                self._store(index, first)
                for path, _, array in self._floats:
                    if not np.isfinite(array[index]).all():
                        raise specs.SpecError(f"{path} is not finite")
                return first
            except Exception as again:
                self._note_failure(index, again)
                time.sleep(next(delays))

    def _check_finite(self) -> None:
        """Rebuilds environments that showed a value that is not finite; all rows at once."""
        for path, _, array in self._floats:
            if np.isfinite(array).all():
                continue
            finite = np.isfinite(array).reshape(self.size, -1).all(axis=1)
            for index in np.flatnonzero(~finite):
                self._rebuild(int(index), specs.SpecError(f"{path} is not finite"))

    def _store_all(self, steps: Sequence[dm_env.TimeStep]) -> None:
        """Copies a time step of each environment into its row, leaf by leaf, and checks them.

        Does what `_store` does for each, in a third of the time for small observations.
        """
        target = self._time_steps
        step_types, rewards, discounts, observations = zip(*steps, strict=True)
        target.step_type[:] = step_types
        target.reward[:] = [
            value if type(value) is float else 0.0 if value is None else scalar("reward", value)
            for value in rewards
        ]
        target.discount[:] = [
            value if type(value) is float else 1.0 if value is None else scalar("discount", value)
            for value in discounts
        ]
        columns = (
            (observations,) if self._single else zip(*map(tree.flatten, observations), strict=True)
        )
        for (path, shape, array), column in zip(self._leaves, columns, strict=True):
            values = [np.asarray(leaf) for leaf in column]
            for value in values:
                check_leaf(path, shape, array.dtype, value)
            # The kinds are checked, so that no cast surprises.
            if shape:
                np.concatenate(values, out=array.reshape(-1, *shape[1:]), casting="unsafe")
            else:
                array[:] = values

    def _store(self, index: int, time_step: dm_env.TimeStep) -> None:
        """Copies one time step into its row, and checks it."""
        step_type, reward, discount, observation = time_step
        target = self._time_steps
        target.step_type[index] = step_type
        target.reward[index] = 0.0 if reward is None else scalar("reward", reward)
        target.discount[index] = 1.0 if discount is None else scalar("discount", discount)
        leaves = (observation,) if self._single else tree.flatten(observation)
        if len(leaves) != len(self._leaves):
            raise specs.SpecError(
                f"observation: expected {len(self._leaves)} arrays, got {len(leaves)}"
            )
        for (path, shape, array), leaf in zip(self._leaves, leaves, strict=True):
            value = np.asarray(leaf)
            check_leaf(path, shape, array.dtype, value)
            array[index] = value

    def _note_failure(self, index: int, error: Exception) -> None:
        now = time.monotonic()
        self.failures += 1
        self._failures = [at for at in self._failures if now - at < self._window] + [now]
        name = f"environment {self._ids[index]}"
        logging.error(
            "%s failed (%d times in %.0f s):\n%s",
            name,
            len(self._failures),
            self._window,
            "".join(traceback.format_exception(error))[:20000],
        )
        if len(self._failures) > self._max_failures:
            raise EnvironmentFailure(
                f"{name}: {len(self._failures)} failures within {self._window:.0f} s; the last: "
                f"{type(error).__name__}: {str(error)[:500]}"
            ) from error
        close_quietly(self._environments[index] if hasattr(self, "_environments") else None, name)

    def close(self) -> None:
        """See `BatchedEnvironment.close`."""
        for i, environment in zip(self._ids, self._environments, strict=True):
            close_quietly(environment, f"environment {i}")


def check_leaf(path: str, shape: tuple[int, ...], dtype: np.dtype, value: np.ndarray) -> None:
    """Refuses what an assignment would broadcast, round or parse from text, all in silence.

    Raises:
      SpecError: naming the leaf.
    """
    if value.shape != shape or value.dtype.kind not in _STORABLE[dtype.kind]:
        raise specs.SpecError(f"{path}: expected {dtype} {shape}, got {value.dtype} {value.shape}")


def scalar(name: str, value: Any) -> Any:
    """Returns a reward or discount, which may have the shape `(1,)`, as one number.

    Raises:
      SpecError: it is none.
    """
    if type(value) is float:
        return value
    array = np.asarray(value)
    if array.shape not in ((), (1,)) or array.dtype.kind not in _STORABLE["f"]:
        raise specs.SpecError(f"{name}: expected one number, got {array.dtype} {array.shape}")
    return array.reshape(())


def close_quietly(environment: Any, name: str) -> None:
    """Closes an environment that may be broken; what it raises is logged, since it is of no use."""
    close = getattr(environment, "close", None)
    if close is None:
        return
    try:
        close()
    except Exception:
        logging.exception("%s: close failed", name)


class EnvironmentActor:
    """The environment loop of one actor against a policy service. Owned by one thread."""

    def __init__(
        self,
        environment: BatchedEnvironment,
        policy: service.PolicyService,
        environment_ids: Sequence[int],
        actor_id: str = "actor",
        config: ActorConfig | None = None,
    ) -> None:
        """Connects nothing yet; `run` does.

        Args:
          environment: what to step.
          policy: who answers.
          environment_ids: one for each environment, unique in the run.
          actor_id: a name for messages.
          config: what to do when things go wrong.
        """
        if len(environment_ids) != environment.size:
            raise ValueError(
                f"{len(environment_ids)} environment ids for {environment.size} environments"
            )
        self._environment = environment
        self._policy = policy
        self._ids = tuple(environment_ids)
        self._actor_id = actor_id
        self._config = config or ActorConfig()
        self._session: service.Session | None = None
        self._sent = False  # Whether the session has the newest time steps.
        self._time_steps: dm_env.TimeStep | None = None
        self.reconnections = -1

    @property
    def time_steps(self) -> dm_env.TimeStep | None:
        """The environments' newest time steps; None before the first."""
        return self._time_steps

    def step(self, stop: Callable[[], bool] = lambda: False) -> bool:
        """Gets an action for every environment and steps them.

        A service that went away is looked for again, with growing pauses; the environments keep
        their episodes and the service begins anew with them.

        Args:
          stop: asked while the service is out of reach.

        Returns:
          False where it was told to stop.

        Raises:
          service.Refused: the service does not want these environments.
          service.Unavailable: it stayed out of reach for `connect_timeout` seconds.
          EnvironmentFailure: an environment failed too often.
        """
        if self._time_steps is None:
            self._time_steps = self._environment.step(None)
        patience = self._config.connect_timeout
        deadline: float | None = None  # Known once the service is out of reach.
        delays = backoff.Backoff(initial=0.05, maximum=2.0, seed=self._ids[0])
        while not stop():
            try:
                if self._session is None:
                    left = patience if deadline is None else deadline - time.monotonic()
                    self._session = self._open(min(max(0.1, left), _OPEN_TIMEOUT))
                if not self._sent:
                    self._session.send(self._time_steps, self._config.step_timeout)
                actions = self._session.receive(self._config.step_timeout)
                self._sent = False
                break
            except (service.Unavailable, service.Fenced) as error:
                self.disconnect()
                if isinstance(error, service.Fenced):
                    raise
                now = time.monotonic()
                if deadline is None:
                    deadline = now + patience
                if now >= deadline:
                    raise
                logging.log_every_n_seconds(
                    logging.WARNING, "%s: %s; trying again", 5, self._actor_id, error
                )
                time.sleep(next(delays))
        else:
            return False
        self._time_steps = self._environment.step(actions)
        return True

    def send(self) -> None:
        """Sends the newest time steps, so that the next `step` only waits for the rest.

        A service that went away is left to `step`, as is the first session.

        Raises:
          service.Refused: the service does not want these environments.
          service.Fenced: others have taken them over.
        """
        if self._session is None or self._sent:
            return
        try:
            self._session.send(self._time_steps, self._config.step_timeout)
            self._sent = True
        except service.Unavailable:
            self.disconnect()

    def _open(self, timeout: float) -> service.Session:
        spec = self._environment.spec
        session = self._policy.open(
            service.Hello(
                actor_id=self._actor_id,
                environment_ids=self._ids,
                incarnation=secrets.token_hex(8),
                evaluate=self._config.evaluate,
                observation_spec=spec.observations,
                action_spec=spec.actions,
                run_token=self._config.run_token,
            ),
            timeout,
        )
        self.reconnections += 1
        return session

    def disconnect(self) -> None:
        """Closes the session, if there is one; the environments stay as they are."""
        session, self._session = self._session, None
        self._sent = False
        if session is not None:
            session.close()

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Steps until `stop()`; then closes session and environments. Raises as `step` does."""
        run_in_turns([self], stop)

    def close(self) -> None:
        """Closes session and environments."""
        self.disconnect()
        self._environment.close()


def run_in_turns(
    actors: Sequence[EnvironmentActor], stop: Callable[[], bool] = lambda: False
) -> None:
    """Steps actors in turns until `stop()`; then closes them. Raises as `EnvironmentActor.step`.

    What an actor has to ask is sent before the next one's turn, so that its answer is on the way
    while the others' environments are stepped: transport and inference are hidden behind them. All
    in the calling thread.

    Args:
      actors: at least one, with different environments.
      stop: asked before every step.
    """
    try:
        while not stop():
            for actor in actors:
                if not actor.step(stop):
                    return
                if len(actors) > 1:
                    actor.send()
    finally:
        for actor in actors:
            actor.close()
