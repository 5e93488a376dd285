"""Tests that SEED with V-trace learns to the full targets, through its processes; minutes each."""

import pytest

from tests.integration import running

pytestmark = pytest.mark.slow

# Environment, return to reach, and agent steps within which it is reached.
TARGETS = [
    ("catch", 0.95, 500_000),
    ("gymnasium:CartPole-v1", 475.0, 1_500_000),
]


@pytest.mark.parametrize(("environment", "target", "steps"), TARGETS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_seed_learns(tmp_path, environment, target, steps, seed):
    # What a user gets who names the environment and nothing else, so no settings of the tests.
    flags = [f"--env={environment}", f"--num_steps={steps}", f"--seed={seed}"]
    with running.started(tmp_path / "run", *flags, small=()) as program:
        program.wait_until_gone(3600.0)
        best = max(
            float(row["return_mean_100"])
            for row in program.rows()
            if row["return_mean_100"] and int(row["agent_steps"]) <= steps
        )
        assert program.process.returncode == 0, program.text()
        assert best >= target
