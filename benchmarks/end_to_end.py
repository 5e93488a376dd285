"""The SEED program as a user runs it, next to its floor.

    python -m benchmarks.end_to_end [--quick] [--json=FILE] [--env=NAME ...] [--deep]
        [--num_actors=N] [--envs_per_actor=E]

The floor is what any implementation must compute: the CPU time per agent step of environment,
policy and update, each alone in a loop. With C cores no program makes more than C / floor steps per
second, unless it computes less.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks import harness, live_program, parts
from programs import presets
from seedlib import environments, specs
from seedlib.agents import loading
from seedlib.components import batcher

RUN_COLUMNS = (
    harness.Column("env", "environment"),
    harness.Column("net", "net"),
    harness.Column("actors", "actors"),
    harness.Column("envs", "envs/actor"),
    harness.Column("steps", "steps/s", spread=True),
    harness.Column("floor", "floor steps/s"),
    harness.Column("ratio", "steps/floor", 2, spread=True),
    harness.Column("busy", "cores busy %"),
    harness.Column("trained", "trained/acted", 2),
    harness.Column("lag", "policy lag", 1),
    harness.Column("batch", "inference batch", 1),
    harness.Column("learner_mb", "learner MB"),
    harness.Column("actor_mb", "actor MB"),
)
COST_COLUMNS = (
    harness.Column("env", "environment"),
    harness.Column("net", "net"),
    harness.Column("learner", "learner us", 1, spread=True),
    harness.Column("actor", "actors us", 1, spread=True),
    harness.Column("launcher", "launcher us", 1),
    harness.Column("floor_environment", "floor: environment us", 1),
    harness.Column("floor_policy", "floor: policy us", 1),
    harness.Column("floor_update", "floor: update us", 1),
    harness.Column("all", "all us", 1, spread=True),
    harness.Column("floor", "floor: sum us", 1),
    harness.Column("efficiency", "floor/all", 2, spread=True),
)
STAGE_COLUMNS = (
    harness.Column("env", "environment"),
    harness.Column("net", "net"),
    harness.Column("stage", "stage"),
    harness.Column("us", "us/step", 1, spread=True),
    harness.Column("share", "share of time %", 1, spread=True),
)


class _Task(NamedTuple):
    env: str
    torso: str | None = None

    @property
    def net(self) -> str:
        """What the table says."""
        return self.torso or "preset"


_TASKS = (
    _Task("synthetic:84x84x4", "shallow"),
    _Task("gymnasium:CartPole-v1", "mlp"),
    _Task("atari:Pong", "shallow"),
)


class _Floor(NamedTuple):
    """CPU seconds per agent step."""

    environment: float
    policy: float
    update: float

    @property
    def total(self) -> float:
        """Their sum."""
        return self.environment + self.policy + self.update


class _Shape(NamedTuple):
    actors: int
    envs: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark alone has."""
    parser.add_argument("--env", action="append", help="an environment; repeat (default: three)")
    parser.add_argument("--deep", action="store_true", help="also Pong with the deep net")
    parser.add_argument("--num_actors", type=int, help="default: the program's preset")
    parser.add_argument("--envs_per_actor", type=int, help="default: the program's preset")
    parser.add_argument("--flag", action="append", default=[], help="one more for the program")


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns three tables: the runs, what a step costs, and the stages of a step."""
    arguments = options.arguments
    tasks = [_Task(env) for env in arguments.env or ()]
    if not tasks:
        tasks = list(options.pick(_TASKS, _TASKS, _TASKS[1:2]))
    if arguments.deep:
        tasks.append(_Task("atari:Pong", "deep"))
    runs, costs, stages = [], [], []
    for task in tasks:
        preset = presets.preset(task.env)
        shape = _Shape(
            arguments.num_actors or preset.num_actors,
            arguments.envs_per_actor or preset.envs_per_actor,
        )
        points, megabytes = _observe(task, shape, options)
        floor = _measure_floor(task, shape, options)
        named = {"env": task.env, "net": task.net}
        runs.append({**named, **shape._asdict(), **_run_figures(points, floor, megabytes)})
        costs.append({**named, **_cost_figures(points, floor)})
        stages += [{**named, **stage} for stage in _stage_figures(points)]
    return [
        harness.Table("SEED end to end, training, T = 20", RUN_COLUMNS, runs),
        harness.Table("CPU time per agent step, by process and of the floor", COST_COLUMNS, costs),
        harness.Table("Time of each stage per agent step", STAGE_COLUMNS, stages),
    ]


def _observe(
    task: _Task, shape: _Shape, options: harness.Options
) -> tuple[list[live_program.Point], dict[str, list[float]]]:
    """Runs the program; returns points between which it was in its steady state, and memory."""
    warm_up, window = options.pick(5.0, 2.0, 0.0), options.pick(5.0, 4.0, 1.0)
    windows = options.pick(5, 3, 1)
    with live_program.running(
        f"--env={task.env}",
        f"--num_actors={shape.actors}",
        f"--envs_per_actor={shape.envs}",
        *([f"--agent_option=torso={task.torso}"] if task.torso else []),
        *options.arguments.flag,
    ) as program:
        program.wait_for_update()
        points = [program.wait(warm_up)]
        points += [program.wait(window) for _ in range(windows)]
        return points, program.megabytes()


def _measure_floor(task: _Task, shape: _Shape, options: harness.Options) -> _Floor:
    """Measures environment, policy and update alone, as the program has them."""
    seconds = options.pick(1.5, 1.0, 0.1)
    sample = environments.load(task.env)(seed=0)
    spec = specs.make_environment_spec(sample)
    sample.close()
    agent_options = dict(presets.preset(task.env).agent.get("vtrace", {}))
    if task.torso:
        agent_options["torso"] = task.torso
    case = parts.Case(loading.AgentFactory("vtrace", spec, agent_options)(), spec)
    agent = case.agent
    unrolls = parts.make_unrolls(case, agent.batch_size)
    sizes = batcher.padded_sizes(shape.envs, shape.actors)
    stepping = parts.environment_alone(task.env, seconds, 3)
    policies = harness.alternate(
        [parts.bare_policy(case, rows) for rows in sizes], seconds / len(sizes), 3
    )
    (updating,) = harness.alternate([parts.bare_update(case, unrolls)], seconds, 3)
    return _Floor(
        environment=_cpu_per(stepping, 1),
        # The cheapest of the batch sizes that the program may use.
        policy=min(_cpu_per(runs, rows) for runs, rows in zip(policies, sizes, strict=True)),
        update=_cpu_per(updating, agent.batch_size * agent.unroll.length),
    )


def _cpu_per(runs: Sequence[tuple[int, harness.Cost]], steps: int) -> float:
    return harness.spread(cost.cpu_seconds / (count * steps) for count, cost in runs).median


def _windows(
    points: Sequence[live_program.Point],
) -> list[tuple[live_program.Point, live_program.Point, float, float]]:
    """Returns start, end, seconds and agent steps of each stretch."""
    return [
        (
            start,
            end,
            end.since(start, "wall_seconds"),
            max(1.0, end.since(start, "agent_steps")),
        )
        for start, end in itertools.pairwise(points)
    ]


def _run_figures(
    points: Sequence[live_program.Point], floor: _Floor, megabytes: dict[str, list[float]]
) -> dict[str, Any]:
    windows = _windows(points)
    steps = harness.spread(steps / seconds for _, _, seconds, steps in windows)
    most = harness.cores() / floor.total
    first, last = points[0], points[-1]
    batches = last.since(first, "inference_batches")
    return {
        "steps": steps,
        "floor": most,
        "ratio": harness.Spread(*(value / most for value in steps)),
        "busy": harness.spread(
            100 * _used(start, end) / (seconds * harness.cores())
            for start, end, seconds, _ in windows
        ),
        "trained": last.since(first, "transitions_trained")
        / max(1.0, last.since(first, "agent_steps")),
        "lag": last.policy_lag_since(first),
        "batch": last.since(first, "inference_rows") / batches if batches else None,
        "learner_mb": max(megabytes.get("learner", [0.0])),
        "actor_mb": max(megabytes.get("actor", [0.0])),
    }


def _used(start: live_program.Point, end: live_program.Point) -> float:
    return sum(end.cpu_seconds.values()) - sum(start.cpu_seconds.values())


def _cost_figures(points: Sequence[live_program.Point], floor: _Floor) -> dict[str, Any]:
    figures: dict[str, Any] = {
        kind: harness.spread(
            (end.cpu_seconds.get(kind, 0.0) - start.cpu_seconds.get(kind, 0.0)) / steps * 1e6
            for start, end, _, steps in _windows(points)
        )
        for kind in ("learner", "actor", live_program.LAUNCHER)
    }
    for part in _Floor._fields:
        figures[f"floor_{part}"] = getattr(floor, part) * 1e6
    total = harness.spread(_used(start, end) / steps for start, end, _, steps in _windows(points))
    return {
        **figures,
        "all": harness.Spread(*(value * 1e6 for value in total)),
        "floor": floor.total * 1e6,
        "efficiency": harness.spread(floor.total / value for value in total),
    }


def _stage_figures(points: Sequence[live_program.Point]) -> list[dict[str, Any]]:
    """Returns a row for each figure of the program that counts the seconds of a stage."""
    stages = [
        name for name in points[-1].figures if name.endswith("_seconds") and name != "wall_seconds"
    ]
    rows = []
    for name in stages:
        grown = [
            (end.since(start, name), seconds, steps)
            for start, end, seconds, steps in _windows(points)
        ]
        rows.append(
            {
                "stage": name.removesuffix("_seconds").replace("_", " "),
                "us": harness.spread(spent / steps * 1e6 for spent, _, steps in grown),
                "share": harness.spread(100 * spent / seconds for spent, seconds, _ in grown),
            }
        )
    return rows


if __name__ == "__main__":
    harness.main("end_to_end", "Measure the SEED program end to end.", measure, add_arguments)
