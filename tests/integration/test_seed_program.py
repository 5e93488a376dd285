"""Tests of a SEED program from its start to its step limit, as processes and as threads.

Both run at the same time on one machine, so that each would meet the other's traffic.
"""

import contextlib
import csv
import json

import psutil
import pytest

from tests.integration import environments, running

STEPS = 70_000
THREAD_STEPS = 6_000
ACTORS, ENVIRONMENTS, UNROLL, BATCH = 2, 16, 20, 8

FIELDS = {
    "agent_steps",
    "environment_frames",
    "episodes",
    "return_mean_100",
    "learner_updates",
    "steps_per_second",
    "policy_lag_mean",
    "policy_lag_max",
    "inference_batch_mean",
    "wall_seconds",
    "exit_reason",
}


class Ran:
    """What is known of the two programs when both have ended."""

    processes: running.Program
    threads: running.Program
    listening: dict[str, list[str]]
    seconds_to_end: float


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed")
    spied = folder / "spied"
    spied.mkdir()
    result = Ran()
    with contextlib.ExitStack() as stack:
        result.processes = stack.enter_context(
            running.started(
                folder / "processes",
                "--env=tests.integration.environments:spy",
                f"--env_option=directory={spied}",
                f"--num_actors={ACTORS}",
                f"--envs_per_actor={ENVIRONMENTS}",
                f"--agent_option=batch_size={BATCH}",
                "--agent_option=learning_rate=2e-3",
                "--num_evaluators=1",
                "--evaluation_episodes=7",
                "--evaluation_period=0.1",
                f"--num_steps={STEPS}",
            )
        )
        result.threads = stack.enter_context(
            running.started(
                folder / "threads", f"--num_steps={THREAD_STEPS}", "--lp_launch_type=test_mt"
            )
        )
        result.processes.wait_for_steps(1000)
        workers = result.processes.look()
        result.listening = {running.title_of(worker): listens(worker) for worker in workers}
        summary = result.processes.logdir / "summary.json"
        running.wait_until(summary.exists, 300.0, f"the summary; {result.processes.text()}")
        result.seconds_to_end = result.processes.wait_until_gone(running.END)
        result.threads.wait_until_gone(300.0)
        yield result


def listens(worker: psutil.Process) -> list[str]:
    connections = worker.net_connections(kind="inet")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN]


@pytest.mark.parametrize("way", ["processes", "threads"])
def test_a_program_ends_by_itself_at_its_step_limit(ran, way):
    program = getattr(ran, way)
    limit = STEPS if way == "processes" else THREAD_STEPS
    rows = ACTORS * ENVIRONMENTS if way == "processes" else 8
    summary = program.summary()
    assert program.process.returncode == 0, program.text()
    assert summary["exit_reason"] == "num_steps"
    assert limit <= summary["agent_steps"] <= limit + rows * UNROLL
    # One frame per step here, and a game of catch has 9 transitions; one of every environment may
    # be under way.
    assert summary["environment_frames"] == summary["agent_steps"]
    assert 0 <= summary["agent_steps"] - 9 * summary["episodes"] <= 9 * rows


@pytest.mark.parametrize("way", ["processes", "threads"])
def test_a_program_leaves_everything_a_user_wants(ran, way):
    program = getattr(ran, way)
    summary = program.summary()
    assert set(summary) >= FIELDS
    assert None not in [summary[field] for field in FIELDS]
    # Rates are over wall time, and every unroll is trained on once.
    rate = summary["agent_steps"] / summary["wall_seconds"]
    assert summary["steps_per_second"] == pytest.approx(rate, rel=1e-3)
    assert summary["transitions_trained"] <= BATCH * UNROLL * summary["learner_updates"]
    assert program.checkpoints()[-1] == summary["learner_updates"] > 0
    assert (program.logdir / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((program.logdir / "tensorboard").glob("events.out.tfevents.*"))
    assert int(program.rows()[-1]["agent_steps"]) == summary["agent_steps"]
    config = json.loads((program.logdir / "config.json").read_text())
    assert config["agent_options"]["batch_size"] == BATCH
    assert config["seed"] == 0
    assert "curve.png" in program.text() and "summary.json" in program.text()
    assert "Traceback" not in program.text()
    assert not (program.logdir / "failures").exists()


def test_no_process_and_no_port_is_left(ran):
    assert len(ran.processes.workers) >= 1 + ACTORS + 1
    assert not ran.processes.left()
    taken = [c for c in psutil.net_connections(kind="inet") if c.pid in ran.processes.workers]
    assert not taken


def test_processes_listen_to_this_machine_only(ran):
    # gRPC binds 127.0.0.1 by a socket of the newer protocol, which shows as the last of these.
    local = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    learner = ran.listening["learner-0"]
    assert not any(ran.listening[name] for name in ran.listening if name != "learner-0")
    assert set(learner) & local
    # Known: Reverb's server binds `[::]` and has no setting for it, so its one port is open.
    assert len([address for address in learner if address not in local]) <= 1


def test_an_actor_holds_neither_jax_nor_tensorflow_nor_reverb_and_little_memory(ran):
    spied = ran.processes.logdir.parent / "spied"
    facts = environments.told(spied, "stepped")
    assert {fact["process"] for fact in facts} == {"actor-0", "actor-1", "evaluator-0"}
    for fact in facts:
        loaded = {module.partition(".")[0] for module in fact["modules"]}
        assert not loaded & {"jax", "jaxlib", "tensorflow", "reverb", "haiku", "rlax", "optax"}
        assert fact["rss"] < 150e6, f"{fact['process']}: {fact['rss'] / 1e6:.0f} MB"


def test_every_environment_has_a_seed_of_its_own(ran):
    spied = ran.processes.logdir.parent / "spied"
    made = [fact for fact in environments.told(spied, "made") if fact["process"]]
    assert len(made) == ACTORS * ENVIRONMENTS + 1
    assert len({fact["seed"] for fact in made}) == len(made)


def test_every_environment_is_closed_at_the_end(ran):
    spied = ran.processes.logdir.parent / "spied"
    closed = [fact for fact in environments.told(spied, "closing") if fact["process"]]
    assert len(closed) == ACTORS * ENVIRONMENTS + 1


def test_evaluation_plays_the_episodes_asked_for_and_never_reaches_training(ran):
    with open(ran.processes.logdir / "evaluator-0.csv") as file:
        rounds = list(csv.DictReader(file))
    assert rounds
    assert {row["episodes"] for row in rounds} == {"7"}
    # The spy pays this for every evaluated episode, won or lost.
    assert {float(row["return_min"]) for row in rounds} == {environments.EVALUATION_REWARD}
    summary = ran.processes.summary()
    assert summary["evaluation_return_mean_100"] == environments.EVALUATION_REWARD
    assert summary["evaluation_episodes"] > 0
    assert -1.0 <= summary["return_mean_100"] <= 1.0
    values = [float(row["target"]) for row in ran.processes.rows() if row.get("target")]
    # Targets of rewards in -1..1 at the end of an episode lie there too, up to the value's error.
    assert values and max(map(abs, values)) < 10.0


def test_a_program_learns(ran):
    # A paddle that moves at random catches two balls in ten or so: a mean return of -0.6.
    assert ran.processes.summary()["return_mean_100"] >= 0.5
