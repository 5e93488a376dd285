"""Tests of the learning-curve picture."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from seedlib import curve, metrics, run_directory


def make_run(path: pathlib.Path, points: list[tuple[int, float | None]]) -> str:
    directory = run_directory.RunDirectory(path)
    directory.prepare({})
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    for step, value in points:
        logger.write({"agent_steps": step, "return_mean_100": value})
    logger.close()
    return directory.path


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def coloured(image: np.ndarray) -> np.ndarray:
    """Returns which pixels have a colour; axes, text, grid and level line are grey."""
    return image.max(axis=-1) - image.min(axis=-1) > 60


def test_the_picture_has_the_size_asked_for_and_a_rising_line(tmp_path):
    run = make_run(tmp_path / "run", [(step, step / 100) for step in range(0, 1000, 10)])
    path = curve.draw_curve([run], tmp_path / "deep" / "curve.png", size=(640, 400), title="catch")
    image = pixels(path)
    assert image.shape == (400, 640, 3)
    line = coloured(image)
    assert line.sum() > 500
    rows, columns = np.nonzero(line)
    # Row 0 is at the top, so a return that rises with the steps is a falling row number.
    assert np.corrcoef(rows, columns)[0, 1] < -0.99
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["curve.png"]


def test_curves_of_one_name_share_a_colour(tmp_path):
    runs = [
        make_run(tmp_path / f"run{k}", [(0, 0.0), (500, 10.0 * k), (1000, 20.0 * k)])
        for k in (1, 2, 3)
    ]
    path = curve.draw_curve(runs, tmp_path / "named.png", names=["seed", "seed", "impala"])
    image = pixels(path)
    _, counts = np.unique(image[coloured(image)], axis=0, return_counts=True)
    assert sum(count > 100 for count in counts) == 2
    with pytest.raises(ValueError, match="2 names for 3 curves"):
        curve.draw_curve(runs, tmp_path / "named.png", names=["a", "b"])


def test_each_run_is_a_line_of_its_own_colour_and_the_threshold_is_drawn(tmp_path):
    runs = [
        make_run(tmp_path / f"seed{k}", [(0, 0.0), (500, 10.0 * k), (1000, 20.0 * k)])
        for k in (1, 2, 3)
    ]
    one = pixels(curve.draw_curve(runs[:1], tmp_path / "one.png"))
    three = pixels(curve.draw_curve(runs, tmp_path / "three.png"))
    level = pixels(curve.draw_curve(runs, tmp_path / "level.png", threshold=40.0))

    def colours(image: np.ndarray) -> set[tuple[int, ...]]:
        values, counts = np.unique(image[coloured(image)], axis=0, return_counts=True)
        return {tuple(value) for value, count in zip(values, counts, strict=True) if count > 100}

    assert len(colours(one)) == 1
    assert len(colours(three)) == 3
    # A dashed line over the whole width: the row that changed most is mostly line.
    changed = (np.abs(three - level).sum(axis=-1) > 60).sum(axis=1)
    assert changed.max() > 0.4 * three.shape[1]


def test_steps_of_a_part_given_up_are_left_out(tmp_path):
    # The run reached step 30, and went on from its checkpoint at step 15.
    run = make_run(tmp_path / "run", [(10, 1.0), (20, 9.0), (30, 9.0), (20, 2.0), (30, 3.0)])
    steps, values = curve.read_curve(f"{run}/train.csv")
    # 20 and 30 were reached twice, and the second time counts.
    np.testing.assert_array_equal(steps, [10, 20, 30])
    np.testing.assert_array_equal(values, [1.0, 2.0, 3.0])


def test_rows_without_a_return_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", [(10, None), (20, float("nan")), (30, 3.0)])
    steps, values = curve.read_curve(f"{run}/train.csv")
    np.testing.assert_array_equal(steps, [30])
    np.testing.assert_array_equal(values, [3.0])


def test_a_run_without_any_episode_is_drawn_all_the_same(tmp_path):
    run = make_run(tmp_path / "run", [(10, None)])
    image = pixels(curve.draw_curve([run], tmp_path / "curve.png"))
    assert (image < 128).any()


def test_what_is_missing_is_named(tmp_path):
    run = make_run(tmp_path / "run", [(10, 1.0)])
    with pytest.raises(ValueError, match="no column lag, only"):
        curve.draw_curve([run], tmp_path / "curve.png", y="lag")
    with pytest.raises(FileNotFoundError, match=r"eval\.csv: does not exist.*train\.csv"):
        curve.draw_curve([run], tmp_path / "curve.png", label="eval")
    with pytest.raises(FileNotFoundError, match="no such run directory or CSV"):
        curve.draw_curve([tmp_path / "none"], tmp_path / "curve.png")
    with pytest.raises(ValueError, match="at least one run"):
        curve.draw_curve([], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_it_is_a_command(tmp_path):
    run = make_run(tmp_path / "run", [(0, 0.0), (10, 1.0)])
    out = tmp_path / "curve.png"
    command = [sys.executable, "-m", "seedlib.curve", run, f"--out={out}", "--threshold=0.5"]
    shown = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert shown.stdout == f"{out}\n"
    assert coloured(pixels(str(out))).sum() > 100
    wrong = subprocess.run(
        [*command, "--label=none"], check=False, timeout=120, capture_output=True, text=True
    )
    assert wrong.returncode == 1
    assert len(wrong.stderr.splitlines()) == 1
