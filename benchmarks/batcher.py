"""The request batcher alone: producers in threads, a consumer that does nothing.

python -m benchmarks.batcher [--quick] [--json=FILE]
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import harness, null_policy

COLUMNS = (
    harness.Column("observation", "observation"),
    harness.Column("producers", "producers"),
    harness.Column("rows", "rows"),
    harness.Column("requests_per_second", "requests/s"),
    harness.Column("rows_per_second", "rows/s", spread=True),
    harness.Column("p50_ms", "p50 ms", 3),
    harness.Column("p99_ms", "p99 ms", 3),
    harness.Column("cpu_us", "CPU us/request", 1, spread=True),
    harness.Column("batch_rows", "rows/batch", 1),
)


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    seconds = options.pick(0.5, 0.3, 0.05)
    result = []
    for observation in null_policy.OBSERVATIONS:
        for producers in options.pick((1, 4, 16), (1, 4, 16), (2,)):
            for rows in options.pick((1, 8, 32), (1, 8, 32), (8,)):
                runs = [_run(observation, producers, rows, seconds) for _ in range(options.runs)]
                figures = {key: harness.spread(run[key] for run in runs) for key in runs[0]}
                result.append(
                    {"observation": observation, "producers": producers, "rows": rows, **figures}
                )
    return [harness.Table("Request batcher, null consumer, one process", COLUMNS, result)]


def _run(observation: str, producers: int, rows: int, seconds: float) -> dict[str, Any]:
    spec = null_policy.OBSERVATIONS[observation]
    latencies: list[list[float]] = [[] for _ in range(producers)]
    with null_policy.NullPolicy(spec, rows, producers) as policy:
        go = threading.Barrier(producers + 1)
        ends_at = [0.0]

        def produce(kept: list[float]) -> None:
            own = null_policy.make_rows(spec, rows)
            # The first pass over a buffer makes its memory; that is no part of a request.
            for _ in range(2 * policy.batcher.config.buffers):
                policy.batcher.submit(own).result()
            go.wait()
            before = time.perf_counter()
            while before < ends_at[0]:
                policy.batcher.submit(own).result()
                after = time.perf_counter()
                kept.append(after - before)
                before = after

        workers = [threading.Thread(target=produce, args=(kept,)) for kept in latencies]
        for worker in workers:
            worker.start()

        def wait() -> None:
            ends_at[0] = time.perf_counter() + seconds
            go.wait()
            for worker in workers:
                worker.join()

        cost = harness.cost_of(wait)
        statistics = policy.batcher.statistics
    requests = sum(map(len, latencies))
    p50, p99 = harness.percentiles([latency for kept in latencies for latency in kept])
    return {
        "requests_per_second": requests / cost.seconds,
        "rows_per_second": requests * rows / cost.seconds,
        "p50_ms": p50,
        "p99_ms": p99,
        "cpu_us": cost.cpu_seconds / requests * 1e6,
        "batch_rows": statistics.rows / statistics.batches,
    }


if __name__ == "__main__":
    harness.main("batcher", "Measure the request batcher alone.", measure)
