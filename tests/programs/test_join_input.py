"""Tests of what joining a run refuses: one clear line, exit code 2, and the run stays as it is."""

import contextlib
import dataclasses
import os
import pathlib
import sys

import pytest

import seedlib
from programs import experiment as experiment_lib
from seedlib import environments, run_directory, specs
from seedlib.agents import loading
from tests.integration import running


def command(logdir: pathlib.Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "programs.join", f"--logdir={logdir}", *arguments]


def experiment(logdir: pathlib.Path, program: str = "seed") -> experiment_lib.Experiment:
    """Returns a run of two actors with room for two more."""
    catch = environments.load("catch")
    return experiment_lib.Experiment(
        program=program,
        environment=catch,
        agent=loading.AgentFactory("vtrace", specs.make_environment_spec(catch(seed=0)), {}),
        directory=run_directory.RunDirectory(logdir),
        num_actors=2,
        envs_per_actor=4,
        num_steps=1000,
        spare_actors=2,
    )


@contextlib.contextmanager
def going_on(run: experiment_lib.Experiment, **changes):
    """Keeps a directory as a run does that is going on; `changes` of its configuration."""
    run.directory.prepare(run.config())
    with run.directory.claim():
        run.directory.write_running(
            {
                "config": {**run.config(), **changes},
                "run_token": run.run_token,
                "addresses": {"learner": ["localhost:1"] * 3, "actor": []},
            }
        )
        yield
        assert run.directory.read_running() is not None


def test_a_logdir_is_required():
    flags = [flag for flag in command(pathlib.Path("unused")) if "logdir" not in flag]
    assert "--logdir is required" in running.refused(flags)


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    line = running.refused(command(tmp_path / "none"))
    assert line == f"error: logdir {tmp_path / 'none'}: there is no such folder"
    assert os.listdir(tmp_path) == []


def test_a_folder_without_a_run_is_named(tmp_path):
    line = running.refused(command(tmp_path))
    assert line == f"error: {tmp_path / 'config.json'}: does not exist"
    assert os.listdir(tmp_path) == []


def test_a_run_of_lockstep_takes_nobody(tmp_path):
    with going_on(experiment(tmp_path, "lockstep")):
        line = running.refused(command(tmp_path))
    assert str(tmp_path) in line and "lockstep" in line and "seed, impala" in line


def test_a_run_that_has_ended_takes_nobody_also_where_it_was_killed(tmp_path):
    # The file of how to join is still there; that nobody holds the directory is what counts.
    with going_on(experiment(tmp_path)):
        pass
    assert (tmp_path / "running.json").exists()
    line = running.refused(command(tmp_path))
    assert line.startswith(f"error: logdir {tmp_path}: no run is going on")


def test_a_run_of_another_version_takes_nobody(tmp_path):
    with going_on(experiment(tmp_path), seedlib="0.0.7"):
        line = running.refused(command(tmp_path))
    assert str(tmp_path) in line and "0.0.7" in line and seedlib.__version__ in line


def test_a_run_of_another_graph_takes_nobody(tmp_path):
    # As many addresses as seed's learner has are too many for impala's.
    with going_on(experiment(tmp_path, "impala")):
        line = running.refused(command(tmp_path))
    assert "'learner'" in line and "3 addresses" in line and line.endswith("this one 2")


@pytest.mark.parametrize("index", [1, 4])
def test_an_index_that_is_no_place_of_the_run_is_refused(tmp_path, index):
    with going_on(experiment(tmp_path)):
        line = running.refused(command(tmp_path, f"--index={index}"))
    assert line.startswith("error: index must be in 2..3") and line.endswith(f"got {index}")


def test_a_run_without_places_says_so(tmp_path):
    with going_on(dataclasses.replace(experiment(tmp_path), spare_actors=0)):
        line = running.refused(command(tmp_path))
    assert str(tmp_path) in line and "--spare_actors=0" in line


def test_places_that_others_have_are_refused(tmp_path):
    directory = run_directory.RunDirectory(tmp_path)
    with going_on(experiment(tmp_path)), directory.claim_actor([2]), directory.claim_actor([3]):
        assert "others have joined as actor 3" in running.refused(command(tmp_path, "--index=3"))
        assert "others have joined as actor 2, 3" in running.refused(command(tmp_path))


@pytest.mark.parametrize("flag", ["--env=catch", "--num_inference_servers=3"])
def test_flags_of_a_run_are_refused(tmp_path, flag):
    name = flag.partition("=")[0]
    assert f"{name} is a flag of a run" in running.refused(command(tmp_path, flag))


@pytest.mark.parametrize("stray", ["--indx=1", "faster", "--index=-1"])
def test_what_is_no_flag_is_refused(tmp_path, stray):
    assert stray.strip("-").partition("=")[0] in running.refused(command(tmp_path, stray))


def test_a_configuration_comes_back_from_its_file_as_it_was(tmp_path):
    made = dataclasses.replace(
        experiment(tmp_path),
        environment=environments.load("catch", rows=7),
        checkpoint_period=float("inf"),
        inference_batch_sizes=(4, 8),
    )
    experiment_lib.FLAGS(["join"])  # The seed with which an environment is made to look at it.
    with going_on(made):
        stored = made.directory.read_running()
    back = experiment_lib.from_config(stored["config"], made.directory, stored["run_token"])
    assert back.config() == made.config()
    assert back.run_token == made.run_token
