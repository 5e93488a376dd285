"""Tests of the other graphs: the same nodes in other processes."""

import signal
import subprocess
import sys

import pytest

from tests.integration import running

GRAPHS = ("seed", "impala", "inference_pool")


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_can_be_printed_without_being_started(graph, tmp_path):
    printed = subprocess.run(
        [sys.executable, "-m", f"programs.{graph}", "--env=catch", "--print_graph"],
        cwd=tmp_path,
        env={**running.surroundings(), "PYTHONPATH": str(running.ROOT)},
        check=True,
        capture_output=True,
        text=True,
        timeout=running.START,
    ).stdout
    assert printed.startswith("flowchart LR")
    # Where inference sits, and so which arrows cross a process, is all that differs.
    beside = {"seed": "learner", "impala": "actor", "inference_pool": "inference"}[graph]
    assert f'{beside}_inference["inference"]' in printed
    near, far = "-->", "-.->"
    to_learner = near if graph == "seed" else far
    to_inference = near if graph == "impala" else far
    assert f"{beside}_inference {to_learner} learner_learner" in printed
    assert f"{beside}_inference {to_learner} learner_trajectory_queue" in printed
    assert f"actor_actor {to_inference} {beside}_inference" in printed
    assert list(tmp_path.iterdir()) == []


def test_impala_learns_and_counts_across_processes(tmp_path):
    with running.started(
        tmp_path / "run",
        "--num_actors=2",
        "--num_steps=80000",
        "--num_evaluators=1",
        "--evaluation_period=1",
        module="programs.impala",
    ) as run:
        run.wait_for_steps(1)
        assert {running.title_of(worker) for worker in run.look()} >= {
            "learner-0",
            "actor-0",
            "actor-1",
            "evaluator-0",
        }
        assert run.wait(running.START) == 0, run.text()
        summary = run.summary()
        assert summary["exit_reason"] == "num_steps"
        # Reports come each tenth of a second, so the limit is passed by about as much.
        assert summary["agent_steps"] >= 80_000
        assert summary["inference_rows"] >= summary["agent_steps"]
        assert summary["learner_updates"] > 100
        assert summary["policy_lag_mean"] > 0
        assert summary["return_mean_100"] > 0.3
        assert (tmp_path / "run" / "evaluator-0.csv").exists()
        run.wait_until_gone(running.END)


def test_a_pool_goes_on_without_one_of_its_servers(tmp_path):
    with running.started(
        tmp_path / "run",
        "--num_actors=2",
        "--num_steps=1000000000",
        module="programs.inference_pool",
    ) as run:
        run.wait_for_steps(1000)
        dead = run.named("inference-0")
        dead.send_signal(signal.SIGKILL)
        steps = run.figures()["agent_steps"]
        run.wait_for_steps(steps + 20_000)
        running.wait_until(
            lambda: [
                worker
                for worker in run.look()
                if running.title_of(worker) == "inference-0" and worker.pid != dead.pid
            ],
            running.START,
            "the server's restart",
        )
        # And its actor goes back to it.
        running.wait_until(
            lambda: "is back at policy service 0" in run.log("actor-0"),
            running.START,
            "the actor's return",
        )
        run.wait_for_steps(run.figures()["agent_steps"] + 20_000)
        run.signal(signal.SIGTERM)
        assert run.wait(running.END) == 128 + signal.SIGTERM
        assert run.summary()["exit_reason"] == "stopped"
        run.wait_until_gone(running.END)


def test_two_lockstep_runs_with_one_seed_are_the_same(tmp_path):
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    summaries, states = [], []
    for name in ("one", "two"):
        with running.started(
            tmp_path / name, "--num_actors=2", "--num_steps=6000", module="programs.lockstep"
        ) as run:
            assert run.wait(running.START) == 0, run.text()
            summaries.append(run.summary())
            newest = tmp_path / name / "checkpoints" / str(run.checkpoints()[-1]) / "state"
            states.append(ocp.StandardCheckpointer().restore(newest))
            run.wait_until_gone(running.END)
    measured = {name for name in summaries[0] if name.endswith(("_seconds", "_per_second"))}
    first, second = (
        {name: value for name, value in summary.items() if name not in measured}
        for summary in summaries
    )
    assert first == second
    assert first["learner_updates"] > 20
    # The unrolls of 16 environments become whole together: two batches, of two updates before.
    assert first["policy_lag_max"] <= 3
    leaves = [jax.tree_util.tree_leaves(state) for state in states]
    assert len(leaves[0]) > 10
    for one, two in zip(*leaves, strict=True):
        np.testing.assert_array_equal(one, two)
