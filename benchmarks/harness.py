"""What every benchmark shares: command line, clocks, repeated runs, tables and JSON.

This module imports neither JAX nor TensorFlow, so that the benchmarks of what runs without them
measure it without them.
"""

import argparse
import dataclasses
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from seedlib.components import configs

SIZES = ("full", "quick", "smoke")
"""How long a benchmark measures: to be quoted, to look at, to see that it runs at all."""

_SIMD = ("sse4_2", "avx", "avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "asimd", "sve")


class Spread(NamedTuple):
    """A figure of several runs.

    Attributes:
      median: of the runs.
      minimum: of the runs.
      maximum: of the runs.
    """

    median: float
    minimum: float
    maximum: float


def spread(values: Iterable[float]) -> Spread:
    """Returns median, minimum and maximum; a mean would follow one run that was disturbed."""
    values = list(values)
    return Spread(statistics.median(values), min(values), max(values))


class Cost(NamedTuple):
    """What a piece of work took.

    Attributes:
      seconds: wall time.
      cpu_seconds: user and system time of all threads of this process, the library's own included.
    """

    seconds: float
    cpu_seconds: float


def cost_of(work: Callable[[], Any]) -> Cost:
    """Returns what one call of `work` took."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def repeat(work: Callable[[], Any], seconds: float, at_least: int = 1) -> tuple[int, Cost]:
    """Calls `work` for about `seconds`, and `at_least` so often.

    Returns:
      How often it was called, and what all calls took together.
    """
    cpu, wall = time.process_time(), time.perf_counter()
    calls = 0
    while calls < at_least or time.perf_counter() - wall < seconds:
        work()
        calls += 1
    return calls, Cost(time.perf_counter() - wall, time.process_time() - cpu)


def alternate(
    works: Sequence[Callable[[], Any]], seconds: float, runs: int
) -> list[list[tuple[int, Cost]]]:
    """Repeats several works in turn, then all again, so that each sees the same disturbances.

    Returns:
      For each work, what `repeat` returned in each run.
    """
    rounds = [[repeat(work, seconds) for work in works] for _ in range(runs)]
    return [list(of_one) for of_one in zip(*rounds, strict=True)]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      key: of the row's entry.
      heading: printed above; the documentation explains it under this name.
      digits: after the decimal point.
      spread: whether minimum and maximum are printed beside the median.
    """

    key: str
    heading: str
    digits: int = 0
    spread: bool = False


class Table(NamedTuple):
    """Figures to print.

    Attributes:
      title: a few words.
      columns: what each row has.
      rows: text, numbers, `Spread`s or None by key of the column.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Options:
    """How a benchmark was called.

    Attributes:
      size: one of `SIZES`.
      json: file for the figures, or None.
      runs: repetitions of each measurement.
      arguments: the benchmark's own arguments.
    """

    size: str
    json: str | None
    runs: int
    arguments: argparse.Namespace

    def pick(self, full: Any, quick: Any, smoke: Any) -> Any:
        """Returns the value for the size of this run."""
        return dict(zip(SIZES, (full, quick, smoke), strict=True))[self.size]


def add_size(parser: argparse.ArgumentParser) -> None:
    """Adds `--quick` and `--smoke`."""
    sizes = parser.add_mutually_exclusive_group()
    sizes.set_defaults(size="full")
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick")
    sizes.add_argument("--smoke", dest="size", action="store_const", const="smoke")


def main(
    name: str,
    description: str,
    measure: Callable[[Options], Sequence[Table]],
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """Parses the command line, measures, prints the tables and writes the JSON.

    Args:
      name: the benchmark's.
      description: for `--help`.
      measure: makes the tables.
      add_arguments: adds the benchmark's own arguments.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    add_size(parser)
    parser.add_argument("--runs", type=int, help="repetitions (default 3; 1 with --quick)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    add_arguments(parser)
    arguments = parser.parse_args()
    runs = arguments.runs or (3 if arguments.size == "full" else 1)
    # As the program's learner process has it. XLA reads this at its first use, not at its import.
    os.environ["XLA_FLAGS"] = configs.xla_flags()
    watch = _Watch()
    tables = measure(Options(arguments.size, arguments.json, runs, arguments))
    report = {
        "benchmark": name,
        "size": arguments.size,
        "runs": runs,
        "machine": machine(),
        "seconds": round(watch.seconds(), 1),
        "others": round(watch.others(), 3),
        "tables": [table_to_json(table) for table in tables],
    }
    for table in report["tables"]:
        print(f"\n{table['title']}\n{render(table)}")
    print(f"\n{describe_run(report)}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
            file.write("\n")


class _Watch:
    """Knows how much of the machine others used, which says whether figures can be trusted."""

    def __init__(self) -> None:
        self._wall, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()

    def seconds(self) -> float:
        return time.monotonic() - self._wall

    def others(self) -> float:
        """Returns the share of all cores' time that neither this process nor its children took."""
        others = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return max(0.0, others / (self.seconds() * cores()))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + getattr(times, "steal", 0.0))


def _own_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """Describes the machine by what figures depend on; no names, no dates."""
    flags: set[str] = set()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.lower().startswith(("flags", "features")):
                    flags = set(line.partition(":")[2].split())
                    break
    except OSError:
        flags = set()  # No such file outside of Linux; the rest still says much.
    return {
        "cores": cores(),
        "architecture": platform.machine(),
        "simd": [flag for flag in _SIMD if flag in flags],
        "memory_gb": round(psutil.virtual_memory().total / 1e9),
        "python": platform.python_version(),
    }


def table_to_json(table: Table) -> dict[str, Any]:
    """Returns a table as JSON has it."""
    return {
        "title": table.title,
        "columns": [column._asdict() for column in table.columns],
        "rows": [
            {
                key: value._asdict() if isinstance(value, Spread) else value
                for key, value in row.items()
            }
            for row in table.rows
        ],
    }


def render(table: Mapping[str, Any], markdown: bool = False) -> str:
    """Returns a table, as `table_to_json` gives it, as text with aligned columns."""
    columns = [Column(**column) for column in table["columns"]]
    lines = [[column.heading for column in columns]]
    lines += [[_cell(column, row.get(column.key)) for column in columns] for row in table["rows"]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = [
        [
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    if not markdown:
        return "\n".join("  ".join(line) for line in text)
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [text[0], rule, *text[1:]])


def describe_run(report: Mapping[str, Any]) -> str:
    """Returns a line that says on what and how a report was measured."""
    told = report["machine"]
    runs = report["runs"]
    return (
        f"{told['cores']} cores ({told['architecture']}: {', '.join(told['simd'])}), "
        f"{told['memory_gb']} GB, CPython {told['python']}; "
        f"{report['size']} size, {runs} run{'' if runs == 1 else 's'} of each figure, "
        f"{report['seconds']:.0f} s in all; other processes used "
        f"{100 * report['others']:.0f} % of the cores' time"
    )


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        median = _number(value["median"], column.digits)
        if not column.spread or value["minimum"] == value["maximum"]:
            return median
        low, high = (_number(value[key], column.digits) for key in ("minimum", "maximum"))
        return f"{median} ({low}-{high})"
    return _number(value, column.digits)


def _number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def percentiles(seconds: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Returns the 50th and 99th percentile of latencies, in milliseconds."""
    p50, p99 = np.percentile(np.asarray(seconds) * 1e3, (50, 99))
    return float(p50), float(p99)
