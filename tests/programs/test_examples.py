"""The examples train, through real processes, as their own docstrings say."""

import ast
import csv
import json
import pathlib
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "programs" / "examples"


def command_of(example: str) -> list[str]:
    """Returns the command line in an example's docstring, for this Python."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{example}.py").read_text()))
    words = shlex.split(text.partition("\n\n")[2])
    assert words[:3] == ["python", "-m", "programs.seed"]
    return [sys.executable, *words[1:]]


def train(command: list[str], folder: pathlib.Path) -> tuple[dict, list[dict]]:
    """Runs a command to its end; returns the summary and the rows of train.csv."""
    result = subprocess.run(
        command, cwd=folder, check=False, timeout=300, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (logdir,) = (word.removeprefix("--logdir=") for word in command if word.startswith("--logdir="))
    with open(folder / logdir / "train.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return json.loads((folder / logdir / "summary.json").read_text()), rows


def check(summary: dict) -> None:
    assert summary["exit_reason"] == "num_steps"
    assert summary["agent_steps"] >= 30_000
    # 32 unrolls of 20 transitions make an update; what lies in the queue at the end is not learned.
    assert summary["learner_updates"] >= 30_000 / (32 * 20) - 5
    assert summary["skipped_updates"] == 0


def test_an_environment_and_a_network_of_ones_own(tmp_path):
    command = command_of("own_environment")
    agent = next(word for word in command_of("own_network") if word.startswith("--agent="))
    # The width arrives in the example's function, and a setting of V-trace passes through it.
    options = ["--agent_option=width=32", "--agent_option=learning_rate=0.002"]
    summary, rows = train([*command, agent, *options], tmp_path)
    check(summary)
    assert float(rows[-1]["learning_rate"]) == float.fromhex("0x1.0624dep-9")  # float32(0.002).
    # A walker at random stands five places off the target, and after 20 steps of variance 2/3 its
    # place has a standard deviation of sqrt(20 * 2/3) = 3.7. By the reflection principle it reaches
    # the target with a probability of about 2 * P(N(0, 1) > 5 / 3.7) = 0.18.
    assert summary["return_mean_100"] > 0.6


def test_a_loss_of_ones_own_in_a_file_of_the_users_own(tmp_path):
    shutil.copy(EXAMPLES / "own_loss.py", tmp_path / "my_loss.py")
    command = [
        word.replace("programs.examples.own_loss", "my_loss") for word in command_of("own_loss")
    ]
    summary, rows = train(command, tmp_path)
    check(summary)
    # The metric that only this loss has; a mean of divergences of policies that differ a little.
    assert float(rows[-1]["kl"]) > 0.0


def test_the_own_network_is_the_one_that_is_trained():
    import jax

    from programs.examples import own_network
    from seedlib import environments, specs

    spec = specs.make_environment_spec(environments.load("catch")(seed=0))
    agent = own_network.make_agent(spec, width=16)
    params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    # catch shows a board of 10 x 5, flat.
    assert params["own"]["w"].shape == (50, 16)
