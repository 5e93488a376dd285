"""Tests of the report on learning: what is read from finished runs, and what stays in the page."""

import pytest

from benchmarks import learning
from seedlib import metrics, run_directory

PAGE = f"before\n{learning.BEGIN}\n{learning.END}\nafter\n"


def make_run(folder, task, seed, points, reason="num_steps"):
    """A run whose rows are `(agent_steps, episodes, return_mean_100)`."""
    directory = run_directory.RunDirectory(folder / task / f"seed-{seed}")
    directory.prepare({})
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    for steps, episodes, mean in points:
        logger.write({"agent_steps": steps, "episodes": episodes, "return_mean_100": mean})
    logger.close()
    steps, _, mean = points[-1]
    directory.write_summary(
        {
            "agent_steps": steps,
            "return_mean_100": mean,
            "wall_seconds": 10.0,
            "steps_per_second": steps / 10.0,
            "exit_reason": reason,
        }
    )


def rows(page):
    """The table's rows by task and seed."""
    table = page.split(learning.BEGIN)[1].split(learning.END)[0].strip().splitlines()[2:]
    return {tuple(line.strip("| ").split(" | ")[:2]): line for line in table}


@pytest.fixture
def docs(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "learning.md").write_text(PAGE)
    return tmp_path / "docs"


def test_the_threshold_is_reached_by_a_hundred_episodes_not_by_two_lucky_ones(tmp_path, docs):
    points = [
        (1000, 2, 1.0),
        (2000, 99, 0.96),
        (3000, 100, 0.94),
        (4000, 150, 0.95),
        (9000, 500, 1),
    ]
    make_run(tmp_path / "runs", "catch", 0, points)
    for _ in range(2):  # Filling twice is filling once.
        (result,) = learning.report(tmp_path / "runs", docs)
    assert result.threshold_steps == 4000
    page = (docs / "learning.md").read_text()
    assert rows(page) == {("catch", "0"): "| catch | 0 | 0.95 | 4,000 | 1.00 | 9,000 | 10 | 900 |"}
    assert page.startswith("before\n") and page.endswith("after\n")


def test_a_run_that_was_cut_off_is_no_result(tmp_path):
    make_run(tmp_path, "catch", 0, [(1000, 200, 1.0)], reason="stopped")
    assert learning.find_results(tmp_path) == []


def test_rows_of_other_runs_stay_in_the_table_and_those_of_the_same_are_replaced(tmp_path, docs):
    for seed in (0, 10, 2):
        make_run(tmp_path / "one", "cartpole", seed, [(1000, 200, 480.0)])
    learning.report(tmp_path / "one", docs)
    make_run(tmp_path / "two", "catch", 0, [(1000, 200, 0.5)])
    make_run(tmp_path / "two", "cartpole", 2, [(3000, 200, 500.0)])
    learning.report(tmp_path / "two", docs)
    table = rows((docs / "learning.md").read_text())
    assert list(table) == [
        ("catch", "0"),
        ("cartpole", "0"),
        ("cartpole", "2"),
        ("cartpole", "10"),
    ]
    assert "480.00" in table["cartpole", "0"]
    assert "500.00" in table["cartpole", "2"]


def test_graphs_of_one_task_are_in_one_picture(tmp_path, docs):
    for task in ("catch", "catch_impala", "catch_inference_pool"):
        make_run(tmp_path / "runs", task, 0, [(0, 0, 0.0), (1000, 200, 0.9)])
    learning.report(tmp_path / "runs", docs)
    assert sorted(path.name for path in (docs / "images").iterdir()) == [
        "learning_catch.png",
        "learning_catch_graphs.png",
    ]
    assert learning.TASKS["catch_impala"].command(0, "runs")[0] == "programs.impala"
