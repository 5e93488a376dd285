"""Tests of several SEED programs, one after the other, in one process of a user's own."""

import json
import subprocess
import sys
import textwrap

import pytest

from tests.integration import running

# A user's sweep: two runs as threads, then one as processes, without a command line.
SWEEP = textwrap.dedent(
    """
    import json, pathlib, signal, sys, threading

    from programs import experiment as experiment_lib
    from programs import seed
    from seedlib import environments, run_directory, specs
    from seedlib.agents import loading

    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)


    def state():
        handlers = [str(signal.getsignal(number)) for number in NUMBERS]
        return {"handlers": handlers, "threads": sorted(t.name for t in threading.enumerate())}


    def run(name, launch_type, number):
        environment = environments.load("catch")
        spec = specs.make_environment_spec(environment(seed=0))
        experiment = experiment_lib.Experiment(
            program="seed",
            environment=environment,
            agent=loading.AgentFactory("vtrace", spec, {"batch_size": 8}),
            directory=run_directory.RunDirectory(folder / name),
            num_actors=1,
            envs_per_actor=8,
            num_steps=1500,
            seed=number,
        )
        return experiment_lib.launch(seed.seed(experiment), experiment, launch_type)


    folder = pathlib.Path(sys.argv[1])
    states, summaries = [state()], []
    for number, launch_type in enumerate(["local_mt", "test_mt", "local_mp"]):
        summaries.append(run(f"run-{number}", launch_type, number))
        states.append(state())
    (folder / "told.json").write_text(json.dumps({"states": states, "summaries": summaries}))
    """
)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    script = folder / "sweep.py"
    script.write_text(SWEEP)
    result = subprocess.run(
        [sys.executable, script, folder],
        cwd=running.ROOT,
        env=running.surroundings(),
        capture_output=True,
        text=True,
        timeout=3 * running.START,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads((folder / "told.json").read_text())


def test_every_run_goes_to_its_own_end(told):
    assert [summary["exit_reason"] for summary in told["summaries"]] == ["num_steps"] * 3
    for summary in told["summaries"]:
        assert 1500 <= summary["agent_steps"] <= 1500 + 8 * 20
        assert summary["signal"] == 0


def test_signal_handlers_and_threads_are_as_before_after_every_run(told):
    first, *others = told["states"]
    for state in others:
        assert state == first
