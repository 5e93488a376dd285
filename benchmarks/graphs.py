"""SEED, IMPALA and the inference pool beside each other: the same nodes, in other processes.

    python -m benchmarks.graphs [--quick] [--runs=N] [--json=FILE] [--env=NAME] [--net=NAME ...]
        [--num_actors=N] [--envs_per_actor=E]

Each graph is started by itself, as a user starts it; then the next one, and all again. Ratios are
of the same turn.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import harness, live_program
from programs import presets

_SEED = "seed"
_GRAPHS = (_SEED, "impala", "inference_pool")
_NETS = ("shallow", "deep")
_KINDS = ("learner", "inference", "actor", live_program.LAUNCHER)
_BYTES = ("parameters", "observations", "unrolls")
_RATIOS = ("steps", "cpu", "bytes", "mb")

RUN_COLUMNS = (
    harness.Column("net", "net"),
    harness.Column("graph", "graph"),
    harness.Column("steps", "steps/s", spread=True),
    harness.Column("steps_ratio", "steps/SEED", 2, spread=True),
    harness.Column("lag", "policy lag", 1, spread=True),
    harness.Column("lag_max", "largest lag", spread=True),
    harness.Column("cpu", "CPU s/1000 steps", 2, spread=True),
    harness.Column("cpu_ratio", "CPU/SEED", 2, spread=True),
)
BYTES_COLUMNS = (
    harness.Column("net", "net"),
    harness.Column("graph", "graph"),
    harness.Column("bytes_parameters", "parameters B"),
    harness.Column("bytes_observations", "observations B"),
    harness.Column("bytes_unrolls", "unrolls B"),
    harness.Column("bytes", "all B", spread=True),
    harness.Column("bytes_ratio", "all/SEED", 2, spread=True),
    harness.Column("loopback", "loopback B", spread=True),
)
PROCESS_COLUMNS = (
    harness.Column("net", "net"),
    harness.Column("graph", "graph"),
    *(harness.Column(f"cpu_{kind}", f"{kind} CPU s", 2) for kind in _KINDS),
    *(harness.Column(f"mb_{kind}", f"{kind} MB") for kind in _KINDS),
    harness.Column("mb", "all MB", spread=True),
    harness.Column("mb_ratio", "MB/SEED", 2, spread=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark alone has."""
    parser.add_argument("--env", default="synthetic:84x84x4", help="an environment with images")
    parser.add_argument("--net", action="append", choices=_NETS, help="repeat (default: both)")
    parser.add_argument("--num_actors", type=int, help="default: the program's preset")
    parser.add_argument("--envs_per_actor", type=int, help="default: the program's preset")


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns three tables: speed and lag, bytes between processes, and each kind of process."""
    arguments = options.arguments
    preset = presets.preset(arguments.env)
    actors = arguments.num_actors or preset.num_actors
    envs = arguments.envs_per_actor or preset.envs_per_actor
    rows: list[dict[str, Any]] = []
    for net in arguments.net or options.pick(_NETS, _NETS, _NETS[:1]):
        flags = (
            f"--env={arguments.env}",
            f"--num_actors={actors}",
            f"--envs_per_actor={envs}",
            f"--agent_option=torso={net}",
        )
        turns = [
            {graph: _run(graph, flags, actors, options) for graph in _GRAPHS}
            for _ in range(options.runs)
        ]
        rows += [{"net": net, "graph": graph, **_row(turns, graph)} for graph in _GRAPHS]
    what = f"{arguments.env}, {actors} actors of {envs} environments"
    return [
        harness.Table(f"The graphs, training, T = 20; {what}", RUN_COLUMNS, rows),
        harness.Table("Bytes between processes, per agent step", BYTES_COLUMNS, rows),
        harness.Table(
            "CPU time per 1,000 agent steps, all processes of a kind; memory of one process (PSS)",
            PROCESS_COLUMNS,
            rows,
        ),
    ]


def _run(
    graph: str, flags: Sequence[str], actors: int, options: harness.Options
) -> dict[str, float | None]:
    """Runs a graph; returns its figures between two points of its steady state."""
    warm_up, window = options.pick(5.0, 2.0, 0.0), options.pick(20.0, 5.0, 1.0)
    # A large net's updates take seconds, and the first ones find the queue still filling.
    settling, updates = options.pick(10, 5, 0), options.pick(10, 5, 1)

    def steady(figures: Mapping[str, float]) -> bool:
        """Returns whether every actor is there, and batches come back as parameters."""
        connected = figures.get("inference_sessions", 0) >= actors
        return connected and figures.get("learner_updates", 0) >= 1

    with live_program.running(*flags, program=f"programs.{graph}") as program:
        program.wait_for(steady)
        first = program.wait(warm_up, settling)
        last = program.wait(window, updates)
        return _figures(first, last, program.megabytes(proportional=True))


def _figures(
    first: live_program.Point,
    last: live_program.Point,
    megabytes: Mapping[str, Sequence[float]],
) -> dict[str, float | None]:
    """Returns what the columns show, but for ratios; of a kind without a process it is None."""
    steps = max(1.0, last.since(first, "agent_steps"))
    seconds = last.since(first, "wall_seconds")
    cpu = {kind: last.cpu_since(first, kind) / steps * 1e3 for kind in megabytes}
    passed = {name: last.since(first, f"network_bytes_{name}") / steps for name in _BYTES}
    return {
        "steps": steps / seconds,
        "lag": last.policy_lag_since(first),
        "lag_max": last.figures.get("policy_lag_max"),
        "cpu": sum(cpu.values()),
        "bytes": sum(passed.values()),
        "mb": sum(sum(each) for each in megabytes.values()),
        "loopback": (last.loopback_bytes - first.loopback_bytes) / steps,
        **{f"bytes_{name}": value for name, value in passed.items()},
        **{f"cpu_{kind}": cpu.get(kind) for kind in _KINDS},
        **{f"mb_{kind}": max(megabytes[kind]) if kind in megabytes else None for kind in _KINDS},
    }


def _row(
    turns: Sequence[Mapping[str, Mapping[str, float | None]]], graph: str
) -> dict[str, harness.Spread | None]:
    """Returns the spread of each figure of a graph over all turns, and of its ratios to SEED."""
    row = {name: _spread([turn[graph][name] for turn in turns]) for name in turns[0][graph]}
    for name in _RATIOS:
        row[f"{name}_ratio"] = _spread(
            [_ratio(turn[graph][name], turn[_SEED][name]) for turn in turns]
        )
    return row


def _ratio(value: float | None, seed: float | None) -> float | None:
    return value / seed if value is not None and seed else None


def _spread(values: Sequence[float | None]) -> harness.Spread | None:
    """Returns the spread of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return harness.spread(known) if known else None


if __name__ == "__main__":
    harness.main("graphs", "Compare SEED, IMPALA and inference pool.", measure, add_arguments)
