"""Tests of what a program refuses before anything starts: one clear line, exit code 2, no file."""

import concurrent.futures
import pathlib
import subprocess
import sys

import pytest

from tests.integration import running

MODULE = "tests.integration.environments"

# Flags, and what the one line must hold: the thing and the value.
CASES = {
    "unknown environment": (["--env=football"], ["football", "catch", "gymnasium:<id>"]),
    "unknown kind": (["--env=nosuch_module:make"], ["nosuch_module"]),
    "unknown game": (["--env=atari:Pung"], ["Pung"]),
    "unknown id": (["--env=gymnasium:CartPole-v77"], ["CartPole-v77"]),
    "unknown experiment": (["--env=bsuite:memory_length/3"], ["memory_length"]),
    "bad size": (["--env=synthetic:84xx4"], ["84xx4"]),
    "unknown environment option": (["--env_option=raws=3"], ["raws", "rows"]),
    "bad environment option": (["--env_option=rows=1"], ["rows", "1"]),
    "option without value": (["--env_option=rows"], ["rows"]),
    "option of ones own": (
        [f"--env={MODULE}:steering", "--env_option=colour=3"],
        [f"{MODULE}:steering", "colour"],
    ),
    "unknown agent": (["--agent=vtrase"], ["vtrase", "vtrace"]),
    "unknown module": (["--agent=no.such:make"], ["no.such:make", "no module"]),
    "unknown agent option": (["--agent_option=lerning_rate=1"], ["lerning_rate", "learning_rate"]),
    "batch size": (["--agent_option=batch_size=0"], ["batch_size", "0"]),
    "learning rate": (["--agent_option=learning_rate=-1"], ["learning_rate", "-1"]),
    "type of an option": (["--agent_option=batch_size=many"], ["batch_size", "many"]),
    "text": (
        [f"--env={MODULE}:text"],
        ["observation/hint", "(2,)", "neither numeric nor boolean"],
    ),
    "continuous action": (
        [f"--env={MODULE}:steering"],
        ["action/wheel", "float32", "(3,)"],
    ),
    "actors": (["--num_actors=0"], ["num_actors", "0"]),
    "steps": (["--num_steps=-5"], ["num_steps", "-5"]),
    "seed": (["--seed=4294967296"], ["seed", "4294967296"]),
    "no number": (["--envs_per_actor=several"], ["envs_per_actor", "several"]),
    "minimum batch": (["--minimum_batch_size=9"], ["minimum_batch_size", "9", "1..8"]),
    "capacity": (["--queue_capacity=7"], ["queue_capacity", "7", "8"]),
    "unknown flag": (["--num_actor=1"], ["num_actor"]),
    "stray argument": (["faster"], ["faster"]),
    "launch type": (["--lp_launch_type=vertex_ai"], ["lp_launch_type", "vertex_ai", "local_mp"]),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """Runs all of them, a few at a time; returns a future of each one's line and folder."""
    folder = tmp_path_factory.mktemp("refused")

    def run(name: str) -> tuple[str, pathlib.Path]:
        logdir = folder / name.replace(" ", "-")
        return running.refused(running.command(logdir, *CASES[name][0])), logdir

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        yield {name: pool.submit(run, name) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_one_line_before_anything_starts(refusals, name):
    line, logdir = refusals[name].result()
    assert line.startswith("error: ")
    for part in CASES[name][1]:
        assert part in line, line
    assert not logdir.exists()


def test_a_run_needs_a_folder():
    flags = [flag for flag in running.command(pathlib.Path("unused")) if "logdir" not in flag]
    assert "--logdir" in running.refused(flags)


def test_a_file_is_no_folder_for_a_run(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    assert str(path) in running.refused(running.command(path))
    assert path.read_text() == "mine"


def test_a_folder_with_the_remains_of_another_run_is_refused(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    line = running.refused(running.command(tmp_path))
    assert str(tmp_path) in line and "summary.json" in line
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_an_environment_of_ones_own_that_raises_shows_where_and_then_one_line(tmp_path):
    result = subprocess.run(
        running.command(tmp_path / "run", f"--env={MODULE}:unmade"),
        cwd=running.ROOT,
        env=running.surroundings(),
        capture_output=True,
        text=True,
        timeout=running.START,
        check=False,
    )
    assert result.returncode == 2
    assert "in unmade" in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last == f"error: environment {MODULE}:unmade cannot be made: OSError: " + (
        "no licence for the simulator with seed 0"
    )
    assert not (tmp_path / "run").exists()


def test_help_names_every_flag_and_needs_nothing_else():
    result = subprocess.run(
        [sys.executable, "-m", "programs.seed", "--help"],
        cwd=running.ROOT,
        capture_output=True,
        text=True,
        timeout=running.START,
        check=False,
    )
    assert result.returncode == 0
    for flag in ("env", "agent", "num_actors", "envs_per_actor", "num_steps", "seed", "logdir"):
        assert f"--{flag}\n" in result.stdout
    assert "--lp_launch_type" in result.stdout
    # Those of absl and Launchpad would fill screens.
    assert "alsologtostderr" not in result.stdout
    assert result.stderr == ""


def test_a_refusal_needs_neither_jax_nor_tensorflow():
    # Asked of the process itself: it imports what a refusal of an agent's option imports.
    program = (
        "import sys\n"
        "from programs import experiment, seed\n"
        "experiment.FLAGS(['seed', '--env=catch', '--logdir=unused'])\n"
        "made = seed.seed(experiment.from_flags('seed'))\n"
        "print(sorted({'jax', 'tensorflow', 'reverb', 'rlax', 'haiku'} & set(sys.modules)))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=running.ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=running.START,
    )
    assert result.stdout.strip() == "[]"
