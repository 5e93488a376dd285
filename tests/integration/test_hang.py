"""Test of a run in which an environment does not come back."""

from tests.integration import running


def test_an_actor_whose_environment_hangs_is_replaced_and_the_others_go_on(tmp_path):
    with running.started(
        tmp_path / "run",
        "--env=tests.integration.environments:hanging",
        "--num_actors=2",
        "--environment_timeout=2",
        "--num_steps=1000000000",
    ) as run:
        run.wait_for_steps(1)
        hung = run.named("actor-0")
        replaced = running.wait_until(
            lambda: [
                worker
                for worker in run.look()
                if running.title_of(worker) == "actor-0" and worker.pid != hung.pid
            ],
            running.START,
            "the actor's restart",
        )
        assert len(replaced) == 1
        # Both actors act: the other one alone would keep the number of sessions at 1.
        running.wait_until(
            lambda: run.figures().get("inference_sessions") == 2, running.START, "both sessions"
        )
        assert "has not come back for 2 s" in (
            next((tmp_path / "run" / "failures").iterdir()).read_text()
        )
        assert "environments.py" in run.log("actor-0")  # Where it hangs, by the stacks.
        run.signal(15)
        assert run.wait(running.END) == 128 + 15
        run.wait_until_gone(running.END)
