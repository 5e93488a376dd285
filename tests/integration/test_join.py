"""Tests of actors that join a run by hand, through real processes."""

import contextlib
import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from tests.integration import running

# More than one actor brings between two looks at the figures.
STEPS = 15_000


@contextlib.contextmanager
def joined(logdir: pathlib.Path, output: pathlib.Path):
    """Starts one more actor for a run, and leaves nothing of it behind."""
    with open(output, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "programs.join", f"--logdir={logdir}"],
            cwd=running.ROOT,
            env=running.surroundings(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    program = running.Program(process, logdir, output)
    try:
        yield program
    finally:
        program.kill()


def actor_of(join: running.Program) -> psutil.Process:
    """Waits for the process of the actor that joins, and returns it."""

    def there() -> list[psutil.Process]:
        assert join.process.poll() is None, join.text()
        return [worker for worker in join.look() if running.title_of(worker) == "actor-1"]

    return running.wait_until(there, running.START, f"the actor; {join.text()}")[0]


def wait_for_steps_without_the_first(run: running.Program) -> None:
    """Waits for steps that are the joined actor's, since the run's own does not go on."""
    own = run.named("actor-0")
    own.suspend()
    try:
        run.wait_for_steps(run.figures()["agent_steps"] + STEPS, 2 * running.START)
    finally:
        own.resume()


def loaded(process: psutil.Process) -> set[str]:
    """Returns the binaries of libraries that a process has loaded, by path."""
    return {mapped.path for mapped in process.memory_maps() if "site-packages" in mapped.path}


@pytest.mark.parametrize(
    ("graph", "more"),
    [
        pytest.param("seed", ["--num_evaluators=1"], id="seed"),
        pytest.param("impala", [], id="impala", marks=pytest.mark.slow),
        pytest.param("inference_pool", [], id="inference_pool", marks=pytest.mark.slow),
    ],
)
def test_an_actor_joins_a_run_whose_steps_it_then_counts_and_leaves_it_as_it_is(
    tmp_path, graph, more
):
    logdir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(
            running.started(logdir, "--num_steps=1000000000", *more, module=f"programs.{graph}")
        )
        run.wait_for_steps(1000)
        assert (logdir / "running.json").stat().st_mode & 0o777 == 0o600

        # One that is killed leaves the run as it is.
        first = stack.enter_context(joined(logdir, tmp_path / "first"))
        actor = actor_of(first)
        wait_for_steps_without_the_first(run)
        heavy = [path for path in loaded(actor) if "/jaxlib/" in path or "/reverb/" in path]
        assert bool(heavy) == (graph == "impala")
        assert loaded(actor) == loaded(run.named("actor-0"))
        assert actor.environ()["SEEDLIB_RESTARTS"] == "0"
        actor.send_signal(signal.SIGKILL)
        assert first.wait(running.END) == 1
        assert first.last_lines()[0].startswith("error: actor-1 was ended by SIGKILL")
        run.wait_for_steps(run.figures()["agent_steps"] + STEPS)

        # So does one that leaves.
        second = stack.enter_context(joined(logdir, tmp_path / "second"))
        actor = actor_of(second)
        assert actor.environ()["SEEDLIB_RESTARTS"] == "1"
        second.signal(signal.SIGINT)
        assert second.wait(running.END) == 128 + signal.SIGINT
        assert second.last_lines() == ["Left the run."]

        # One that stays ends with the run.
        third = stack.enter_context(joined(logdir, tmp_path / "third"))
        actor_of(third)
        wait_for_steps_without_the_first(run)
        run.signal(signal.SIGTERM)
        assert third.wait(running.END) == 0, third.text()
        assert third.last_lines() == ["The run has ended."]
        third.wait_until_gone(running.END)
        assert run.wait(running.END) == 128 + signal.SIGTERM
        run.wait_until_gone(running.END)

        assert not (logdir / "running.json").exists()
        summary = run.summary()
        assert summary["exit_reason"] == "stopped"
        assert summary["agent_steps"] > 3 * STEPS
        # No two had environments of the same ids, and nobody of the run was started again.
        assert summary["inference_fenced_sessions"] == 0
        assert "restart" not in run.text()


def test_an_actor_that_joined_ends_with_a_run_that_reaches_its_step_limit_or_is_killed(tmp_path):
    with contextlib.ExitStack() as stack:
        limited, killed = (
            stack.enter_context(running.started(tmp_path / name, f"--num_steps={steps}"))
            for name, steps in (("limited", 200_000), ("killed", 1_000_000_000))
        )
        ends = []
        for run in (limited, killed):
            run.wait_for_steps(1)
            ends.append(stack.enter_context(joined(run.logdir, tmp_path / f"{run.logdir.name}.x")))
            actor_of(ends[-1])
        wait_for_steps_without_the_first(killed)
        killed.look()
        killed.process.kill()
        for join in (ends[1], ends[0]):
            assert join.wait(2 * running.START) == 0, join.text()
            assert join.last_lines() == ["The run has ended."]
            join.wait_until_gone(running.END)
        assert limited.wait(running.END) == 0, limited.text()
        assert limited.summary()["exit_reason"] == "num_steps"
        # What the killed launcher left behind does not pass for a run.
        killed.wait_until_gone(running.END)
        assert (killed.logdir / "running.json").exists()
