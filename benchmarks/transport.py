"""Batcher and transport with a policy that does nothing: client processes, no JAX anywhere.

python -m benchmarks.transport [--quick] [--json=FILE]
"""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import harness, null_policy

CLIENT = "benchmarks.transport_client"
"""The module that a client process runs."""

COLUMNS = (
    harness.Column("observation", "observation"),
    harness.Column("actors", "actors"),
    harness.Column("rows", "rows"),
    harness.Column("messages_per_second", "messages/s", spread=True),
    harness.Column("rows_per_second", "rows/s"),
    harness.Column("p50_ms", "p50 ms", 2),
    harness.Column("p99_ms", "p99 ms", 2),
    harness.Column("server_us", "server CPU us/message", spread=True),
    harness.Column("client_us", "client CPU us/message", spread=True),
    harness.Column("batch_rows", "rows/batch", 1),
)


class _Clients:
    """Client processes: started once, told over their standard input what to do."""

    def __init__(self, count: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", CLIENT, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(count)
        ]

    def __enter__(self) -> "_Clients":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # Ends it.
        for process in self._processes:
            process.wait(timeout=30.0)

    def tell(self, count: int, **command: Any) -> None:
        """Gives a command to the first `count` clients."""
        for process in self._processes[:count]:
            assert process.stdin is not None
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()

    def answers(self, count: int) -> list[Any]:
        """Returns what the first `count` clients answer to the last command."""
        answers = []
        for number, process in enumerate(self._processes[:count]):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"client {number} ended with code {process.wait(timeout=30.0)}")
            answers.append(json.loads(line))
        return answers

    def ask(self, count: int, **command: Any) -> list[Any]:
        """Gives a command and returns the answers."""
        self.tell(count, **command)
        return self.answers(count)


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    seconds = options.pick(1.0, 0.5, 0.2)
    actor_counts = options.pick((1, 4, 16), (1, 4, 16), (2,))
    rows_counts = options.pick((1, 8, 32), (1, 8, 32), (8,))
    result = []
    with _Clients(max(actor_counts)) as clients:
        clients.ask(max(actor_counts), do="hello")  # Their imports are over.
        for observation in null_policy.OBSERVATIONS:
            for actors in actor_counts:
                for rows in rows_counts:
                    runs = _runs(clients, observation, actors, rows, seconds, options.runs)
                    figures = {key: harness.spread(run[key] for run in runs) for key in runs[0]}
                    result.append(
                        {"observation": observation, "actors": actors, "rows": rows, **figures}
                    )
    return [harness.Table("gRPC transport and batcher, null policy", COLUMNS, result)]


def _runs(
    clients: _Clients, observation: str, actors: int, rows: int, seconds: float, runs: int
) -> list[dict[str, float]]:
    with _connected(clients, observation, actors, rows) as policy:
        return [_run(clients, policy, actors, rows, seconds) for _ in range(runs)]


@contextlib.contextmanager
def _connected(
    clients: _Clients, observation: str, actors: int, rows: int
) -> Iterator[null_policy.NullPolicy]:
    policy = null_policy.NullPolicy(null_policy.OBSERVATIONS[observation], rows, actors)
    with null_policy.serving(policy, actors) as address:
        clients.ask(actors, do="open", address=address, observation=observation, rows=rows)
        yield policy
        clients.ask(actors, do="close")


def _run(
    clients: _Clients, policy: null_policy.NullPolicy, actors: int, rows: int, seconds: float
) -> dict[str, float]:
    # All processes of a host share this clock, so all measure the same stretch of time.
    begins_at = time.monotonic() + 0.1
    clients.tell(actors, do="run", begins_at=begins_at, ends_at=begins_at + seconds)
    time.sleep(max(0.0, begins_at - time.monotonic()))
    before = _server_figures(policy)
    time.sleep(max(0.0, begins_at + seconds - time.monotonic()))
    cpu, batched, batches = (
        new - old for new, old in zip(_server_figures(policy), before, strict=True)
    )
    answers = clients.answers(actors)
    messages = sum(len(answer["latencies"]) for answer in answers)
    p50, p99 = harness.percentiles([t for answer in answers for t in answer["latencies"]])
    return {
        "messages_per_second": messages / seconds,
        "rows_per_second": messages * rows / seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "server_us": cpu / messages * 1e6,
        "client_us": sum(answer["cpu_seconds"] for answer in answers) / messages * 1e6,
        "batch_rows": batched / batches,
    }


def _server_figures(policy: null_policy.NullPolicy) -> tuple[float, int, int]:
    """Returns CPU seconds of this process, which is the server, rows and batches so far."""
    statistics = policy.batcher.statistics
    return time.process_time(), statistics.rows, statistics.batches


if __name__ == "__main__":
    harness.main("transport", "Measure transport and batcher with a null policy.", measure)
