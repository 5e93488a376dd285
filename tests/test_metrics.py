"""Tests of the metrics logger: CSV that grows and resumes, TensorBoard events that can be read."""

import csv
import glob
import pathlib
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest

from seedlib import metrics, run_directory


@pytest.fixture
def directory(tmp_path) -> run_directory.RunDirectory:
    directory = run_directory.RunDirectory(tmp_path / "run")
    directory.prepare({})
    return directory


def rows(directory: run_directory.RunDirectory, label: str = "train") -> list[dict[str, str]]:
    with open(directory.file(f"{label}.csv"), newline="") as file:
        return list(csv.DictReader(file))


def events(directory: run_directory.RunDirectory) -> dict[str, list[tuple[int, float]]]:
    """Returns `(step, value)` of every scalar, read with TensorFlow's own reader."""
    from tensorflow import make_ndarray
    from tensorflow.compat.v1 import train

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(glob.glob(directory.file("tensorboard/*"))):
        for event in train.summary_iterator(path):
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(
                    (event.step, float(make_ndarray(value.tensor)))
                )
    return found


def test_a_row_is_in_the_file_as_soon_as_write_returns(directory):
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    logger.write({"agent_steps": 10, "wall_seconds": 2.5, "loss": np.float32(0.25)})
    assert rows(directory) == [{"agent_steps": "10", "wall_seconds": "2.5", "loss": "0.25"}]
    logger.close()


def test_wall_seconds_is_added_where_a_row_has_none(directory):
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    logger.write({"agent_steps": 10})
    logger.close()
    assert float(rows(directory)[0]["wall_seconds"]) >= 0


def test_a_resumed_run_appends(directory):
    for step in (10, 20):
        logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
        logger.write({"agent_steps": step, "wall_seconds": step / 10})
        logger.close()
    assert [row["agent_steps"] for row in rows(directory)] == ["10", "20"]
    text = pathlib.Path(directory.file("train.csv")).read_text()
    assert text == "agent_steps,wall_seconds\n10,1.0\n20,2.0\n"


def test_new_columns_widen_the_file_and_lose_nothing(directory):
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    logger.write({"agent_steps": 1, "wall_seconds": 0, "a": 5})
    logger.write({"agent_steps": 2, "wall_seconds": 0, "b": 6})
    logger.close()
    resumed = metrics.MetricsLogger(directory, "train", tensorboard=False)
    resumed.write({"c": 7, "wall_seconds": 0, "agent_steps": 3, "a": None})
    resumed.close()
    text = pathlib.Path(directory.file("train.csv")).read_text()
    assert text == "agent_steps,wall_seconds,a,b,c\n1,0,5,,\n2,0,,6,\n3,0,,,7\n"


def test_a_half_row_of_a_crash_is_cut_off(directory):
    path = pathlib.Path(directory.file("train.csv"))
    path.write_text("agent_steps,wall_seconds\n1000,1\n20")
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    logger.write({"agent_steps": 3000, "wall_seconds": 3})
    logger.close()
    assert path.read_text() == "agent_steps,wall_seconds\n1000,1\n3000,3\n"


def test_rows_of_several_threads_are_whole(directory):
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)

    def write(thread: int) -> None:
        for index in range(50):
            # Every thread brings a column of its own, so that widening is raced as well.
            logger.write({"agent_steps": thread * 1000 + index, f"of_{thread}": index})

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    logger.close()
    found = rows(directory)
    assert sorted(int(row["agent_steps"]) for row in found) == [
        thread * 1000 + index for thread in range(4) for index in range(50)
    ]
    for row in found:
        thread, index = divmod(int(row["agent_steps"]), 1000)
        assert row[f"of_{thread}"] == str(index)


def test_events_carry_the_same_figures_also_after_a_resume_and_beyond_32_bits(directory):
    # 2^40 + 1 fits neither 32 bits nor a float32.
    steps = (5, 2**40 + 1)
    for step in steps:
        logger = metrics.MetricsLogger(directory, "train")
        logger.write({"agent_steps": step, "return_mean_100": 1.5, "note": "text", "lag": None})
        logger.close()
    found = events(directory)
    assert found["train/ReturnMean100"] == [(step, 1.5) for step in steps]
    assert set(found) == {"train/ReturnMean100", "train/WallSeconds"}
    assert [row["agent_steps"] for row in rows(directory)] == ["5", "1099511627777"]


def test_rows_leave_nothing_behind_in_memory(directory):
    random = np.random.default_rng(0)
    logger = metrics.MetricsLogger(directory, "train")
    process = psutil.Process()

    def write(count):
        for _ in range(count):
            row = {f"figure_{number}": float(random.random()) for number in range(40)}
            logger.write({"agent_steps": int(random.integers(2**53)), **row})

    write(300)  # What is allocated once is, by then.
    before = process.memory_info().rss
    write(600)
    grown = process.memory_info().rss - before
    logger.close()
    # Figures that TensorFlow keeps cost some 700 bytes each: 17 MB here.
    assert grown < 4e6


@pytest.mark.parametrize("label", ["", "a/b", "../up"])
def test_a_label_that_names_no_file_is_refused(directory, label):
    with pytest.raises(ValueError, match="label must be a plain file name"):
        metrics.MetricsLogger(directory, label, tensorboard=False)


def test_bad_rows_are_refused_and_leave_nothing(directory):
    logger = metrics.MetricsLogger(directory, "train", tensorboard=False)
    with pytest.raises(ValueError, match="a row needs agent_steps"):
        logger.write({"loss": 1.0})
    with pytest.raises(TypeError, match=r"loss: expected one number, got float64 of shape \(2,\)"):
        logger.write({"agent_steps": 1, "loss": np.zeros(2)})
    logger.close()
    logger.close()
    with pytest.raises(ValueError, match="after close"):
        logger.write({"agent_steps": 1})
    assert pathlib.Path(directory.file("train.csv")).read_text() == ""


def test_an_error_of_writing_is_the_callers_and_whole_rows_stay(tmp_path):
    # A process that may write files of at most 100 bytes stands for a disk that is full.
    program = (
        "import resource, sys\n"
        "from seedlib import metrics\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "logger = metrics.CsvLogger(sys.argv[1])\n"
        "try:\n"
        "    for step in range(1000):\n"
        "        logger.write({'agent_steps': step})\n"
        "except OSError as error:\n"
        "    print(step, error.strerror)\n"
    )
    path = tmp_path / "train.csv"
    shown = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    # "agent_steps\n" has 12 bytes, ten rows of 2 have 20, and 22 of 3 fit into the other 68:
    # row 32 is the first that does not fit.
    assert shown.stdout == "32 File too large\n"
    assert path.read_text().splitlines()[:33] == ["agent_steps", *map(str, range(32))]
