"""Tests of what a run leaves in its directory: whole files, one configuration, ordered failures."""

import dataclasses
import enum
import json
import math
import os
import pathlib
import pickle
import stat
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from seedlib import run_directory


@pytest.fixture
def directory(tmp_path) -> run_directory.RunDirectory:
    return run_directory.RunDirectory(tmp_path / "run")


def test_prepare_writes_the_configuration_and_says_that_the_run_is_fresh(directory):
    assert directory.prepare({"environment": "catch", "agent": {"gamma": 0.99}}) is False
    stored = json.loads(pathlib.Path(directory.file("config.json")).read_text())
    assert stored == {"environment": "catch", "agent": {"gamma": 0.99}}


def test_the_same_configuration_is_a_resume_and_changes_nothing(directory):
    directory.prepare({"seed": 1, "layers": (64, 64)})
    before = pathlib.Path(directory.file("config.json")).stat()
    assert directory.prepare({"seed": 1, "layers": (64, 64)}) is True
    after = pathlib.Path(directory.file("config.json")).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert os.listdir(directory.path) == ["config.json"]


def test_another_configuration_is_refused_naming_the_first_field_and_both_values(directory):
    directory.prepare({"seed": 1, "agent": {"gamma": 0.99, "layers": [64, 64]}, "b": 1})
    before = pathlib.Path(directory.file("config.json")).read_bytes()
    with pytest.raises(run_directory.ConfigurationMismatch) as caught:
        directory.prepare({"seed": 1, "agent": {"gamma": 0.9, "layers": [64, 64]}, "b": 2})
    message = str(caught.value)
    assert "agent.gamma=0.99" in message
    assert "agent.gamma=0.9;" in message
    assert "b=" not in message
    assert "\n" not in message
    assert pathlib.Path(directory.file("config.json")).read_bytes() == before


@pytest.mark.parametrize(
    ("theirs", "ours", "field"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, "b"),  # A field that the first run did not have.
        ({"a": 1, "b": 2}, {"a": 1}, "b"),  # One that this run does not have.
        ({"a": True}, {"a": 1}, "a"),  # Equal in Python, not in a configuration.
        ({"a": {"x": 1}}, {"a": 1}, "a"),
        ({"a": [1, 2]}, {"a": [1, 2, 3]}, "a"),
        ({"a": None}, {}, "a"),  # Null is a value; absent is not.
    ],
)
def test_differences_of_kind_are_differences(directory, theirs, ours, field):
    directory.prepare(theirs)
    with pytest.raises(run_directory.ConfigurationMismatch, match=rf" {field}="):
        directory.prepare(ours)


def test_a_field_that_may_differ_does_not_refuse_and_both_values_are_kept(directory):
    directory.prepare({"num_steps": 100, "run": {"log_every": 1}, "seed": 1})
    resumed = {"num_steps": 200, "run": {"log_every": 5}, "seed": 1}
    assert directory.prepare(resumed, may_differ=("num_steps", "run.log_every")) is True
    assert directory.read_config()["num_steps"] == 100
    kept = json.loads(pathlib.Path(directory.file("config.resumed-1.json")).read_text())
    assert kept == resumed
    with pytest.raises(run_directory.ConfigurationMismatch, match=r"run\.log_every"):
        directory.prepare(resumed, may_differ=("num_steps",))


def test_a_configuration_of_dataclasses_enums_paths_and_infinities_resumes(directory):
    class Core(enum.Enum):
        LSTM = 1

    @dataclasses.dataclass(frozen=True)
    class Config:
        core: Core = Core.LSTM
        clip: float = math.inf
        where: pathlib.Path = pathlib.Path("x/y")
        rate: Any = dataclasses.field(default_factory=lambda: np.float32(0.5))

    directory.prepare({"agent": Config()})
    assert directory.prepare({"agent": Config()}) is True
    assert directory.read_config() == {
        "agent": {"core": "LSTM", "clip": "inf", "where": "x/y", "rate": 0.5}
    }
    with pytest.raises(run_directory.ConfigurationMismatch, match=r"agent\.clip"):
        directory.prepare({"agent": Config(clip=40.0)})


def test_a_configuration_that_cannot_be_stored_names_the_field(directory):
    with pytest.raises(TypeError, match=r"config\.agent\.loss: a function"):
        directory.prepare({"agent": {"loss": lambda: 0}})
    assert not os.path.exists(directory.path)


def test_a_path_that_is_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(run_directory.RunDirectoryError, match="is not a directory"):
        run_directory.RunDirectory(tmp_path / "file").prepare({})
    with pytest.raises(run_directory.RunDirectoryError, match="is not a directory"):
        run_directory.RunDirectory(tmp_path / "file" / "below").prepare({})
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_without_its_configuration_is_not_overwritten(directory):
    directory.prepare({"seed": 1})
    directory.write_summary({"agent_steps": 7})
    os.unlink(directory.file("config.json"))
    with pytest.raises(run_directory.RunDirectoryError, match=r"summary\.json but no config\.json"):
        directory.prepare({"seed": 1})
    assert directory.read_summary() == {"agent_steps": 7}


def test_a_configuration_that_is_no_json_is_refused_in_one_line(directory):
    directory.prepare({"seed": 1})
    pathlib.Path(directory.file("config.json")).write_text("{")
    with pytest.raises(run_directory.RunDirectoryError, match=r"config\.json: is not JSON"):
        directory.prepare({"seed": 1})


def test_of_two_processes_that_prepare_at_once_one_is_fresh(directory):
    outcomes = []
    start = threading.Barrier(8)

    def prepare() -> None:
        start.wait(timeout=30)
        outcomes.append(directory.prepare({"seed": 1}))

    threads = [threading.Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert sorted(outcomes) == [False] + [True] * 7
    assert os.listdir(directory.path) == ["config.json"]


def test_a_directory_in_use_is_refused_and_free_again_when_its_process_is_killed(directory):
    directory.prepare({})
    program = (
        "import sys; from seedlib import run_directory\n"
        f"with run_directory.RunDirectory({directory.path!r}).claim():\n"
        "  print('claimed', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            assert other.stdout.readline() == "claimed\n"
            with (
                pytest.raises(run_directory.RunDirectoryError, match="another run is using it"),
                directory.claim(),
            ):
                pass
        finally:
            other.kill()
    with directory.claim():
        pass


def test_how_to_join_a_run_is_the_users_alone_and_there_while_the_run_is(directory):
    directory.prepare({})
    assert directory.read_running() is None
    with directory.claim():
        assert directory.read_running() is None
        directory.write_running({"run_token": "secret", "limit": float("inf")})
        assert stat.S_IMODE(os.stat(directory.file("running.json")).st_mode) == 0o600
        assert directory.read_running() == {"run_token": "secret", "limit": "inf"}
        assert directory.read_running() is not None  # To look does not end the claim.
    # As after the death of the process that held it.
    assert directory.read_running() is None
    with directory.claim():
        directory.remove_running()
        directory.remove_running()
        assert directory.read_running() is None
    assert "running.json" not in os.listdir(directory.path)


def test_to_look_for_a_run_keeps_none_out(directory):
    directory.prepare({})
    directory.write_running({"run_token": "of one that was killed"})
    assert directory.read_running() is None
    with directory.claim():
        assert directory.read_running() is not None


def test_actors_that_join_at_once_are_different_ones(directory):
    directory.prepare({})
    with directory.claim_actor([2, 3]) as one, directory.claim_actor([2, 3]) as other:
        assert (one, other) == ((2, 0), (3, 0))
        with (
            pytest.raises(run_directory.RunDirectoryError, match="joined as actor 2, 3"),
            directory.claim_actor([2, 3]),
        ):
            pass
    # Whoever comes again is told that somebody was there before.
    for before in range(1, 12):
        with directory.claim_actor([2, 3]) as again:
            assert again == (2, before)


def test_the_directory_pickles_and_means_the_same_place(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = run_directory.RunDirectory("run")
    assert relative == directory
    assert pickle.loads(pickle.dumps(relative)) == directory


def test_summary_numbers_that_are_not_finite_become_null(directory):
    directory.prepare({})
    directory.write_summary(
        {
            "return_mean_100": math.nan,
            "policy_lag_max": np.float32(np.inf),
            "agent_steps": np.int64(2**40),
            "rates": np.array([1.5, np.nan]),
            "exit_reason": "steps",
        }
    )
    text = pathlib.Path(directory.file("summary.json")).read_text()
    # A strict parser: NaN and Infinity, which Python's accepts, are refused.
    stored = json.loads(text, parse_constant=pytest.fail)
    assert stored == {
        "return_mean_100": None,
        "policy_lag_max": None,
        "agent_steps": 1_099_511_627_776,
        "rates": [1.5, None],
        "exit_reason": "steps",
    }


def test_a_reader_never_sees_half_a_file(directory):
    directory.prepare({})
    # Long enough that a plain write would be seen half done, and of changing length.
    versions = [{"number": n, "filler": "x" * (200_000 if n % 2 else 10)} for n in range(60)]
    directory.write_progress(versions[0])
    done = threading.Event()

    def write() -> None:
        try:
            for version in versions:
                directory.write_progress(version)
                directory.write_summary(version)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not done.is_set():
        progress, summary = directory.read_progress(), directory.read_summary()
        assert progress in versions
        assert summary is None or summary in versions
        seen.append(progress["number"])
    writer.join(timeout=30)
    assert seen == sorted(seen)
    assert directory.read_progress() == directory.read_summary() == versions[-1]
    assert sorted(os.listdir(directory.path)) == ["config.json", "progress.json", "summary.json"]


def test_a_failed_write_leaves_the_old_file(directory):
    directory.prepare({})
    directory.write_summary({"agent_steps": 1})
    with pytest.raises(TypeError, match=r"summary\.worse: a object"):
        directory.write_summary({"agent_steps": 2, "worse": object()})
    assert directory.read_summary() == {"agent_steps": 1}


def test_there_is_no_progress_summary_or_failure_at_first(directory):
    directory.prepare({})
    assert directory.read_progress() is None
    assert directory.read_summary() is None
    assert directory.first_failure() is None
    assert directory.clear_failures() is None


def _raise_with_cause() -> None:
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise ValueError("the result") from error


def test_the_first_failure_is_the_earliest_with_its_whole_traceback(directory):
    directory.prepare({})
    try:
        _raise_with_cause()
    except ValueError as error:
        # A name with everything that a file name or our own pattern could trip over.
        directory.record_failure("actor/3-a b", error)
    directory.record_failure("aaa", RuntimeError("a consequence"))
    node, text = directory.first_failure()
    assert node == "actor/3-a b"
    assert "KeyError: 'the cause'" in text
    assert "in _raise_with_cause" in text
    assert text.rstrip().endswith("ValueError: the result")
    assert [name for name, _ in directory.failures()] == ["actor/3-a b", "aaa"]


def test_failures_of_several_processes_are_one_list(directory):
    directory.prepare({})
    program = (
        "from seedlib import run_directory\n"
        f"run_directory.RunDirectory({directory.path!r}).record_failure('actor', OSError('gone'))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    directory.record_failure("learner", RuntimeError("later"))
    assert [node for node, _ in directory.failures()] == ["actor", "learner"]


def test_old_failures_are_moved_aside_and_kept(directory):
    directory.prepare({})
    directory.record_failure("learner", RuntimeError("first run"))
    first = directory.clear_failures()
    assert directory.first_failure() is None
    directory.record_failure("learner", RuntimeError("second run"))
    second = directory.clear_failures()
    assert first != second
    for folder, text in ((first, "first run"), (second, "second run")):
        (name,) = os.listdir(folder)
        assert text in pathlib.Path(folder, name).read_text()
