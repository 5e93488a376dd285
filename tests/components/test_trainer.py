"""A run ends for a reason that its summary tells, is saved, and goes on from where it was."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil

import numpy as np
import pytest

from seedlib import environments, run_directory, specs
from seedlib.agents import vtrace
from seedlib.components import actor as actor_lib
from seedlib.components import (
    checkpointing,
    configs,
    inference,
    learner,
    trainer,
    trajectory_queue,
)
from seedlib.components import episodes as episodes_lib
from tests.components import learning

SUMMARY = {
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


class Run:
    """A run's directory, and trainers in it one after the other."""

    def __init__(self, path, agent=None):
        self.directory = run_directory.RunDirectory(path)
        self.directory.prepare({})
        self.agent = agent or learning.tiny_agent()

    @contextlib.contextmanager
    def trainer(self, source=None, updates_in_flight=1, **config):
        """Yields a trainer; it is closed, twice, at the end."""
        one = trainer.Trainer(
            self.agent,
            source or learning.Source(),
            learning.ONE_DEVICE,
            self.directory,
            configs.TrainerConfig(**config),
            configs.LearnerConfig(seed=1, updates_in_flight=updates_in_flight),
        )
        try:
            yield one
        finally:
            one.close()
            one.close()

    @property
    def summary(self):
        def refuse(text):
            raise AssertionError(f"{text} is not JSON")

        text = pathlib.Path(self.directory.file("summary.json")).read_text()
        return json.loads(text, parse_constant=refuse)

    @property
    def checkpoints(self):
        return sorted(map(int, os.listdir(self.directory.file("checkpoints"))))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path / "run")


def episode(value, count=1):
    return episodes_lib.Episodes(
        environment_id=np.zeros(count, np.int32),
        returns=np.full(count, value, np.float64),
        lengths=np.full(count, 5, np.int64),
        evaluate=np.zeros(count, np.bool_),
    )


class Acting(learning.Source):
    """Endless batches; ten agent steps and one episode of return 2 are observed before each."""

    def __init__(self, batches=None, start=0):
        super().__init__(self._samples_of(batches, start))
        self.trainer = None

    def _samples_of(self, batches, start):
        for number, sample in enumerate(batches or self._for_ever(start)):
            self.trainer.observe(10, episode(2.0))
            yield (
                sample._replace(
                    unrolls=learning.make_unrolls(seed=number, version=max(0, number - 1))
                )
                if batches is None
                else sample
            )

    def _for_ever(self, start):
        while True:
            yield from learning.make_samples(3, seed=start)


def train(run, source=None, stop=lambda: False, **config):
    """Runs a trainer with an acting source to its end; returns it and why it ended."""
    source = source or Acting()
    with run.trainer(source, **config) as one:
        source.trainer = one
        reason = learning.Call(one.run, stop).result()
        return one, reason


def test_a_run_ends_at_its_steps(run):
    one, reason = train(run, num_steps=95, action_repeat=4)
    assert reason == "num_steps"
    summary = run.summary
    assert summary.keys() >= SUMMARY
    assert summary["exit_reason"] == "num_steps"
    # Ten at a time, so 100; and what the source observed after the end does not count.
    assert (summary["agent_steps"], summary["environment_frames"]) == (100, 400)
    assert (summary["episodes"], summary["return_mean_100"]) == (10, 2.0)
    assert summary["learner_updates"] == one.updates
    assert summary["skipped_updates"] == 0
    assert run.checkpoints[-1] == one.updates
    for name in ("steps_per_second", "wall_seconds"):
        assert summary[name] > 0.0
    rate = summary["agent_steps"] / summary["wall_seconds"]
    assert math.isclose(summary["steps_per_second"], rate, rel_tol=1e-6)


@pytest.mark.parametrize("updates_in_flight", [1, 3])
def test_a_run_that_is_told_to_stop_is_saved_at_its_last_update(run, updates_in_flight):
    with run.trainer(source := Acting(), updates_in_flight) as one:
        source.trainer = one
        assert learning.Call(one.run, lambda: one.updates >= 7).result() == "stopped"
        updates = one.updates
        state = one.learner.save().state
    assert updates >= 7
    summary = run.summary
    assert (summary["exit_reason"], summary["learner_updates"]) == ("stopped", updates)
    assert run.checkpoints == [updates]
    checkpointer = checkpointing.Checkpointer(run.directory.file("checkpoints"))
    restored = checkpointer.restore(state)
    checkpointer.close()
    np.testing.assert_array_equal(restored.state.params["w"], state.params["w"])
    assert int(restored.state.updates) == updates
    assert restored.counters["updates"] == updates


def test_the_lag_in_the_summary_is_that_of_the_batches(run):
    # Batch u is of version u - 1, but for the first.
    _, _ = train(run, num_steps=1000)
    summary = run.summary
    updates = summary["learner_updates"]
    assert summary["policy_lag_max"] == 1
    assert summary["policy_lag_mean"] == (updates - 1) / updates


def test_a_run_that_is_told_to_stop_before_it_began_has_a_summary(run):
    with run.trainer() as one:
        assert learning.Call(one.run, lambda: True).result() == "stopped"
    summary = run.summary
    assert summary.keys() >= SUMMARY
    for name in ("return_mean_100", "policy_lag_mean", "inference_batch_mean"):
        assert summary[name] is None
    assert (summary["agent_steps"], summary["learner_updates"]) == (0, 0)
    assert run.checkpoints == [0]


def test_a_return_that_is_no_number_is_null_in_the_summary(run):
    with run.trainer() as one:
        one.observe(1, episode(np.nan))
        learning.Call(one.run, lambda: True).result()
    assert run.summary["return_mean_100"] is None


def spoilt(sample):
    inputs = sample.unrolls.inputs
    inputs = inputs._replace(reward=np.full_like(inputs.reward, np.nan))
    return sample._replace(unrolls=sample.unrolls._replace(inputs=inputs))


def test_a_learner_that_fails_fails_the_run(run):
    good, *bad = learning.make_samples(4)
    with pytest.raises(learner.LearnerError, match="environment 0 is not finite at its step 0"):
        train(run, Acting([good, *map(spoilt, bad)]))
    summary = run.summary
    assert summary.keys() >= SUMMARY
    assert summary["exit_reason"] == "failed"
    assert (summary["learner_updates"], summary["skipped_updates"]) == (4, 3)


def test_a_source_that_fails_fails_the_run(run):
    class Broken(learning.Source):
        def __next__(self):
            raise OSError("the table burnt down")

    with pytest.raises(OSError, match="the table burnt down"), run.trainer(Broken()) as one:
        learning.Call(one.run).result()
    assert run.summary["exit_reason"] == "failed"


def test_a_last_checkpoint_that_cannot_be_written_fails_the_run(run):
    def stop():
        if one.updates < 3:
            return False
        # A file where the folder was.
        shutil.rmtree(run.directory.file("checkpoints"))
        pathlib.Path(run.directory.file("checkpoints")).touch()
        return True

    with run.trainer(source := Acting()) as one:
        source.trainer = one
        with pytest.raises(checkpointing.CheckpointError):
            learning.Call(one.run, stop).result()
    assert run.summary["exit_reason"] == "failed"


def test_progress_that_cannot_be_written_fails_the_run(run):
    os.mkdir(run.directory.file("progress.json"))
    with pytest.raises(OSError):
        train(run, report_period=0.01)
    assert run.summary["exit_reason"] == "failed"


def test_a_source_that_is_closed_early_fails_the_run_in_bounded_time(run, monkeypatch):
    monkeypatch.setattr(trainer, "_SOURCE_GONE_SECONDS", 0.1)
    source = learning.Source(learning.make_samples(5), ends=True)
    with run.trainer(source) as one:
        with pytest.raises(learner.LearnerError, match="source of batches was closed before"):
            learning.Call(one.run).result()
        assert one.updates == 5
    assert run.summary["exit_reason"] == "failed"


def test_a_source_that_is_closed_just_before_the_stop_ends_the_run_well(run):
    source = learning.Source(learning.make_samples(5), ends=True)
    with run.trainer(source) as one:
        # The program stops once nobody asks the source for more.
        asked = iter(range(20))
        stop = lambda: one.updates == 5 and one.learner.exhausted and next(asked, None) is None
        assert learning.Call(one.run, stop).result() == "stopped"
    assert run.checkpoints == [5]


def test_a_resumed_run_goes_on_to_its_steps_in_total(run):
    first, _ = train(run, num_steps=100)
    before = run.summary
    second, reason = train(run, num_steps=250)
    after = run.summary
    assert reason == "num_steps"
    assert (before["agent_steps"], after["agent_steps"]) == (100, 250)
    assert (before["episodes"], after["episodes"]) == (10, 25)
    assert second.updates > first.updates
    assert after["learner_updates"] == second.updates
    assert after["wall_seconds"] > before["wall_seconds"]
    # The rate is of this start alone.
    wall = after["wall_seconds"] - before["wall_seconds"]
    assert 0.0 < after["steps_per_second"] * wall < 250.0
    # And at the limit, there is nothing left to do.
    third, reason = train(run, num_steps=250)
    assert (reason, third.updates) == ("num_steps", second.updates)
    assert run.summary["agent_steps"] == 250


def test_a_stopped_run_is_resumed_with_the_counters_of_its_summary(run):
    # The source goes on observing until it is closed, as actors do until they are told to stop.
    train(run, stop=lambda: run.directory.read_progress() is not None, report_period=0.01)
    before = run.summary
    with run.trainer() as one:
        learning.Call(one.run, lambda: True).result()
    after = run.summary
    for name in ("agent_steps", "environment_frames", "episodes", "learner_updates"):
        assert after[name] == before[name] > 0


def test_a_resumed_run_publishes_what_was_saved(run):
    with run.trainer(source := Acting(), num_steps=100) as one:
        source.trainer = one
        learning.Call(one.run).result()
        (device,) = learning.ONE_DEVICE.inference
        before = one.get(device)
    with run.trainer() as one:
        after = one.get(device)
        assert after.version == before.version == one.updates > 0
        np.testing.assert_array_equal(after.params["w"], before.params["w"])


def test_a_learning_rate_schedule_goes_on_over_a_restart(tmp_path):
    config = vtrace.Config(
        batch_size=4,
        unroll_length=2,
        hidden_sizes=(),
        learning_rate=0.01,
        learning_rate_schedule="linear",
        schedule_steps=10,
    )
    run = Run(tmp_path / "run", vtrace.make_agent(learning.SPEC, config))
    # Update u, from 0, has the rate 0.01 * (1 - u / 10).
    for total, expected in ((4, 0.01 * 0.7), (6, 0.01 * 0.5)):
        already = total - 4 if total == 4 else 4
        source = learning.Source(learning.make_samples(total - already))
        with run.trainer(source) as one:
            assert one.updates == already
            learning.Call(one.run, lambda one=one, total=total: one.updates == total).result()
            assert one.learner.metrics()["learning_rate"] == pytest.approx(expected, rel=1e-5)


def test_the_checkpoint_of_another_agent_is_refused(run):
    train(run, num_steps=50)
    config = vtrace.Config(batch_size=4, unroll_length=2, hidden_sizes=())
    other = Run(run.directory.path, vtrace.make_agent(learning.SPEC, config))
    with (
        pytest.raises(checkpointing.CheckpointError, match="does not fit this agent") as error,
        other.trainer(),
    ):
        pass
    assert "\n" not in str(error.value)


def test_checkpoints_are_written_on_the_way(run):
    def stop():
        # Three are kept, and the last is written at the end.
        return one.updates >= 10 and len(run.checkpoints) == 3

    with run.trainer(source := Acting(), checkpoint_period=1e-6) as one:
        source.trainer = one
        learning.Call(one.run, stop).result()
        assert run.checkpoints == [one.updates - 2, one.updates - 1, one.updates]


def test_progress_and_metrics_are_written_on_the_way(run):
    def stop():
        progress = run.directory.read_progress()
        return progress is not None and progress["agent_steps"] >= 50

    train(run, stop=stop, report_period=0.01)
    progress = run.directory.read_progress()
    assert progress["status"] == "training"
    assert progress["environment_frames"] == progress["agent_steps"]
    with open(run.directory.file("train.csv")) as file:
        header, *rows = (line.rstrip("\n").split(",") for line in file)
    steps = [int(row[header.index("agent_steps")]) for row in rows]
    assert steps == sorted(steps)
    assert steps[-1] == run.summary["agent_steps"]
    assert math.isfinite(float(rows[-1][header.index("loss")]))


def test_statistics_of_inference_servers_are_summed(run):
    with run.trainer() as one:
        for batches, rows in ((2, 12), (3, 3)):
            statistics = inference.InferenceStatistics(batches=batches, rows=rows)
            one.watch(lambda statistics=statistics: dataclasses.replace(statistics))
        for _ in range(2):
            figures = one.figures()
            assert figures["inference_batch_mean"] == 15 / 5
            assert (figures["inference_batches"], figures["inference_rows"]) == (5, 15)


def test_bytes_over_the_network_are_figures_of_the_run(run):
    statistics = inference.InferenceStatistics(
        network_bytes_observations=2**60 + 1,
        network_bytes_parameters=2,
        network_bytes_unrolls=3,
    )
    with run.trainer() as one:
        for _ in range(2):
            one.watch(lambda: statistics)
        figures = one.figures()
    assert figures["network_bytes_observations"] == 2**61 + 2
    assert figures["network_bytes_parameters"] == 4
    assert figures["network_bytes_unrolls"] == 6


def test_a_run_of_real_parts_in_one_process(tmp_path):
    # Two actors of four games of catch each; every part is the real one.
    make_environment = environments.load("catch")
    sample = make_environment(seed=0)
    spec = specs.make_environment_spec(sample)
    config = vtrace.Config(batch_size=8, unroll_length=5, hidden_sizes=(16,))
    run = Run(tmp_path / "run", vtrace.make_agent(spec, config))
    queue_config = configs.TrajectoryQueueConfig()
    unroll_spec = inference.unroll_specs(run.agent, spec)
    layout = trajectory_queue.layout(unroll_spec, run.agent.batch_size, queue_config)
    queue = trajectory_queue.TrajectoryQueue(layout, queue_config)
    try:
        with run.trainer(queue.reader(), num_steps=2000, action_repeat=3) as one:
            server = inference.InferenceServer(
                run.agent,
                spec,
                one,
                queue.writer(),
                configs.InferenceConfig(max_environments=8, batch_sizes=(4, 8)),
                learning.ONE_DEVICE.inference,
                one,
            )
            one.watch(server.statistics)
            server.start()
            over = lambda: one.monitor.done
            actors = []
            for ids in (range(4), range(4, 8)):
                environment = actor_lib.SerialEnvironments(make_environment, ids)
                actor = actor_lib.EnvironmentActor(environment, server, ids)
                actors.append(learning.Call(actor.run, over))
            assert learning.Call(one.run).result() == "num_steps"
            for actor in actors:
                actor.result()
            server.stop()
            statistics = server.statistics()
    finally:
        queue.stop()
    summary = run.summary
    # A batch of at most eight rows may go beyond the limit.
    assert 2000 <= summary["agent_steps"] < 2008
    assert summary["environment_frames"] == 3 * summary["agent_steps"]
    # Episodes have nine transitions; those of eight environments are under way at the end.
    assert 0 <= summary["agent_steps"] - 9 * summary["episodes"] < 9 * 8
    assert summary["episode_length_mean_100"] == 9.0
    assert -1.0 <= summary["return_mean_100"] <= 1.0
    # An update has eight unrolls of five transitions, some from LAST to FIRST, each learnt once.
    assert 0 < summary["transitions_trained"] <= summary["agent_steps"]
    assert summary["transitions_trained"] <= 40 * summary["learner_updates"]
    assert 0.0 <= summary["policy_lag_mean"] <= summary["policy_lag_max"]
    assert 1.0 <= summary["inference_batch_mean"] <= 8.0
    assert statistics.agent_steps >= summary["agent_steps"]
