"""A policy that does nothing: the batcher behind the protocol of inference, without JAX.

What is measured against it is the way to a policy and back. As a command it serves on a free port,
prints the address, and then when the first step was answered:

    python -m benchmarks.null_policy --shape=4 --dtype=uint8
"""

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import dm_env
import numpy as np
from acme import specs as acme_specs
from dm_env import specs as dm_specs

from seedlib import specs, types
from seedlib.components import batcher as batcher_lib
from seedlib.components.transport import server, service

OBSERVATIONS = {
    "16 B": dm_specs.Array((4,), np.float32, name="observation"),
    "84x84x4": dm_specs.Array((84, 84, 4), np.uint8, name="observation"),
}
"""What rows carry: a small vector, or a stack of frames."""

ACTION = dm_specs.DiscreteArray(4, dtype=np.int32, name="action")

# What the inference server adds to each row: slot, ids, step, flags, keys.
_HEADER_COLUMNS = 7


def environment_spec(observation: dm_specs.Array) -> specs.EnvironmentSpec:
    """Returns the spec of an environment with such observations."""
    return acme_specs.EnvironmentSpec(
        observations=observation,
        actions=ACTION,
        rewards=dm_specs.Array((), np.float32, name="reward"),
        discounts=dm_specs.BoundedArray((), np.float32, 0.0, 1.0, name="discount"),
    )


def make_rows(observation: dm_specs.Array, count: int) -> tuple[dm_env.TimeStep, np.ndarray]:
    """Returns `count` rows as the inference server puts them into its batcher."""
    rows = specs.zeros(row_spec(observation), (count,))
    random = np.random.default_rng(0)
    pixels = rows[0].observation
    pixels[:] = random.integers(0, 256, pixels.shape).astype(pixels.dtype)
    return rows


def row_spec(observation: dm_specs.Array) -> types.Nested:
    """Returns the spec of a row in the inference server's batcher."""
    header = dm_specs.Array((_HEADER_COLUMNS,), np.int32, name="header")
    return specs.time_step_spec(environment_spec(observation)), header


class NullPolicy:
    """A `PolicyService` that batches rows and answers zeros, from a thread of its own."""

    def __init__(
        self,
        observation: dm_specs.Array,
        rows: int,
        actors: int,
        on_first: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes the batcher.

        Args:
          observation: spec of an observation.
          rows: environments of each actor.
          actors: how many there are.
          on_first: called when the first batch was answered.
        """
        self.batcher = batcher_lib.RequestBatcher(
            row_spec(observation),
            batcher_lib.BatcherConfig(batch_sizes=batcher_lib.padded_sizes(rows, actors)),
        )
        self._on_first = on_first
        self._thread = threading.Thread(target=self._answer, name="null-policy")

    def __enter__(self) -> "NullPolicy":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.batcher.close()
        self._thread.join()

    def _answer(self) -> None:
        actions = np.zeros(self.batcher.config.batch_sizes[-1], np.int32)
        first = True
        with contextlib.suppress(batcher_lib.BatcherClosed):
            while True:
                batch = self.batcher.next_batch()
                assert batch is not None
                batch.complete(actions)
                batch.release()
                if first:
                    first = False
                    self._on_first()

    def open(self, hello: service.Hello, timeout: float | None = None) -> "_NullSession":
        """See `service.PolicyService.open`."""
        del timeout
        return _NullSession(self.batcher, len(hello.environment_ids))


class _NullSession:
    def __init__(self, batcher: batcher_lib.RequestBatcher, rows: int) -> None:
        self._batcher = batcher
        self._header = np.zeros((rows, _HEADER_COLUMNS), np.int32)
        self._request: batcher_lib.Request | None = None

    def step(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> types.Nested:
        """See `service.Session.step`."""
        self.send(time_steps, timeout)
        return self.receive(timeout)

    def send(self, time_steps: dm_env.TimeStep, timeout: float | None = None) -> None:
        """See `service.Session.send`."""
        try:
            self._request = self._batcher.submit((time_steps, self._header), timeout=timeout)
        except batcher_lib.BatcherClosed:
            raise service.Unavailable("the null policy is closed") from None

    def receive(self, timeout: float | None = None) -> types.Nested:
        """See `service.Session.receive`."""
        assert self._request is not None
        try:
            return self._request.result(timeout)
        except batcher_lib.BatcherClosed:
            raise service.Unavailable("the null policy is closed") from None

    def close(self) -> None:
        """See `service.Session.close`."""


@contextlib.contextmanager
def serving(policy: NullPolicy, streams: int) -> Iterator[str]:
    """Serves a policy over gRPC on a free port of this host; yields the address."""
    config = server.ServerConfig(address="localhost:0", max_streams=streams)
    with policy, server.PolicyServer(policy, config) as policy_server:
        yield policy_server.address


def main() -> None:
    """Serves until standard input ends."""
    parser = argparse.ArgumentParser(description="Serve a policy that does nothing.")
    parser.add_argument("--shape", type=int, nargs="*", default=[4])
    parser.add_argument("--dtype", default="uint8")
    parser.add_argument("--rows", type=int, default=1)
    arguments = parser.parse_args()
    observation = dm_specs.Array(tuple(arguments.shape), np.dtype(arguments.dtype))
    policy = NullPolicy(
        observation, arguments.rows, 1, on_first=lambda: print(time.time(), flush=True)
    )
    with serving(policy, streams=4) as address:
        print(address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
