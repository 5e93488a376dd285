"""Memory of a running program over minutes: it must be flat.

python -m benchmarks.soak [--minutes=10] [--env=gymnasium:CartPole-v1] [--json=FILE]
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import harness, live_program

COLUMNS = (
    harness.Column("env", "environment"),
    harness.Column("process", "process"),
    harness.Column("minutes", "minutes", 1),
    harness.Column("steps", "agent steps"),
    harness.Column("first_mb", "first MB", 1),
    harness.Column("last_mb", "last MB", 1),
    harness.Column("most_mb", "most MB", 1),
    harness.Column("slope", "MB/minute", 3),
    harness.Column("late_slope", "MB/minute, 2nd half", 3),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this benchmark alone has."""
    parser.add_argument("--minutes", type=float, help="how long (default 10; 1 with --quick)")
    parser.add_argument("--env", default="gymnasium:CartPole-v1", help="environment")
    parser.add_argument("--flag", action="append", default=[], help="one more for the program")


def measure(options: harness.Options) -> Sequence[harness.Table]:
    """Returns one table."""
    arguments = options.arguments
    minutes = arguments.minutes or options.pick(10.0, 1.0, 0.05)
    # Allocators and compilers settle first.
    warm_up = options.pick(60.0, 10.0, 0.0)
    seen: list[tuple[float, float, dict[str, list[float]]]] = []
    with live_program.running(f"--env={arguments.env}", *arguments.flag) as program:
        program.wait_for_update()
        program.wait(warm_up)
        for point in program.points(minutes * 60):
            figures = point.figures
            seen.append((figures["wall_seconds"], figures["agent_steps"], program.megabytes()))
    rows = []
    for kind, processes in seen[-1][2].items():
        for number in range(len(processes)):
            series = [
                (seconds, megabytes[kind][number])
                for seconds, _, megabytes in seen
                if len(megabytes.get(kind, ())) > number
            ]
            rows.append(
                {
                    "env": arguments.env,
                    "process": f"{kind} {number}",
                    "minutes": (seen[-1][0] - seen[0][0]) / 60,
                    "steps": seen[-1][1] - seen[0][1],
                    **_figures(series),
                }
            )
    return [harness.Table("Resident memory of a running program", COLUMNS, rows)]


def _figures(series: Sequence[tuple[float, float]]) -> dict[str, Any]:
    memory = [megabytes for _, megabytes in series]
    return {
        "first_mb": memory[0],
        "last_mb": memory[-1],
        "most_mb": max(memory),
        "slope": _slope(series),
        "late_slope": _slope(series[len(series) // 2 :]),
    }


def _slope(series: Sequence[tuple[float, float]]) -> float | None:
    """Returns the slope of the line of least squares, in MB per minute."""
    if len(series) < 2:
        return None
    seconds, memory = np.array(series).T
    return float(np.polyfit(seconds / 60, memory, 1)[0])


if __name__ == "__main__":
    harness.main("soak", "Measure memory over minutes.", measure, add_arguments)
