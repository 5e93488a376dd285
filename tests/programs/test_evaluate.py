"""Tests of evaluation: a run leaves a checkpoint, and a program of its own plays with it.

The command that docs/operation.md gives is run as it stands, but for its paths.
"""

import concurrent.futures
import json
import pathlib
import re
import shlex
import subprocess
import sys

import cv2
import jax
import numpy as np
import pytest
from PIL import Image

from programs import evaluate
from seedlib import environments, run_directory, specs
from seedlib.agents import loading
from seedlib.components import actor, checkpointing, episodes
from tests.integration import running

PATIENCE = 400.0
IMAGES = "synthetic:12x10x4"


def command(logdir: pathlib.Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "programs.evaluate", f"--logdir={logdir}", *arguments]


def documented(logdir: pathlib.Path, figures: pathlib.Path) -> list[str]:
    """Returns the command that the documentation gives, with other paths."""
    text = (running.ROOT / "docs/operation.md").read_text(encoding="utf-8")
    python, *words = shlex.split(re.search(r"^\S+ -m programs\.evaluate .*$", text, re.M)[0])
    assert python == ".venv/bin/python"
    words = [re.sub(r"^--logdir=.*", f"--logdir={logdir}", word) for word in words]
    return [sys.executable, *(re.sub(r"^--json=.*", f"--json={figures}", word) for word in words)]


def output_of(full: list[str]) -> str:
    """Runs a command that must succeed; returns what it printed."""
    result = subprocess.run(
        full,
        cwd=running.ROOT,
        env=running.surroundings(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def contents(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Returns size and time of change of everything in a folder."""
    found = {}
    for path in [folder, *folder.rglob("*")]:
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found


def printed(output: str) -> tuple[dict[int, tuple[float, int]], dict[str, float]]:
    """Returns return and length of each episode by number, and the figures of the last line."""
    rows = re.findall(r"^episode (\d+): return (\S+), length (\d+)$", output, re.M)
    played = {int(number): (float(total), int(length)) for number, total, length in rows}
    assert len(played) == len(rows)
    names = ("return_mean", "return_median", "return_min", "return_max", "episodes", "length_mean")
    pattern = "mean (.+), median (.+), min (.+), max (.+) [(](.+) episodes, mean length (.+)[)]"
    values = re.search(f"^return: {pattern}$", output, re.M).groups()
    return played, dict(zip(names, map(float, values), strict=True))


@pytest.fixture(scope="module")
def catch_run(tmp_path_factory) -> pathlib.Path:
    """The directory of a short run of catch."""
    logdir = tmp_path_factory.mktemp("evaluate") / "catch"
    output_of(running.command(logdir, "--num_steps=400", module="programs.lockstep"))
    return logdir


@pytest.fixture(scope="module")
def image_run(tmp_path_factory) -> pathlib.Path:
    """A directory that a run is using at this moment, of an environment that shows images.

    Every episode has 25 transitions and two rewards of 1.
    """
    logdir = tmp_path_factory.mktemp("evaluate") / "images"
    config = {
        "env": IMAGES,
        "env_options": {"episode_length": 25},
        "agent": "vtrace",
        "agent_options": {"torso": "mlp", "hidden_sizes": (8, 4), "reward_clip": 0.1},
    }
    directory = run_directory.RunDirectory(logdir)
    directory.prepare(config)
    spec = specs.make_environment_spec(environments.load(IMAGES)(seed=0))
    agent = loading.AgentFactory("vtrace", spec, config["agent_options"])()
    checkpointer = checkpointing.Checkpointer(directory.file("checkpoints"))
    for number in (3, 20):
        state = jax.device_get(agent.init(jax.random.PRNGKey(number)))
        checkpointer.save(number, checkpointing.Checkpoint(state, {"updates": number}))
    checkpointer.close()
    unfinished = logdir / "checkpoints" / "30.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "half").write_text("of an array")
    with directory.claim():
        yield logdir


@pytest.fixture(scope="module")
def evaluations(catch_run, image_run, tmp_path_factory):
    """Evaluates in several ways, two at a time; returns what was printed, and a folder of files."""
    folder = tmp_path_factory.mktemp("figures")
    before = contents(catch_run), contents(image_run)
    commands = {
        "sampled": (catch_run, "--episodes=7", "--seed=5", "--sampled"),
        "again": (catch_run, "--episodes=7", "--seed=5", "--sampled"),
        "images": (image_run, "--episodes=3", f"--video={folder / 'images.gif'}"),
        "other": (image_run, "--checkpoint=3", "--env_option=episode_length=12", "--episodes=1"),
    }

    def run(name: str) -> str:
        return output_of(command(*commands[name], f"--json={folder / name}.json"))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(run, name) for name in commands}
        full = documented(catch_run, folder / "greedy.json")
        futures["greedy"] = pool.submit(output_of, full)
    outputs = {name: future.result() for name, future in futures.items()}
    assert (contents(catch_run), contents(image_run)) == before
    return outputs, folder


def stored(evaluations, name: str) -> dict:
    return json.loads((evaluations[1] / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("name", "count"), [("greedy", 100), ("sampled", 7), ("images", 3), ("other", 1)]
)
def test_what_is_stored_is_what_is_printed(evaluations, name, count):
    played, last = printed(evaluations[0][name])
    figures = stored(evaluations, name)
    assert sorted(played) == list(range(1, count + 1))
    assert [played[number] for number in sorted(played)] == list(
        zip(figures["returns"], figures["lengths"], strict=True)
    )
    assert last == pytest.approx({key: figures[key] for key in last})
    assert last["episodes"] == count
    assert last["return_mean"] == pytest.approx(np.mean(figures["returns"]))
    assert last["return_median"] == np.median(figures["returns"])
    assert (last["return_min"], last["return_max"]) == (
        min(figures["returns"]),
        max(figures["returns"]),
    )
    first = evaluations[0][name].splitlines()[0]
    assert first == (
        f"{figures['env']}, checkpoint {figures['checkpoint']} of {figures['logdir']}, "
        f"{figures['policy']}, seed {figures['seed']}"
    )


def test_episodes_of_catch_are_what_catch_gives(evaluations, catch_run):
    for name, policy in (("greedy", "greedy"), ("sampled", "sampled")):
        figures = stored(evaluations, name)
        assert set(figures["returns"]) <= {-1.0, 1.0}
        assert set(figures["lengths"]) == {9}
        assert figures["policy"] == policy
        assert figures["seed"] == (5 if policy == "sampled" else 0)
        assert figures["env"] == "catch"
        assert (catch_run / "checkpoints" / str(figures["checkpoint"])).is_dir()


def test_one_seed_gives_the_same_figures(evaluations):
    assert stored(evaluations, "sampled") == stored(evaluations, "again")


def test_returns_are_of_unclipped_rewards_and_the_newest_checkpoint_is_taken(evaluations):
    figures = stored(evaluations, "images")
    assert figures["returns"] == [2.0] * 3
    assert figures["lengths"] == [25] * 3
    assert figures["checkpoint"] == 20


def test_checkpoint_and_settings_of_the_environment_can_be_chosen(evaluations):
    figures = stored(evaluations, "other")
    assert figures["checkpoint"] == 3
    assert figures["env_options"] == {"episode_length": 12}
    assert (figures["returns"], figures["lengths"]) == ([1.0], [12])


def test_the_video_shows_the_first_episode(evaluations):
    name = evaluations[1] / "images.gif"
    assert f"video: {name}" in evaluations[0]["images"]
    with Image.open(name) as video:
        assert video.format == "GIF"
        assert video.size == (130, 156)  # 13 times as large.
        assert video.n_frames == 26
        video.seek(10)
        shown = np.asarray(video.convert("L"))[::13, ::13]
    # The images come round after ten steps. A palette of 256 greys loses nothing.
    seed = actor.environment_seed(0, 0, 0, evaluate=True)
    first = environments.load(IMAGES)(seed=seed).reset().observation
    np.testing.assert_array_equal(shown, first[..., -1])


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param("seed", marks=pytest.mark.slow),
        pytest.param("impala", marks=pytest.mark.slow),
        "inference_pool",
    ],
)
def test_a_checkpoint_of_every_graph_can_be_played(graph, tmp_path):
    with running.started(
        tmp_path / "run", "--num_steps=2000", module=f"programs.{graph}"
    ) as trained:
        assert trained.wait(PATIENCE) == 0, trained.text()
        # The last one, after all updates; there are so many steps that there was one.
        updates = trained.summary()["learner_updates"]
        assert updates > 0
        assert trained.checkpoints()[-1] == updates
    before = contents(trained.logdir)
    stored = tmp_path / "figures.json"
    output = output_of(command(trained.logdir, "--episodes=5", f"--json={stored}"))
    assert contents(trained.logdir) == before
    played, last = printed(output)
    figures = json.loads(stored.read_text())
    assert figures["checkpoint"] == updates
    assert figures["env"] == "catch"
    assert figures["lengths"] == [9] * 5
    assert set(figures["returns"]) <= {-1.0, 1.0}
    assert [played[number][0] for number in range(1, 6)] == figures["returns"]
    assert last["return_mean"] == pytest.approx(np.mean(figures["returns"]))


@pytest.mark.parametrize("channels", [(), (3,)])
def test_an_mp4_holds_every_image(tmp_path, channels):
    frames = [np.full((20, 30, *channels), shade, np.uint8) for shade in (0, 100, 200)]
    path = str(tmp_path / "video.mp4")
    evaluate.write_video(path, frames)
    video = cv2.VideoCapture(path)
    for frame in frames:
        there, image = video.read()
        assert there
        assert image.shape == (100, 150, 3)
        assert abs(float(image.mean()) - float(frame.mean())) < 5.0
    assert not video.read()[0]
    video.release()


# Flags for which run, and what the one line must hold: the thing and the value.
REFUSALS = {
    "no such folder": ("{folder}/nowhere", [], ["nowhere", "no such folder"]),
    "no run": ("{folder}", [], ["config.json", "does not exist"]),
    "no checkpoint": ("{new}", [], ["{new}", "no checkpoint"]),
    "unknown checkpoint": ("{images}", ["--checkpoint=4"], ["no checkpoint 4", "3, 20"]),
    "existing figures": ("{images}", ["--json={folder}/there.json"], ["there.json", "is there"]),
    "existing video": ("{images}", ["--video={folder}/there.gif"], ["there.gif", "is there"]),
    "no folder for figures": ("{images}", ["--json={folder}/no/x.json"], ["no/x.json"]),
    "kind of video": ("{images}", ["--video={folder}/x.avi"], ["x.avi", ".gif"]),
    "video of numbers": (
        "{images}",
        ["--video={folder}/x.gif", "--env=gymnasium:CartPole-v1"],
        ["gymnasium:CartPole-v1", "float32 (4,)"],
    ),
    "another environment": (
        "{images}",
        ["--env=catch"],
        ["checkpoint 20", "does not fit", "{images}"],
    ),
    "flag of a run": ("{images}", ["--num_actors=2"], ["num_actors"]),
    "episodes": ("{images}", ["--episodes=0"], ["episodes", "0"]),
}


@pytest.fixture(scope="module")
def refusals(image_run, tmp_path_factory):
    """Runs all of them, two at a time; returns what fills their texts, and each one's line."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "there.json").write_text("mine")
    (folder / "there.gif").write_text("mine")
    new = folder / "new"
    run_directory.RunDirectory(new).prepare(
        {"env": "catch", "env_options": {}, "agent": "vtrace", "agent_options": {}}
    )
    names = {"folder": folder, "new": new, "images": image_run}
    before = contents(folder), contents(image_run)

    def run(name: str) -> str:
        logdir, arguments, _ = REFUSALS[name]
        filled = [argument.format(**names) for argument in arguments]
        return running.refused(command(pathlib.Path(logdir.format(**names)), *filled))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(run, name) for name in REFUSALS}
    lines = {name: future.result() for name, future in futures.items()}
    assert (contents(folder), contents(image_run)) == before
    return names, lines


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_refused_in_one_line_and_nothing_changes(refusals, name):
    names, lines = refusals
    assert lines[name].startswith("error: ")
    for part in REFUSALS[name][2]:
        assert part.format(**names) in lines[name]


def test_help_names_the_flags_of_an_evaluation_alone():
    said = output_of([sys.executable, "-m", "programs.evaluate", "--help"])
    names = ("logdir", "episodes", "sampled", "seed", "checkpoint", "json", "video", "env")
    assert [name for name in names if f"--{name}\n" not in said] == []
    assert "num_actors" not in said
    assert "CartPole" not in said  # The default of a run.


class Actions:
    """Environments that remember what they were told."""

    def __init__(self, environment: actor.SerialEnvironments) -> None:
        self._environment = environment
        self.size, self.spec = environment.size, environment.spec
        self.close = environment.close
        self.actions = []

    def step(self, actions):
        if actions is not None:
            self.actions.append(np.array(actions))
        return self._environment.step(actions)


def actions_of(sampled: bool, seed: int) -> np.ndarray:
    """Returns the actions `[steps, environments]` of episodes that all look the same."""
    factory = environments.load("catch", rows=6, columns=1)
    played = Actions(actor.SerialEnvironments(factory, range(16), evaluate=True))
    agent = loading.AgentFactory("vtrace", played.spec, {"hidden_sizes": (8,)})()
    params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    log = evaluate.EpisodeLog(16, 16)
    evaluate.play(agent, params, played, log, sampled, seed)
    assert log.episodes == [evaluate.Episode(1.0, 5)] * 16
    return np.stack(played.actions)


def test_greedy_actions_are_the_same_wherever_the_same_is_seen_and_sampled_ones_are_drawn():
    greedy = actions_of(sampled=False, seed=0)
    assert (greedy == greedy[:, :1]).all()
    np.testing.assert_array_equal(greedy, actions_of(sampled=False, seed=1))
    sampled = actions_of(sampled=True, seed=0)
    assert (sampled != sampled[:, :1]).any(axis=1).all()
    np.testing.assert_array_equal(sampled, actions_of(sampled=True, seed=0))
    assert (sampled != actions_of(sampled=True, seed=1)).any()


def test_which_episodes_count_does_not_depend_on_how_long_they_are():
    told = []
    log = evaluate.EpisodeLog(5, 2, lambda number, episode: told.append((number, episode)))

    def end(environment: int, length: int) -> None:
        log.observe(
            0,
            episodes.Episodes(
                np.array([environment], np.int32),
                np.array([float(length)]),
                np.array([length]),
                np.array([True]),
            ),
        )

    log.observe(2, None)
    for length in (1, 2, 3, 4):  # The first environment has a share of three.
        end(0, length)
    assert not log.done
    end(1, 100)
    end(1, 200)
    assert log.done
    assert [episode.length for episode in log.episodes] == [1, 100, 2, 200, 3]
    assert [number for number, _ in told] == [0, 2, 4, 1, 3]


class Stumbling(environments.EnvironmentFactory):
    """Makes images whose first environment raises in the middle of its first episode."""

    def __call__(self, seed: int):
        environment = super().__call__(seed)
        if not stumbled:
            stumbled.append(seed)
            step, left = environment.step, [4]

            def fail(action):
                left[0] -= 1
                if left[0] == 0:
                    raise RuntimeError("the simulator has lost its window")
                return step(action)

            environment.step = fail
        return environment


stumbled: list[int] = []


def test_an_episode_that_breaks_off_neither_counts_nor_is_shown():
    stumbled.clear()
    factory = Stumbling(IMAGES, {"episode_length": 7})
    played = evaluate.RecordedEnvironments(
        actor.SerialEnvironments(factory, range(2), evaluate=True)
    )
    agent = loading.AgentFactory("vtrace", played.spec, {"torso": "mlp", "hidden_sizes": (4,)})()
    log = evaluate.EpisodeLog(3, 2)
    params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    evaluate.play(agent, params, played, log)
    assert len(stumbled) == 1
    assert [episode.length for episode in log.episodes] == [7, 7, 7]
    assert len(played.frames) == 8
    again = factory(actor.environment_seed(0, 0, 1, evaluate=True))
    np.testing.assert_array_equal(played.frames[0], again.reset().observation[..., -1])
