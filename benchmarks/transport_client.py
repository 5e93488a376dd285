"""A client process of `benchmarks.transport`: obeys one JSON line after the other."""

import json
import sys
import time
from typing import Any

import dm_env

from benchmarks import null_policy
from seedlib.components.transport import client, service

_HEAVY = ("jax", "tensorflow", "reverb")


class _Client:
    def __init__(self, number: int) -> None:
        self._number = number
        self._remote: client.RemotePolicyService | None = None
        self._session: client.RemoteSession | None = None
        self._time_steps: dm_env.TimeStep | None = None

    def hello(self) -> dict[str, Any]:
        loaded = [module for module in _HEAVY if module in sys.modules]
        if loaded:
            raise RuntimeError(f"a client must not import {loaded}")
        return {}

    def open(self, address: str, observation: str, rows: int) -> dict[str, Any]:
        spec = null_policy.OBSERVATIONS[observation]
        self._time_steps, _ = null_policy.make_rows(spec, rows)
        self._remote = client.RemotePolicyService(address)
        first = self._number * rows
        self._session = self._remote.open(
            service.Hello(
                actor_id=f"client {self._number}",
                environment_ids=tuple(range(first, first + rows)),
                incarnation="only",
                evaluate=False,
                observation_spec=spec,
                action_spec=null_policy.ACTION,
            )
        )
        for _ in range(10):
            self._session.step(self._time_steps)
        return {}

    def run(self, begins_at: float, ends_at: float) -> dict[str, Any]:
        assert self._session is not None
        time.sleep(max(0.0, begins_at - time.monotonic()))
        latencies = []
        cpu = time.process_time()
        before = time.monotonic()
        while before < ends_at:
            self._session.step(self._time_steps)
            after = time.monotonic()
            latencies.append(after - before)
            before = after
        return {"cpu_seconds": time.process_time() - cpu, "latencies": latencies}

    def close(self) -> dict[str, Any]:
        if self._remote is not None:
            self._remote.close()
        return {}


def main() -> None:
    """Obeys until standard input ends."""
    me = _Client(int(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(me, command.pop("do"))(**command)
        print(json.dumps(answer), flush=True)
    me.close()


if __name__ == "__main__":
    main()
