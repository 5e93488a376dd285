"""The learner alone by net and batch size, next to the bare jitted update.

python -m benchmarks.learner [--quick] [--json=FILE]
"""

from collections.abc import Sequence
from typing import Any

from benchmarks import harness, parts
from seedlib.components import devices
from seedlib.components import learner as learner_lib

COLUMNS = (
    harness.Column("net", "net"),
    harness.Column("lstm", "LSTM"),
    harness.Column("batch", "batch"),
    harness.Column("update_ms", "update ms", 2, spread=True),
    harness.Column("learner_ms", "learner ms", 2, spread=True),
    harness.Column("ratio", "learner/update", 2),
    harness.Column("transitions_per_second", "transitions/s"),
    harness.Column("transitions_per_cpu_second", "transitions/CPU-s", spread=True),
    harness.Column("bare_per_cpu_second", "bare transitions/CPU-s", spread=True),
)

# Net, batch sizes without LSTM, batch sizes with.
_FULL = (
    ("mlp", (8, 32, 128), (32,)),
    ("shallow", (8, 32), (8,)),
    ("deep", (4,), ()),
)
_QUICK = (("mlp", (32,), (32,)), ("shallow", (8,), ()))
_SMOKE = (("mlp", (4,), ()),)


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    seconds = options.pick(0.6, 0.5, 0.05)
    rows = []
    for net, plain, recurrent in options.pick(_FULL, _QUICK, _SMOKE):
        for lstm, sizes in ((False, plain), (True, recurrent)):
            for size in sizes:
                rows.append(_row(net, lstm, size, seconds, options.runs))
    return [harness.Table("Learner and bare update, T = 20", COLUMNS, rows)]


def _row(net: str, lstm: bool, batch: int, seconds: float, runs: int) -> dict[str, Any]:
    case = parts.make_case(net, batch, lstm)
    unrolls = parts.make_unrolls(case, batch)
    update = parts.bare_update(case, unrolls)
    learner = learner_lib.Learner(
        case.agent, parts.SameBatch(unrolls), devices.split_devices(), parts.parameter_store(case)
    )
    try:
        learner.step()  # Compiles.
        learner.step()
        bare, whole = harness.alternate([update, learner.step], seconds, runs)
        learner.flush()
    finally:
        learner.close()
    transitions = batch * case.agent.unroll.length
    update_ms = harness.spread(cost.seconds / count * 1e3 for count, cost in bare)
    learner_ms = harness.spread(cost.seconds / count * 1e3 for count, cost in whole)
    return {
        "net": net,
        "lstm": "yes" if lstm else "no",
        "batch": batch,
        "update_ms": update_ms,
        "learner_ms": learner_ms,
        "ratio": learner_ms.median / update_ms.median,
        "transitions_per_second": transitions / learner_ms.median * 1e3,
        "transitions_per_cpu_second": _per_cpu_second(whole, transitions),
        "bare_per_cpu_second": _per_cpu_second(bare, transitions),
    }


def _per_cpu_second(runs: Sequence[tuple[int, harness.Cost]], transitions: int) -> harness.Spread:
    return harness.spread(count * transitions / cost.cpu_seconds for count, cost in runs)


if __name__ == "__main__":
    harness.main("learner", "Measure the learner alone.", measure)
