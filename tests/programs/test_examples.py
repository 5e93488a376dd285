"""The examples train, through real processes, as their own docstrings say."""

import ast
import csv
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import tree

from seedlib import environments, specs
from seedlib.agents import loading
from seedlib.components import configs, inference, trajectory_queue

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "programs" / "examples"


def command_of(example: str, module: str = "programs.seed") -> list[str]:
    """Returns the command line in an example's docstring, for this Python; it is `module`'s."""
    text = ast.get_docstring(ast.parse((EXAMPLES / f"{example}.py").read_text()))
    words = shlex.split(text.partition("\n\n")[2])
    assert words[:3] == ["python", "-m", module]
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

    spec = specs.make_environment_spec(environments.load("catch")(seed=0))
    agent = own_network.make_agent(spec, width=16)
    params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    # catch shows a board of 10 x 5, flat.
    assert params["own"]["w"].shape == (50, 16)


def check_unrolls(batch: dict[str, np.ndarray]) -> None:
    """Checks the steps within each unroll of catch."""
    first, last = (batch["inputs/step_type"] == kind for kind in (0, 2))
    assert (first[:, 1:] == last[:, :-1]).all()
    assert (np.diff(batch["info/step_index"]) == 1).all()
    assert (batch["inputs/environment_id"] == batch["inputs/environment_id"][:, :1]).all()
    assert not batch["inputs/evaluate"].any()
    assert (batch["inputs/reward"][~last] == 0).all()
    assert (np.abs(batch["inputs/reward"][last]) == 1).all()
    assert (batch["inputs/discount"] == ~last).all()
    before = np.where(first[:, 1:], 0, batch["action"][:, :-1])
    assert (batch["inputs/previous_action"][:, 1:] == before).all()


def test_a_node_of_ones_own_writes_down_every_batch_once(tmp_path):
    command = command_of("own_node", "programs.examples.own_node")
    summary, _ = train(command, tmp_path)
    check(summary)
    (logdir,) = tmp_path.glob("runs/*")
    config = json.loads((logdir / "config.json").read_text())
    environment_spec = specs.make_environment_spec(environments.load("catch")(seed=0))
    agent = loading.AgentFactory(config["agent"], environment_spec, config["agent_options"])()
    expected = {
        "/".join(map(str, path)): ((agent.batch_size, *leaf.shape), leaf.dtype)
        for path, leaf in tree.flatten_with_path(inference.unroll_specs(agent, environment_spec))
    }

    files = {int(path.stem): path for path in sorted((logdir / "unrolls").iterdir())}
    newest = max(files)
    assert list(files) == list(range(newest - 19, newest + 1))
    # What the learner has fetched and not trained on when it ends: those ahead, and one in hand.
    assert 0 <= newest - summary["learner_updates"] <= configs.LearnerConfig().prefetch + 1
    ends: dict[int, dict[str, np.ndarray]] = {}
    for path in files.values():
        with np.load(path) as file:
            batch = dict(file)
        assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == expected
        check_unrolls(batch)
        for row in range(agent.batch_size):
            unroll = {name: leaf[row] for name, leaf in batch.items()}
            environment = int(unroll["inputs/environment_id"][0])
            # Neighbours share a step, so that no transition is lost or there twice.
            for name, step in ends.get(environment, {}).items():
                np.testing.assert_array_equal(unroll[name][0], step, f"{path.stem}: {name}")
            ends[environment] = {name: leaf[-1] for name, leaf in unroll.items()}
    assert set(ends) <= set(range(config["num_actors"] * config["envs_per_actor"]))
    assert len(ends) >= config["envs_per_actor"]  # An actor's environments step together.


def test_the_node_of_ones_own_hands_on_what_it_reads_and_goes_on_with_its_numbers(tmp_path):
    from programs.examples import own_node

    environment_spec = specs.make_environment_spec(environments.load("catch")(seed=0))
    agent = loading.AgentFactory("vtrace", environment_spec, {"batch_size": 2})()
    unroll_spec = inference.unroll_specs(agent, environment_spec)
    config = configs.TrajectoryQueueConfig()
    queue = trajectory_queue.TrajectoryQueue(
        trajectory_queue.layout(unroll_spec, agent.batch_size, config), config
    )
    writer = queue.writer()
    for numbers in ([1, 2], [3, 4, 5]):  # A run, and one that goes on with it.
        reader = own_node.LoggingReader(queue.reader(), tmp_path, keep=3)
        for number in numbers:
            sent = specs.zeros(unroll_spec, (agent.batch_size,))
            sent.inputs.reward[:] = number
            writer.insert(sent)
            received = next(reader).unrolls
            tree.map_structure(np.testing.assert_array_equal, received, sent)
            with np.load(tmp_path / f"{number:09d}.npz") as file:
                assert (file["inputs/reward"] == number).all()
        reader.close()
        assert next(reader, None) is None
    queue.stop()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n:09d}.npz" for n in (3, 4, 5)]


def test_the_documentation_shows_the_node_as_it_is():
    text = (ROOT / "docs/compose_your_own.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"^```python\n(.*?)^```$", text.partition("\n## A node\n")[2], re.M | re.S
    )
    source = (EXAMPLES / "own_node.py").read_text(encoding="utf-8")
    _, *classes = block.split("\n\n\n")
    assert len(classes) == 2
    assert [part for part in classes if part.strip() not in source] == []
