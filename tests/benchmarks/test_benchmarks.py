"""Every benchmark runs, prints its tables, and leaves figures that fit into the documentation."""

import importlib
import json
import math
import pathlib
import subprocess
import sys

import pytest

from benchmarks import graphs, harness, live_program, report, run_all

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / report.DOCUMENT).read_text(encoding="utf-8")
MODULES = [*run_all.BENCHMARKS, run_all.SOAK]


def run(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        check=False,
        timeout=900,  # Some start several programs; on a busy machine each takes a minute.
        capture_output=True,
        text=True,
    )


def figures_of(report_json: dict) -> list[float]:
    """Returns all numbers of a report's rows."""
    found = []
    for table in report_json["tables"]:
        for row in table["rows"]:
            for value in row.values():
                if isinstance(value, dict):
                    found += value.values()
                elif isinstance(value, int | float):
                    found.append(value)
    return found


# All but the soak, which starts and watches the program as `end_to_end` does; `graphs` does so
# three times over.
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(module, marks=[pytest.mark.slow] if module.endswith("graphs") else [])
        for module in run_all.BENCHMARKS
    ],
)
def test_a_benchmark_prints_its_tables_and_its_figures_fit_into_the_documentation(module, tmp_path):
    name = module.rpartition(".")[2]
    target = tmp_path / f"{name}.json"
    result = run(module, "--smoke", f"--json={target}")
    assert result.returncode == 0, result.stderr[-5000:]

    measured = json.loads(target.read_text())
    assert measured["benchmark"] == name
    assert measured["size"] == "smoke"
    for table in measured["tables"]:
        assert table["title"] in result.stdout
        assert table["rows"]
        assert harness.render(table) in result.stdout
        for column in table["columns"]:
            assert any(row.get(column["key"]) is not None for row in table["rows"]), column
    figures = figures_of(measured)
    assert len(figures) > 3
    assert all(math.isfinite(figure) for figure in figures)

    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT, encoding="utf-8")
    assert report.update(tmp_path, document) == [name]
    filled = document.read_text(encoding="utf-8")
    assert report.to_markdown(measured) in filled
    # Filling it again changes nothing, and nothing outside of the markers was touched.
    assert report.fill(filled, {name: measured}) == filled
    outside = lambda text: report._SECTION.sub("", text)
    assert outside(filled) == outside(DOCUMENT)


@pytest.mark.parametrize("module", MODULES)
def test_the_documentation_names_each_benchmark_and_explains_each_of_its_columns(module):
    name = module.rpartition(".")[2]
    before, marker, _ = DOCUMENT.partition(f"<!-- results: {name} -->")
    assert marker, f"no place for the results of {name}"
    section = before[before.rindex("\n## ") :]
    assert f"python -m {module}" in section
    loaded = importlib.import_module(module)
    lists = [value for key, value in vars(loaded).items() if key.endswith("COLUMNS")]
    assert lists
    for columns in lists:
        for column in columns:
            assert f"`{column.heading}`" in section, column.heading


def test_a_report_without_a_place_in_the_document_is_refused():
    with pytest.raises(ValueError, match="no place for the results of other"):
        report.fill("<!-- results: one -->\n<!-- end of results -->\n", {"other": {}})


def test_a_spread_is_median_minimum_and_maximum_of_its_runs():
    # Sorted: 1, 2, 9; the median is the middle one. Of four, the mean of the middle two.
    assert harness.spread([9, 1, 2]) == (2, 1, 9)
    assert harness.spread([4, 1, 3, 2]) == (2.5, 1, 4)


def test_a_table_shows_minimum_and_maximum_only_where_runs_differ():
    columns = [harness.Column("name", "name"), harness.Column("value", "us", 1, spread=True)]
    rows = [
        {"name": "several", "value": harness.Spread(1234.5, 1000, 2000)},
        {"name": "one", "value": harness.Spread(7, 7, 7)},
        {"name": "none", "value": None},
    ]
    table = harness.table_to_json(harness.Table("title", columns, rows))
    assert harness.render(table).splitlines() == [
        "name                            us",
        "several  1,234.5 (1,000.0-2,000.0)",
        "one                            7.0",
        "none                             -",
    ]
    assert harness.render(table, markdown=True).splitlines()[:3] == [
        "| name    |                        us |",
        "| ------- | ------------------------: |",
        "| several | 1,234.5 (1,000.0-2,000.0) |",
    ]


def test_the_slope_of_memory_is_per_minute_and_of_its_second_half_apart():
    soak = importlib.import_module(run_all.SOAK)
    # 2 MB in the first minute, then flat for two: the points are 30 s apart.
    series = [(0, 100.0), (30, 101.0), (60, 102.0), (90, 102.0), (120, 102.0), (150, 102.0)]
    figures = soak._figures([*series, (180, 102.0)])
    assert (figures["first_mb"], figures["last_mb"], figures["most_mb"]) == (100.0, 102.0, 102.0)
    assert figures["late_slope"] == pytest.approx(0.0, abs=1e-9)
    # Least squares over minutes 0, 0.5, ..., 3 with mean 1.5: the sum of (t - 1.5) * y is
    # -150 - 101 - 51 + 0 + 51 + 102 + 153 = 4, of (t - 1.5)^2 it is 7.
    assert figures["slope"] == pytest.approx(4 / 7)
    assert soak._slope(series[:1]) is None


def make_point(steps, seconds, updates, lag, cpu, observations, loopback):
    return live_program.Point(
        figures={
            "agent_steps": steps,
            "wall_seconds": seconds,
            "learner_updates": updates,
            "policy_lag_mean": lag,
            "policy_lag_max": 9,
            "network_bytes_observations": observations,
            "network_bytes_parameters": 0,
            "network_bytes_unrolls": 5 * steps,
        },
        cpu_seconds=cpu,
        loopback_bytes=loopback,
    )


def test_figures_of_a_graph_are_of_the_time_between_its_points():
    first = make_point(1000, 3.0, 10, 2.0, {"learner": 7.0, "actor": 1.0}, 100, 1_000_000)
    last = make_point(3000, 7.0, 30, 4.0, {"learner": 11.0, "actor": 2.0}, 6100, 1_022_000)
    figures = graphs._figures(first, last, {"learner": [300.0], "actor": [40.0, 60.0]})
    assert figures["steps"] == 500
    # The lags sum up to 10 * 2 before and to 30 * 4 after: 100 more in 20 updates.
    assert (figures["lag"], figures["lag_max"]) == (5.0, 9)
    assert (figures["cpu_learner"], figures["cpu_actor"]) == (2.0, 0.5)
    assert (figures["cpu"], figures["cpu_inference"]) == (2.5, None)
    assert (figures["bytes_observations"], figures["bytes_parameters"]) == (3, 0)
    assert (figures["bytes_unrolls"], figures["bytes"], figures["loopback"]) == (5, 8, 11)
    assert (figures["mb_learner"], figures["mb_actor"], figures["mb"]) == (300, 60, 400)
    assert figures["mb_inference"] is None


def test_ratios_of_a_graph_are_of_each_turn():
    same = {"cpu": 1.0, "bytes": 0.0, "mb": 1.0}
    turns = [
        {"seed": {"steps": seed, **same}, "impala": {"steps": other, **same}}
        for seed, other in ((100.0, 50.0), (10.0, 20.0), (40.0, 40.0))
    ]
    row = graphs._row(turns, "impala")
    assert row["steps"] == (40, 20, 50)
    assert row["steps_ratio"] == (1, 0.5, 2)
    # Without bytes of SEED there is nothing to compare with.
    assert row["bytes_ratio"] is None


def test_a_live_program_of_another_graph_is_watched_like_any():
    flags = ("--env=catch", "--num_actors=1", "--envs_per_actor=4")
    with live_program.running(*flags, program="programs.impala") as program:
        first = program.wait_for(lambda figures: figures.get("network_bytes_unrolls", 0) > 0)
        steps = first.figures["agent_steps"]
        last = program.wait_for(lambda figures: figures["agent_steps"] > steps)
        assert last.loopback_bytes > first.loopback_bytes
        resident, proportional = program.megabytes(), program.megabytes(proportional=True)
    assert last.figures["network_bytes_observations"] == 0
    assert last.figures["network_bytes_parameters"] > 0
    assert resident.keys() == proportional.keys() == {"launcher", "learner", "actor"}
    for kind, values in resident.items():
        assert 0 < sum(proportional[kind]) <= sum(values)


def test_run_all_refuses_an_unknown_benchmark_in_one_line():
    result = run("benchmarks.run_all", "--only=nothing")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].endswith("unknown benchmark benchmarks.nothing")
