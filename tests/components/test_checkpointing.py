"""A checkpoint is whole or not there, holds everything exactly, and fits or is refused."""

import os
import pathlib
import random
import resource
import signal
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seedlib
from seedlib.agents import vtrace
from seedlib.components import checkpointing, configs, learner
from tests.components import learning

ROOT = str(pathlib.Path(seedlib.__file__).parents[1])


class State(NamedTuple):
    params: dict
    optimizer: tuple
    updates: np.ndarray


def make_state(number=0, shape=(2, 3)):
    """A state all of whose numbers are `number`."""
    return State(
        params={"mlp/~/linear_0": {"w": np.full(shape, number, np.float32)}},
        optimizer=((), [np.full((4,), number, np.float32)]),
        updates=np.array(number, np.int32),
    )


def assert_all(state, number):
    for leaf in jax.tree.leaves(state):
        assert (leaf == number).all()


@pytest.fixture
def open_in():
    """`open_in(directory, keep=3) -> Checkpointer`, closed after the test."""
    opened = []

    def make(directory, **options):
        opened.append(checkpointing.Checkpointer(directory, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
        one.close()


def save(checkpointer, number, **counters):
    checkpoint = checkpointing.Checkpoint(make_state(number), {"updates": number, **counters})
    checkpointer.save(number, checkpoint)


def test_there_is_nothing_before_the_first(tmp_path, open_in):
    checkpointer = open_in(tmp_path / "deep" / "checkpoints")
    assert checkpointer.latest() is None
    assert checkpointer.restore(make_state()) is None


def test_the_newest_is_restored_by_another_process(tmp_path, open_in):
    one = open_in(tmp_path)
    for number in (3, 20, 100):
        save(one, number)
    # The newest by number, not by name.
    other = open_in(tmp_path)
    assert other.latest() == 100
    restored = other.restore(make_state())
    assert_all(restored.state, 100)
    assert isinstance(restored.state, State)
    assert restored.counters == {"updates": 100}


def test_leaves_of_every_type_are_exact(tmp_path, open_in):
    rng = np.random.default_rng(0)
    types = [np.bool_, np.uint8, np.int8, np.uint32, np.int32, np.int64, np.float16, np.float64]
    state = {str(np.dtype(dtype)): rng.integers(0, 2, (3, 2)).astype(dtype) for dtype in types}
    bits = rng.integers(0, 2**32, 1000, np.uint32)
    state["float32"] = np.where(np.isnan(bits.view(np.float32)), 0, bits).view(np.float32)
    state["bfloat16"] = np.asarray(jnp.arange(5, dtype=jnp.bfloat16))
    state["nothing"] = ((), {}, [np.float32(0.1)])
    state["on a device"] = jnp.arange(3.0)
    open_in(tmp_path).save(1, checkpointing.Checkpoint(state, {}))
    restored = open_in(tmp_path).restore(state).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for got, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


def test_counters_are_exact(tmp_path, open_in):
    # 2**53 + 1 is the first integer that a double cannot hold.
    counters = {"updates": 2**53 + 1, "steps": 2**70, "wall": 0.1 + 0.2, "returns": [1.5, -2.0]}
    counters["nested"] = {"a": None, "b": "text", "c": True}
    one = open_in(tmp_path)
    one.save(2**53 + 1, checkpointing.Checkpoint(make_state(), counters))
    restored = open_in(tmp_path).restore(make_state()).counters
    assert restored == counters
    assert type(restored["updates"]) is int
    assert one.latest() == 2**53 + 1


@pytest.mark.parametrize("keep", [1, 3])
def test_as_many_as_asked_for_are_kept(tmp_path, open_in, keep):
    one = open_in(tmp_path, keep=keep)
    for number in range(1, 8):
        save(one, number)
    assert sorted(os.listdir(tmp_path)) == [str(number) for number in range(8 - keep, 8)]


def test_one_that_exists_is_not_overwritten(tmp_path, open_in):
    save(open_in(tmp_path), 5, first=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    one = open_in(tmp_path)
    one.save(5, checkpointing.Checkpoint(make_state(6), {"first": False}))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert open_in(tmp_path).restore(make_state()).counters["first"]


def test_what_a_crash_left_behind_does_not_disturb_and_is_removed(tmp_path, open_in):
    one = open_in(tmp_path)
    save(one, 5)
    one.close()
    # As orbax names them: a checkpoint that was being written, newer than any whole one.
    for name in ("6.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp-1700000000000000"):
        (tmp_path / name / "state.orbax-checkpoint-tmp").mkdir(parents=True)
    again = open_in(tmp_path)
    assert again.latest() == 5
    assert_all(again.restore(make_state()).state, 5)
    save(again, 6)
    assert sorted(os.listdir(tmp_path)) == ["5", "6"]


REFUSED = {
    "another shape": (
        make_state(shape=(2, 4)),
        r"params\.mlp/~/linear_0\.w is float32 \(2, 3\) there, float32 \(2, 4\) here",
    ),
    "another rank": (
        make_state(shape=(2, 3, 1)),
        r"params\.mlp/~/linear_0\.w is float32 \(2, 3\) there, float32 \(2, 3, 1\) here",
    ),
    "another type": (
        make_state()._replace(updates=np.zeros((), np.int64)),
        r"updates is int32 \(\) there, int64 \(\) here",
    ),
    "one leaf less": (
        make_state()._replace(optimizer=((), [])),
        r"optimizer\.1\.0 is float32 \(4,\) there, missing here",
    ),
    "one leaf more": (
        make_state()._replace(params={**make_state().params, "b": np.zeros(3, np.float32)}),
        r"params\.b is missing there, float32 \(3,\) here",
    ),
    "something else": ({"x": np.zeros(3)}, r"optimizer\.1\.0 is float32 \(4,\) there"),
}


@pytest.mark.parametrize("like", REFUSED)
def test_the_state_of_another_agent_is_refused_in_one_line(tmp_path, open_in, like):
    save(open_in(tmp_path), 5)
    state, message = REFUSED[like]
    with pytest.raises(checkpointing.CheckpointError, match=message) as error:
        open_in(tmp_path).restore(state)
    assert str(error.value).startswith(f"{tmp_path}/5 does not fit this agent's training state: ")
    assert "\n" not in str(error.value)


def test_a_checkpoint_that_was_damaged_is_refused_in_one_line(tmp_path, open_in):
    save(open_in(tmp_path), 5)
    for path in (tmp_path / "5" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(
        checkpointing.CheckpointError, match=f"{tmp_path}/5 cannot be read"
    ) as error:
        open_in(tmp_path).restore(make_state())
    assert "\n" not in str(error.value)


def test_a_disk_that_is_full_is_an_error_and_leaves_the_older_ones(tmp_path, open_in):
    one = open_in(tmp_path)
    save(one, 5)
    large = np.random.default_rng(0).normal(size=500_000)
    state = make_state()._replace(params={"mlp/~/linear_0": {"w": large}})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # To a process the end of a disk and of what it may write are the same but for the number.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(checkpointing.CheckpointError, match=f"{tmp_path}/6") as error:
            one.save(6, checkpointing.Checkpoint(state, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(error.value)
    assert one.latest() == 5
    assert_all(one.restore(make_state()).state, 5)
    # Once there is room, it goes on.
    one.save(7, checkpointing.Checkpoint(state, {}))
    assert open_in(tmp_path).latest() == 7


_SAVE = """
import itertools, sys
import numpy as np
import psutil
from seedlib.components import checkpointing
from tests.components import test_checkpointing as here
directory, size = sys.argv[1], int(sys.argv[2])
one = checkpointing.Checkpointer(directory)
for number in itertools.count((one.latest() or 0) + 1):
    state = here.make_state(number, (size, 250_000))
    one.save(number, checkpointing.Checkpoint(state, {"updates": number}))
    print(number, psutil.Process().memory_info().rss, flush=True)
"""


def saving(directory, megabytes):
    """A process that saves states of so many megabytes, numbered from the newest on, for ever."""
    return subprocess.Popen(
        [sys.executable, "-c", _SAVE, str(directory), str(megabytes)],
        env={**os.environ, "PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def kill_in_the_middle(tmp_path, open_in, kills):
    """Kills a saving process at random moments; each time the newest checkpoint must be whole."""
    moments = random.Random(0)
    saved, found = 0, 0
    for _ in range(kills):
        process = saving(tmp_path, 20)
        try:
            # Once a first one is saved, somewhere in the next ones (a save takes about 0.05 s).
            assert process.stdout.readline(), "the process has ended"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(moments.uniform(0.0, 0.4))
        finally:
            process.send_signal(signal.SIGKILL)
            lines, _ = process.communicate(timeout=learning.PATIENCE)
        saved = max([found + 1, *(int(line.split()[0]) for line in lines.splitlines())])
        checkpointer = open_in(tmp_path)
        found = checkpointer.latest()
        # The next one may have been whole already, and not yet told of.
        assert found in (saved, saved + 1)
        restored = checkpointer.restore(make_state(shape=(20, 250_000)))
        assert restored.counters == {"updates": found}
        assert_all(restored.state, found)


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(tmp_path, open_in):
    kill_in_the_middle(tmp_path, open_in, kills=2)


@pytest.mark.slow
def test_ten_kills_in_the_middle_of_a_save_leave_the_one_before(tmp_path, open_in):
    kill_in_the_middle(tmp_path, open_in, kills=10)


def memory_after(tmp_path, megabytes, saves):
    """The resident memory, in bytes, of a process after each of so many saves."""
    process = saving(tmp_path, megabytes)
    try:
        lines = [process.stdout.readline().split() for _ in range(saves)]
    finally:
        process.kill()
        process.communicate(timeout=learning.PATIENCE)
    assert [int(number) for number, _ in lines] == list(range(1, saves + 1))
    return [int(rss) for _, rss in lines]


def test_memory_does_not_grow_with_saves(tmp_path):
    memory = memory_after(tmp_path, 20, 30)
    # One copy of the state that stayed with each save would be 500 MB more.
    assert memory[29] < 1.15 * max(memory[5:10])


@pytest.mark.slow
def test_memory_does_not_grow_with_sixty_saves_of_fifty_megabytes(tmp_path):
    memory = memory_after(tmp_path, 50, 60)
    assert memory[59] < 1.15 * memory[9]


def agent_of(name):
    if name == "tiny":
        return learning.tiny_agent(noise=0.1)
    config = vtrace.Config(
        batch_size=4, unroll_length=2, hidden_sizes=(8,), learning_rate_schedule="linear",
        schedule_steps=150, max_gradient_norm=0.5,
    )  # fmt: skip
    return vtrace.make_agent(learning.SPEC, config)


@pytest.mark.parametrize("name", ["tiny", "vtrace"])
def test_a_restored_learner_goes_on_bit_by_bit(tmp_path, open_in, name):
    # 200 updates in one go are 100, a checkpoint, and 100 more on the same data by a fresh learner
    # that had done other things before it was restored.
    samples = learning.make_samples(200)
    agent = agent_of(name)

    def make_learner(samples):
        source = learning.Source(samples)
        config = configs.LearnerConfig(seed=3)
        return learner.Learner(agent, source, learning.ONE_DEVICE, config=config)

    first = make_learner(samples)
    first.run(100)
    half = first.save()
    counters = {"updates": half.updates, "skipped_updates": half.skipped_updates}
    open_in(tmp_path).save(half.updates, checkpointing.Checkpoint(half.state, counters))
    first.run(100)
    straight = first.save()
    first.close()

    second = make_learner([*samples[:7], *samples[100:]])
    second.run(7)
    checkpoint = open_in(tmp_path).restore(second.save().state)
    second.restore(learner.LearnerState(checkpoint.state, **checkpoint.counters))
    second.run(100)
    resumed = second.save()
    second.close()

    assert (half.updates, resumed.updates) == (100, 200)
    assert jax.tree.structure(resumed.state) == jax.tree.structure(straight.state)
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(straight.state), strict=True):
        assert a.tobytes() == b.tobytes()
