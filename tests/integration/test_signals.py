"""Tests of programs that are told to end from outside: all of them run side by side.

Each is started and then, when it trains (or before), gets its signals; the tests look at what is
left.
"""

import contextlib
import signal

import pytest

from tests.integration import environments, running

ENDLESS = "--num_steps=1000000000"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    spied = folder / "spied"
    spied.mkdir()
    slow = [
        "--env=tests.integration.environments:spy",
        "--env_option=close_seconds=60",
        "--envs_per_actor=1",
        f"--env_option=directory={spied}",
    ]
    evaluated = [
        "--env=tests.integration.environments:broken_in_evaluation",
        "--num_evaluators=1",
        "--evaluation_period=0.1",
        "--max_restarts=0",
    ]
    flags = {
        "early": [],
        "hang-up": [],
        "ctrl-c": evaluated,
        "ctrl-c twice": slow,
        "orphaned": [],
    }
    with contextlib.ExitStack() as stack:
        programs = {
            name: stack.enter_context(
                running.started(
                    folder / name.replace(" ", "-"), ENDLESS, *more, terminal=name == "hang-up"
                )
            )
            for name, more in flags.items()
        }

        # While the processes load their libraries.
        early = programs["early"]
        running.wait_until(lambda: len(early.look()) == 2, running.START, early.text())
        early.signal(signal.SIGTERM)

        # The window with the live line is closed.
        hung = programs["hang-up"]
        hung.wait_for_steps(500)
        hung.look()
        hung.close_terminal()
        hung.wait_until_gone(running.END)

        orphaned = programs["orphaned"]
        orphaned.wait_for_steps(500)
        orphaned.look()
        orphaned.process.kill()
        orphaned.wait_until_gone(running.END)

        # With 60 s to wait for its environment, only the second Ctrl-C can end it so soon.
        twice = programs["ctrl-c twice"]
        twice.wait_for_steps(1)
        twice.signal(signal.SIGINT)
        closing = lambda: [f for f in environments.told(spied, "closing") if f["process"]]
        running.wait_until(closing, running.END, "an actor that ends")
        twice.signal(signal.SIGINT)
        twice.wait_until_gone(5.0)

        interrupted = programs["ctrl-c"]
        interrupted.wait_for_steps(500)
        left_out = lambda: "goes on without it" in interrupted.text()
        running.wait_until(left_out, running.START, interrupted.text())
        interrupted.wait_for_steps(interrupted.figures()["agent_steps"] + 500)
        interrupted.signal(signal.SIGINT)
        interrupted.wait_until_gone(running.END)

        early.wait_until_gone(running.END)
        yield programs


@pytest.mark.parametrize("name", ["early", "hang-up", "ctrl-c", "ctrl-c twice", "orphaned"])
def test_no_process_is_left(ended, name):
    program = ended[name]
    assert len(program.workers) >= 2
    assert not program.left()


@pytest.mark.parametrize(
    ("name", "code"),
    [("early", 143), ("hang-up", 129), ("ctrl-c", 130), ("ctrl-c twice", 130), ("orphaned", -9)],
)
def test_the_exit_code_says_which_signal_it_was(ended, name, code):
    program = ended[name]
    assert program.process.returncode == code, program.text()
    assert "Traceback" not in program.text()


@pytest.mark.parametrize("name", ["hang-up", "ctrl-c", "orphaned"])
def test_a_stopped_run_leaves_a_final_checkpoint_and_a_summary(ended, name):
    # Also where the launcher was killed: its processes notice, and end as they should.
    program = ended[name]
    summary = program.summary()
    assert summary["exit_reason"] == "stopped"
    assert program.checkpoints()[-1] == summary["learner_updates"] > 0
    assert not list((program.logdir / "failures").glob("*learner*"))


def test_a_second_ctrl_c_kills_what_does_not_end(ended):
    program = ended["ctrl-c twice"]
    assert "ended by SIGINT" in program.last_lines()[0]


def test_a_broken_evaluator_does_not_end_training(ended):
    program = ended["ctrl-c"]
    assert "evaluator-0" in program.text()
    # It was left out, the run went on, and the user's Ctrl-C is what ended it.
    assert program.process.returncode == 130
    assert "the simulator has lost its ball" in program.log("evaluator-0")
