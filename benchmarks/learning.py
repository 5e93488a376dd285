"""Learning curves: runs each task with each seed, draws them, and fills the table of the docs.

python -m benchmarks.learning --tasks=catch,cartpole,memory,memory_no_lstm --seeds=0,1,2 \
    --out=runs/learning

Runs follow one another, since they would share the machine's cores. One that reached its step limit
in `--out` is not run again, and one that was cut off goes on from its last checkpoint, so the same
command can be given until all is done. `--report_only` runs nothing.
"""

import argparse
import csv
import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence

from seedlib import curve, run_directory

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_END_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
      env: the environment's name.
      num_steps: agent steps of a run.
      threshold: the return that counts as learned; None for none.
      arguments: further flags.
      program: the graph.
    """

    env: str
    num_steps: int
    threshold: float | None = None
    arguments: tuple[str, ...] = ()
    program: str = "seed"

    def command(self, seed: int, logdir: str, num_steps: int | None = None) -> list[str]:
        """Returns the arguments of one run, from the program on."""
        return [
            f"programs.{self.program}",
            f"--env={self.env}",
            *self.arguments,
            f"--num_steps={num_steps or self.num_steps}",
            f"--seed={seed}",
            f"--logdir={logdir}",
        ]


TASKS = {
    "catch": Task("catch", 500_000, 0.95),
    "cartpole": Task("gymnasium:CartPole-v1", 1_500_000, 475.0),
    "memory": Task("bsuite:memory_len/8", 500_000, 0.9),
    "memory_no_lstm": Task("bsuite:memory_len/8", 500_000, 0.9, ("--agent_option=lstm_size=null",)),
    "pong": Task("atari:Pong", 6_000_000),
}
# The same in other graphs; `catch_impala`, for example.
for _program in ("impala", "inference_pool"):
    for _name in ("catch", "cartpole"):
        TASKS[f"{_name}_{_program}"] = dataclasses.replace(TASKS[_name], program=_program)


@dataclasses.dataclass(frozen=True)
class Result:
    """One finished run.

    Attributes:
      task: its name.
      seed: its seed.
      threshold_steps: agent steps after which the mean return over the last 100 episodes first
        reached the task's threshold, with at least 100 episodes behind it; None for never.
      summary: the run's summary.
      directory: where it lies.
    """

    task: str
    seed: int
    threshold_steps: int | None
    summary: dict[str, float]
    directory: str


def steps_to_threshold(path: str | os.PathLike[str], threshold: float) -> int | None:
    """Returns the agent steps of the first row of a `train.csv` that reaches `threshold`.

    Rows of fewer than 100 episodes are passed over: the mean of two lucky ones proves nothing.
    """
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            mean = float(row["return_mean_100"] or math.nan)
            if mean >= threshold and int(float(row["episodes"])) >= 100:
                return int(float(row["agent_steps"]))
    return None


def find_results(out: pathlib.Path, tasks: Sequence[str] = tuple(TASKS)) -> list[Result]:
    """Returns every finished run below `out`, by task and seed."""
    results = []
    for name in tasks:
        for folder in sorted(out.glob(f"{name}/seed-*"), key=lambda path: _seed_of(path.name)):
            summary = run_directory.RunDirectory(folder).read_summary()
            if summary is None or summary["exit_reason"] != "num_steps":
                continue
            threshold = TASKS[name].threshold
            reached = None
            if threshold is not None:
                reached = steps_to_threshold(folder / "train.csv", threshold)
            results.append(Result(name, _seed_of(folder.name), reached, summary, str(folder)))
    return results


def _seed_of(name: str) -> int:
    return int(name.removeprefix("seed-"))


def format_table(results: Sequence[Result], before: str = "") -> str:
    """Returns the results as a Markdown table.

    Args:
      results: its rows.
      before: a table whose rows of other runs are kept.
    """
    head = [
        "| task | seed | threshold | steps to threshold | final return_mean_100 | agent_steps "
        "| wall seconds | steps/s |",
        "| --- | --: | --: | --: | --: | --: | --: | --: |",
    ]
    rows = {}
    for line in before.splitlines():
        name, _, rest = line.removeprefix("| ").partition(" | ")
        if name in TASKS:
            rows[name, int(rest.partition(" | ")[0])] = line
    for result in results:
        task, summary = TASKS[result.task], result.summary
        threshold = "-" if task.threshold is None else f"{task.threshold:g}"
        reached = "-" if result.threshold_steps is None else f"{result.threshold_steps:,}"
        mean = summary["return_mean_100"]
        cells = [
            result.task,
            str(result.seed),
            threshold,
            reached,
            "-" if mean is None else f"{mean:.2f}",
            f"{summary['agent_steps']:,}",
            f"{summary['wall_seconds']:,.0f}",
            f"{summary['steps_per_second']:,.0f}",
        ]
        rows[result.task, result.seed] = f"| {' | '.join(cells)} |"
    order = list(TASKS)
    return "\n".join(
        [*head, *(rows[key] for key in sorted(rows, key=lambda key: (order.index(key[0]), key[1])))]
    )


def fill_page(text: str, results: Sequence[Result]) -> str:
    """Returns the page with the results in the table between its markers; other rows stay.

    Raises:
      ValueError: the page has not exactly one pair of markers.
    """
    pattern = re.compile(f"({re.escape(BEGIN)}\n)(.*?)({re.escape(END)})", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"expected one {BEGIN!r} and one {END!r} after it")
    return pattern.sub(
        lambda match: f"{match[1]}{format_table(results, before=match[2])}\n{match[3]}", text
    )


def draw(results: Sequence[Result], docs: pathlib.Path) -> None:
    """Draws a picture of each task of SEED, and one of all graphs where others ran it too."""
    for name, task in TASKS.items():
        alike = [result for result in results if result.task == name]
        if alike and task.program == "seed":
            _draw(
                alike, docs / "images" / f"learning_{name}.png", [f"seed {r.seed}" for r in alike]
            )
        graphs = {f"{name}_{other.program}" for other in TASKS.values()} | {name}
        everywhere = [result for result in results if result.task in graphs]
        programs = [TASKS[result.task].program for result in everywhere]
        if task.program == "seed" and len(set(programs)) > 1:
            _draw(everywhere, docs / "images" / f"learning_{name}_graphs.png", programs)


def _draw(results: Sequence[Result], picture: pathlib.Path, names: Sequence[str]) -> None:
    task = TASKS[results[0].task]
    curve.draw_curve(
        [result.directory for result in results],
        picture,
        names=names,
        threshold=task.threshold,
        title=task.env,
    )
    print(f"curve: {picture}")


def report(out: pathlib.Path, docs: pathlib.Path) -> list[Result]:
    """Draws pictures and fills the table, from every finished run below `out`."""
    results = find_results(out)
    draw(results, docs)
    page = docs / "learning.md"
    text = fill_page(page.read_text(encoding="utf-8"), results)
    run_directory.write_atomically(str(page), text)
    return results


def run(task: Task, seed: int, folder: pathlib.Path, num_steps: int | None) -> int:
    """Runs a task to its end; returns the exit code. Ctrl-C ends the run in order."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *task.command(seed, str(folder), num_steps)]
    print("$ python", *command[1:], flush=True)
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except BaseException:
        # A terminal's Ctrl-C has reached the run too; its checkpoint takes a moment.
        process.terminate()
        process.wait(_END_SECONDS)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning",
        description=__doc__.splitlines()[0],
        epilog=f"Tasks: {', '.join(TASKS)}.",
    )
    parser.add_argument("--tasks", default="catch,cartpole,memory,memory_no_lstm")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", default="runs/learning", help="folder of the runs")
    parser.add_argument("--num_steps", type=int, help="in place of each task's own")
    parser.add_argument("--docs", default=str(ROOT / "docs"), help="folder of learning.md")
    parser.add_argument("--report_only", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    names = options.tasks.split(",")
    for name in names:
        if name not in TASKS:
            parser.error(f"unknown task {name!r}; possible are {', '.join(TASKS)}")
    if not re.fullmatch(r"\d+(,\d+)*", options.seeds):
        parser.error(f"seeds must be numbers with commas between, got {options.seeds!r}")
    out = pathlib.Path(options.out).absolute()
    failed = []
    if not options.report_only:
        done = {
            (result.task, result.seed)
            for result in find_results(out)
            if result.summary["agent_steps"] >= (options.num_steps or TASKS[result.task].num_steps)
        }
        for name in names:
            for seed in map(int, options.seeds.split(",")):
                folder = out / name / f"seed-{seed}"
                if (name, seed) in done:
                    print(f"{folder}: complete")
                elif run(TASKS[name], seed, folder, options.num_steps):
                    failed.append(str(folder))
    print(format_table(report(out, pathlib.Path(options.docs))))
    for folder in failed:
        print(f"failed: {folder}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
