"""Tests of programs in which something fails: all of them run side by side to their end."""

import contextlib
import signal

import pytest

from tests.integration import running

# What each program is given, and which process it must name.
PROGRAMS = {
    "environment": (["--env=tests.integration.environments:broken", "--max_restarts=1"], "actor-0"),
    "reward": (
        ["--env=tests.integration.environments:not_a_number", "--max_restarts=0"],
        "actor-0",
    ),
    "loss": (["--agent=tests.integration.agents:failing_loss"], "learner-0"),
    "policy": (["--agent=tests.integration.agents:failing_policy"], "learner-0"),
    "batch": (["--inference_devices=1"], "learner-0"),
    "learner killed": ([], "learner-0"),
}
# What the original exception says, where there is one.
MESSAGES = {
    "environment": "RuntimeError: the simulator has lost its ball",
    "reward": "SpecError: reward is not finite",
    "loss": "RuntimeError: the loss is at a loss",
    "policy": "RuntimeError: the policy is out of ideas",
    "batch": "ValueError: batch_size 8 cannot be divided among 3 training devices",
}
# Of four devices one infers, and three cannot share a batch of eight.
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("failures")
    with contextlib.ExitStack() as stack:
        programs = {
            name: stack.enter_context(
                running.started(
                    folder / name.replace(" ", "-"),
                    "--num_steps=1000000000",
                    *arguments,
                    variables=DEVICES if name == "batch" else None,
                )
            )
            for name, (arguments, _) in PROGRAMS.items()
        }
        killed = programs["learner killed"]
        killed.wait_for_steps(200)
        killed.named("learner-0").send_signal(signal.SIGKILL)
        killed.wait_until_gone(running.END)
        for program in programs.values():
            program.wait_until_gone(running.START)
        yield programs


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_failure_ends_the_program_and_its_last_line_names_the_process(failed, name):
    program = failed[name]
    assert program.process.returncode == 1, program.text()
    assert not program.left()
    last = program.last_lines()[0]
    process = PROGRAMS[name][1]
    assert last.startswith(f"error: {process} "), program.text()
    assert last.endswith(f"{process}.log")


@pytest.mark.parametrize("name", MESSAGES)
def test_the_first_traceback_is_what_the_user_sees_last(failed, name):
    program = failed[name]
    # After the last line of progress comes one report, of one node, with the original traceback.
    shown = program.text().rpartition(" failed:\n")[2]
    assert "Traceback (most recent call last):" in shown
    assert MESSAGES[name] in shown
    # Down to the user's own line, where it is a user's line that raised.
    assert "tests/integration/" in shown or name in ("reward", "batch")


@pytest.mark.parametrize("name", ["loss", "batch"])
def test_the_last_line_says_what_was_wrong(failed, name):
    assert MESSAGES[name] in failed[name].last_lines()[0]


def test_a_process_that_was_killed_is_named_with_its_signal(failed):
    assert "SIGKILL" in failed["learner killed"].last_lines()[0]


@pytest.mark.parametrize("name", ["environment", "reward", "policy", "learner killed"])
def test_the_summary_says_that_the_run_failed(failed, name):
    summary = failed[name].summary()
    assert summary["exit_reason"] == "failed"
    assert summary["agent_steps"] > 0


def test_a_learner_beside_failing_inference_still_writes_its_checkpoint(failed):
    program = failed["policy"]
    assert program.checkpoints()[-1] == program.summary()["learner_updates"]


def test_a_broken_actor_is_started_again_before_the_run_fails(failed):
    program = failed["environment"]
    assert "actor-0 exited with code 1; restart in 0.5 s" in program.text()
    # One failure of each of the two starts was recorded.
    assert len(list((program.logdir / "failures").glob("*actor*"))) == 2
