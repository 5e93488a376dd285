"""The inference server in one process, by net and batch, next to the bare jitted policy.

python -m benchmarks.inference [--quick] [--json=FILE]
"""

from collections.abc import Sequence
from typing import Any

from benchmarks import harness, null_policy, parts
from seedlib.components import configs, inference
from seedlib.components.transport import service

_STAGES = ("wait", "dispatch", "device", "assemble", "insert")

COLUMNS = (
    harness.Column("net", "net"),
    harness.Column("lstm", "LSTM"),
    harness.Column("rows", "rows"),
    harness.Column("rows_per_second", "rows/s", spread=True),
    harness.Column("cpu_us", "CPU us/row", 1, spread=True),
    harness.Column("bare_us", "bare us/row", 1),
    harness.Column("ratio", "CPU/bare", 2),
    *(harness.Column(stage, f"{stage} us", 1) for stage in _STAGES),
)

# Net, rows without LSTM, rows with.
_FULL = (
    ("mlp", (1, 8, 32, 128), (32,)),
    ("shallow", (1, 8, 32), (8,)),
    ("deep", (8,), (8,)),
)
_QUICK = (("mlp", (1, 32), (32,)), ("shallow", (1, 16), ()))
_SMOKE = (("mlp", (4,), ()),)


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    seconds = options.pick(0.4, 0.3, 0.05)
    rows = []
    for net, plain, recurrent in options.pick(_FULL, _QUICK, _SMOKE):
        for lstm, counts in ((False, plain), (True, recurrent)):
            for count in counts:
                rows.append(_row(net, lstm, count, seconds, options.runs))
    title = "Inference server in one process, one session; stages in us per row"
    return [harness.Table(title, COLUMNS, rows)]


def _row(net: str, lstm: bool, rows: int, seconds: float, runs: int) -> dict[str, Any]:
    case = parts.make_case(net, lstm=lstm)
    policy = parts.bare_policy(case, rows)
    server = inference.InferenceServer(
        case.agent,
        case.spec,
        parts.parameter_store(case),
        parts.NullSink(),
        configs.InferenceConfig(max_environments=rows, batch_sizes=(rows,)),
    )
    server.start()
    try:
        session = server.open(_hello(case, rows))
        time_steps, _ = null_policy.make_rows(case.spec.observations, rows)
        time_steps = time_steps._replace(step_type=time_steps.step_type + 1)
        work = lambda: session.step(time_steps)
        harness.repeat(work, 0.0, at_least=2 * case.agent.unroll.window)
        before = server.statistics()
        bare, whole = harness.alternate([policy, work], seconds, runs)
        after = server.statistics()
        session.close()
    finally:
        server.stop()
    cpu_us = harness.spread(cost.cpu_seconds / count / rows * 1e6 for count, cost in whole)
    bare_us = harness.spread(cost.cpu_seconds / count / rows * 1e6 for count, cost in bare)
    answered = after.rows - before.rows
    return {
        "net": net,
        "lstm": "yes" if lstm else "no",
        "rows": rows,
        "rows_per_second": harness.spread(count * rows / cost.seconds for count, cost in whole),
        "cpu_us": cpu_us,
        "bare_us": bare_us,
        "ratio": cpu_us.median / bare_us.median,
        **{
            stage: (getattr(after, f"{stage}_seconds") - getattr(before, f"{stage}_seconds"))
            / answered
            * 1e6
            for stage in _STAGES
        },
    }


def _hello(case: parts.Case, rows: int) -> service.Hello:
    return service.Hello(
        actor_id="benchmark",
        environment_ids=tuple(range(rows)),
        incarnation="only",
        evaluate=False,
        observation_spec=case.spec.observations,
        action_spec=case.spec.actions,
    )


if __name__ == "__main__":
    harness.main("inference", "Measure the inference server in one process.", measure)
