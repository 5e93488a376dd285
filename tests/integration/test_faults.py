"""Tests of one run through its troubles: a dead actor, a frozen one, a stop, and a resume."""

import contextlib
import json
import signal

import pytest

from tests.integration import environments, running

MORE = 3_000
ROWS, UNROLL = 2 * 4, 20


class Story:
    """What was seen while the run went through its troubles."""

    stopped: running.Program
    resumed: running.Program
    first_summary: dict
    refusals: dict[str, str]
    files_before: dict[str, tuple]
    files_after: dict[str, tuple]
    limit: int


def contents(logdir):
    """Returns what every file of a run holds, but for the lock that a refusal may touch."""
    files = [path for path in logdir.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(logdir)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    spied = folder / "spied"
    spied.mkdir()
    flags = [
        "--env=tests.integration.environments:spy",
        f"--env_option=directory={spied}",
        "--num_actors=2",
        "--envs_per_actor=4",
    ]
    logdir = folder / "run"
    result = Story()
    result.refusals = {}
    with contextlib.ExitStack() as stack:
        run = result.stopped = stack.enter_context(
            running.started(logdir, *flags, "--num_steps=1000000000")
        )
        run.wait_for_steps(1000)

        # An actor dies without a word; the others go on, and it is started again.
        dead = run.named("actor-0")
        steps = run.figures()["agent_steps"]
        dead.send_signal(signal.SIGKILL)
        run.wait_for_steps(steps + 500)
        restarted = running.wait_until(
            lambda: [
                fact
                for fact in environments.told(spied, "stepped")
                if fact["process"] == "actor-0" and fact["pid"] != dead.pid
            ],
            running.START,
            f"a new actor-0; {run.text()}",
        )
        assert restarted

        # An actor is frozen for a while; the other goes on, and it goes on after that.
        frozen = run.named("actor-1")
        frozen.suspend()
        run.wait_for_steps(run.figures()["agent_steps"] + 1000)
        frozen.resume()
        run.wait_for_steps(run.figures()["agent_steps"] + 1000)
        assert run.named("actor-1").pid == frozen.pid

        result.refusals["in use"] = running.refused(
            running.command(logdir, *flags, "--num_steps=5")
        )
        # As a scheduler does that takes a machine away: everybody at once, the launcher last.
        for worker in run.look():
            worker.send_signal(signal.SIGTERM)
        run.signal(signal.SIGTERM)
        run.wait_until_gone(running.END)
        result.first_summary = run.summary()

        result.files_before = contents(logdir)
        for name, other in {
            "seed": ["--seed=7"],
            "agent_options": ["--agent_option=learning_rate=0.5"],
            "num_actors": ["--num_actors=1"],
        }.items():
            result.refusals[name] = running.refused(running.command(logdir, *flags, *other))
        result.files_after = contents(logdir)

        result.limit = result.first_summary["agent_steps"] + MORE
        again = result.resumed = stack.enter_context(
            running.started(logdir, *flags, f"--num_steps={result.limit}")
        )
        again.wait_until_gone(running.START)
        yield result


def test_a_killed_actor_is_replaced_with_other_seeds(story):
    spied = story.stopped.logdir.parent / "spied"
    made = [fact for fact in environments.told(spied, "made") if fact["process"] == "actor-0"]
    # One run with a restart, and one that resumed: three processes of 4 environments.
    by_pid: dict[int, set[int]] = {}
    for fact in made:
        by_pid.setdefault(fact["pid"], set()).add(fact["seed"])
    assert [len(seeds) for seeds in by_pid.values()] == [4, 4, 4]
    first, second, _ = by_pid.values()
    assert not first & second
    assert [fact["restarts"] for fact in made[:8]] == ["0"] * 4 + ["1"] * 4


def test_sigterm_to_every_process_ends_with_its_code_after_a_final_checkpoint(story):
    assert story.stopped.process.returncode == 143, story.stopped.text()
    assert story.first_summary["exit_reason"] == "stopped"
    assert not story.stopped.left()
    assert "Traceback" not in story.stopped.text()
    # That the checkpoint is the summary's is what the resumed run's counters rest on.
    assert story.first_summary["learner_updates"] in story.resumed.checkpoints()


def test_a_run_that_goes_on_counts_on(story):
    before, after = story.first_summary, story.resumed.summary()
    assert story.resumed.process.returncode == 0, story.resumed.text()
    assert after["exit_reason"] == "num_steps"
    assert story.limit <= after["agent_steps"] <= story.limit + ROWS * UNROLL
    for counter in ("episodes", "learner_updates", "wall_seconds"):
        assert after[counter] > before[counter], counter
    # Whole games from the start of each run: at most one of each environment is lost in between.
    games = after["agent_steps"] / 9
    assert games - 3 * ROWS <= after["episodes"] <= games
    assert story.resumed.checkpoints()[-1] == after["learner_updates"]
    # Updates are counted on too. A batch is 8 unrolls; of 10 steps in one, 9 are agent steps and
    # one leads from an episode to the next.
    updates = MORE / 9 * 10 / (8 * UNROLL)
    assert after["learner_updates"] - before["learner_updates"] <= updates + 1


def test_a_run_with_another_configuration_is_refused_and_nothing_is_overwritten(story):
    assert "seed=0" in story.refusals["seed"] and "seed=7" in story.refusals["seed"]
    assert "agent_options.learning_rate" in story.refusals["agent_options"]
    assert "num_actors=2" in story.refusals["num_actors"]
    assert story.files_after == story.files_before


def test_a_folder_in_use_is_refused(story):
    assert "another run is using it" in story.refusals["in use"]


def test_what_may_change_is_kept_beside_the_first_configuration(story):
    logdir = story.resumed.logdir
    assert json.loads((logdir / "config.json").read_text())["num_steps"] == 1_000_000_000
    resumed = json.loads((logdir / "config.resumed-1.json").read_text())
    assert resumed["num_steps"] == story.limit
    assert not (logdir / "config.resumed-2.json").exists()
