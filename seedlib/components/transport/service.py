"""What a policy service is: the one protocol that local and remote inference share.

An inference server *is* a `PolicyService`; the gRPC client is another one. An actor cannot tell
them apart, so a graph may put inference beside an actor or on another host and change nothing else.
"""

import dataclasses
from typing import Protocol

import dm_env

from seedlib import types

PROTOCOL_VERSION = 1
"""Both ends of a stream must speak the same version."""


class PolicyServiceError(Exception):
    """Base of the errors that a session or service raises."""


class Refused(PolicyServiceError):
    """The service will not serve this hello or this request; trying again unchanged is useless."""


class Unavailable(PolicyServiceError):
    """The service is gone, closing or out of reach; opening a new session later may work."""


class Fenced(PolicyServiceError):
    """A newer incarnation of one of the session's environments has taken over."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """How a session begins: who is there and what its rows look like.

    Attributes:
      actor_id: a name for messages and logs.
      environment_ids: one id per row, unique within the run.
      incarnation: a fresh random text for every session; a newer one fences the older off.
      evaluate: whether these environments only evaluate; their data never reaches training.
      observation_spec: nested `dm_env.specs.Array`, canonical.
      action_spec: nested `dm_env.specs.Array`, canonical.
      run_token: a secret text that the service compares with its own; "" where it has none.
    """

    actor_id: str
    environment_ids: tuple[int, ...]
    incarnation: str
    evaluate: bool
    observation_spec: types.Nested
    action_spec: types.Nested
    run_token: str = dataclasses.field(default="", repr=False)


class Session(Protocol):
    """The rows of one actor, in lock-step: a time step of each environment in, an action out.

    `step` is `send` followed by `receive`; an actor that has something else to do meanwhile calls
    the two apart, in turns.
    """

    def send(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> None:
        """Sends one time step of each environment on its way; `receive` returns the actions.

        Args:
          time_steps: see `step`. Not kept after the return.
          timeout: seconds that the service may take to have room for it; see `step`.

        Raises:
          PolicyServiceError: as `step` does.
        """
        ...

    def receive(self, timeout: float | None = None) -> types.Nested:
        """Waits for the actions of what was sent, and returns them as `step` does.

        Raises:
          PolicyServiceError: as `step` does.
        """
        ...

    def step(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> types.Nested:
        """Answers one time step of each environment.

        Args:
          time_steps: leaves `[E, ...]`: step_type uint8, reward float32, discount float32 and the
            observation as in the hello's spec. Not kept after the return.
          timeout: seconds to wait; None means the service's own limit.

        Returns:
          Actions, leaves `[E, ...]`. Valid until the next call. Rows whose step is LAST hold an
          action that means nothing.

        Raises:
          Refused: this request is bad (path, expected and given shape); the session is over.
          Fenced: a newer incarnation has taken over.
          Unavailable: the service went away or did not answer in time.
        """
        ...

    def close(self) -> None:
        """Ends the session, wakes whoever waits for it, and frees the rows at the service.

        May be called twice, and by any thread.
        """
        ...


class PolicyService(Protocol):
    """Opens sessions."""

    def open(self, hello: Hello, timeout: float | None = None) -> Session:
        """Opens a session.

        Raises:
          Refused: the service has another spec, token or run; the message names the difference.
          Unavailable: the service is out of reach, not ready within `timeout` seconds or closing.
        """
        ...
