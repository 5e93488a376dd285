"""Tests of the inference server in process: real JAX, real batching, unrolls checked by hand."""

import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs

from seedlib import environments, specs, types
from seedlib.agents import agent as agent_lib
from seedlib.agents import vtrace
from seedlib.agents.vtrace import config as vtrace_config
from seedlib.agents.vtrace import networks as vtrace_networks
from seedlib.components import actor, configs, inference, parameters, trajectory_queue
from seedlib.components.transport import client, server, service, wire
from tests.components import harness
from tests.components.harness import FIRST, LAST, MID

# What most sessions here bring: a number that says whose observation it is.
NUMBER = harness.make_spec(dm_specs.Array((), np.int32))
ROOT = pathlib.Path(__file__).resolve().parents[2]


def number_steps(values, step_type=MID, **fields):
    values = np.asarray(values, np.int32)
    return harness.time_steps(np.full(values.shape, step_type), values, **fields)


def counting(length=4, spec=NUMBER, **kwargs):
    return harness.counting_agent(spec, agent_lib.UnrollShape(length), **kwargs)


class Walk:
    """The steps of one session: episodes of random lengths, rows not in step with each other.

    Observations are `1000 * mark + steps so far`; rewards are random.
    """

    def __init__(self, rows, seed, mark=0):
        self._random = np.random.default_rng(seed)
        self._next = np.zeros(rows, np.int64)  # FIRST in every row.
        self._mark = mark
        self.index = 0

    def __call__(self):
        kind, draw = self._next, self._random.random(self._next.shape)
        self._next = np.where(kind == LAST, FIRST, np.where(draw < 0.3, LAST, MID))
        reward = np.where(kind == FIRST, 0, self._random.normal(size=kind.shape))
        values = np.full(kind.shape, 1000 * self._mark + self.index, np.int32)
        self.index += 1
        return harness.time_steps(kind, values, reward=reward)


def play(session, walk, steps):
    """Steps a session; returns its actions, `[steps, E]`."""
    return np.stack([np.array(session.step(walk())) for _ in range(steps)])


# The state that is stored, and what the learner makes of it.


def counts_by_hand(unroll):
    """Inputs since FIRST before each step, from the stored state and the step types alone."""
    count, counts = int(unroll.initial_state["count"]), []
    for kind in unroll.inputs.step_type:
        count = 0 if kind == FIRST else count
        counts.append(count)
        count += 1
    return counts


def test_the_counts_at_acting_are_those_that_follow_from_state_and_steps_exactly():
    sink = harness.Recorder()
    with harness.serving(
        counting(length=7), NUMBER, sink, batch_sizes=(1, 4, 8)
    ) as inference_server:

        def act(me, rows):
            session = inference_server.open(harness.hello(NUMBER, range(me, me + rows)))
            return play(session, Walk(rows, seed=me), 60)

        harness.together([lambda a=a: act(*a) for a in ((0, 1), (10, 2), (20, 3), (30, 1))])
    unrolls = sink.unrolls()
    assert len(unrolls) == 7 * 8  # 7 environments; 60 steps hold 8 windows of 8 that share one.
    for unroll in unrolls:
        assert unroll.extras["count"].tolist() == counts_by_hand(unroll)
        assert len(set(unroll.inputs.environment_id.tolist())) == 1
        assert set(np.diff(unroll.inputs.observation)) == {1}
        assert set(np.diff(unroll.info.step_index)) == {1}
        first = unroll.inputs.step_type == FIRST
        assert np.all(unroll.inputs.previous_action[first] == 0)
        # Elsewhere the previous action is the answer to the step before.
        follows = ~first[1:]
        np.testing.assert_array_equal(
            unroll.inputs.previous_action[1:][follows], unroll.action[:-1][follows]
        )
        if unroll.info.step_index[0] == 0:
            assert unroll.initial_state["count"] == 0


LSTM = vtrace_config.Config(
    unroll_length=9,
    hidden_sizes=(16,),
    lstm_size=8,
    use_previous_action=True,
    use_previous_reward=True,
)


def lively(params, seed=0):
    """Parameters far from the first ones, with which every input and state matters."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.5 * random.normal(size=x.shape).astype(x.dtype), params)


def log_probability_error(spec, config, params, unrolls):
    """Largest difference of log-probabilities between acting and the learner's unrolled network."""
    network = vtrace_networks.make_network(spec, config, spec.actions.num_values)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *(u.inputs for u in unrolls))
    states = jax.tree.map(lambda *leaves: np.stack(leaves), *(u.initial_state for u in unrolls))
    outputs, _ = jax.jit(network.unroll)(params, stacked, states)
    behaviour = np.stack([unroll.extras["logits"] for unroll in unrolls], 1)
    difference = jax.nn.log_softmax(outputs.parameters) - jax.nn.log_softmax(behaviour)
    return float(jnp.abs(difference).max())


def test_the_learner_recomputes_the_behaviour_policy_from_stored_unrolls():
    catch = environments.load("catch", rows=4)  # Episodes of three transitions.
    spec = specs.make_environment_spec(catch(seed=0))
    agent = vtrace.make_agent(spec, LSTM)
    params = lively(agent.policy_params(agent.init(jax.random.PRNGKey(1))))
    sink = harness.Recorder()
    # Requests of 1, 2 and 3 rows meet in batches of every size up to 6, padded to 2, 4 and 8.
    sizes = {0: 1, 10: 2, 20: 3}
    with harness.serving(
        agent, spec, sink, params=params, batch_sizes=(2, 4, 8), max_environments=8
    ) as inference_server:

        def act(first, rows):
            ids = range(first, first + rows)
            environment_actor = actor.EnvironmentActor(
                actor.SerialEnvironments(catch, ids), inference_server, ids
            )
            for _ in range(80):
                environment_actor.step()

        harness.together([lambda a=a: act(*a) for a in sizes.items()])
        harness.settle(inference_server)
        statistics = inference_server.statistics()
    unrolls = sink.unrolls()
    assert statistics.padded_rows > statistics.rows == 80 * 6
    assert len(unrolls) == 6 * 8  # 80 steps hold 8 windows of 10 that share one.
    assert all((u.inputs.step_type == LAST).any() for u in unrolls)
    assert any(np.abs(u.initial_state[0]).max() > 0.01 for u in unrolls)
    assert log_probability_error(spec, LSTM, params, unrolls) < 1e-5
    # The comparison can fail: with a state of zeros it does.
    blank = [
        u._replace(initial_state=jax.tree.map(np.zeros_like, u.initial_state)) for u in unrolls
    ]
    assert log_probability_error(spec, LSTM, params, blank) > 1e-3


# Random streams.


def test_actions_do_not_depend_on_company_slot_or_place_in_the_batch():
    agent = counting(num_values=1 << 20, length=4)

    def alone():
        with harness.serving(agent, NUMBER, seed=3, batch_sizes=(1,)) as inference_server:
            session = inference_server.open(harness.hello(NUMBER, [7]))
            return play(session, Walk(1, seed=7), 40)[:, 0]

    def in_company():
        with harness.serving(agent, NUMBER, seed=3, batch_sizes=(8,)) as inference_server:
            sessions = [
                inference_server.open(harness.hello(NUMBER, ids))
                for ids in ([1, 2, 3], [6, 7], [9, 4])
            ]
            walks = [Walk(3, seed=1), Walk(2, seed=7), Walk(2, seed=9)]
            played = harness.together(
                [lambda a=a: play(*a, 40) for a in zip(sessions, walks, strict=True)]
            )
            return played[1][:, 1]

    expected = alone()
    assert len(set(expected)) > 30  # Random, and different at each step.
    np.testing.assert_array_equal(in_company(), expected)


def test_streams_differ_between_environments_incarnations_and_seeds():
    agent = counting(num_values=1 << 20)
    traces = []
    for seed in (0, 1):
        with harness.serving(agent, NUMBER, seed=seed) as inference_server:
            for _ in range(2):
                session = inference_server.open(harness.hello(NUMBER, [0, 1]))
                traces += list(play(session, Walk(2, seed=0), 10).T)
    assert len({trace.tobytes() for trace in traces}) == 8


def test_a_session_that_asked_for_nothing_leaves_the_streams_as_they_were():
    agent = counting(num_values=1 << 20)

    def trace(openings):
        with harness.serving(agent, NUMBER) as inference_server:
            for opening in openings:
                opened = inference_server.open(harness.hello(NUMBER, [0, 1]))
                if opening == "closed":
                    opened.close()  # The others are replaced by the next one.
            session = inference_server.open(harness.hello(NUMBER, [0, 1]))
            return play(session, Walk(2, seed=0), 10).tolist()

    assert trace(["closed", "replaced", "replaced"]) == trace([])


# Actors that die.


def test_no_unroll_mixes_an_actor_that_died_with_the_one_that_came_after():
    sink, observed = harness.Recorder(), harness.Observed()
    random = np.random.default_rng(0)
    length, starts, dropped = 4, 50, 0
    with harness.serving(counting(length), NUMBER, sink, observed) as inference_server:
        other = inference_server.open(harness.hello(NUMBER, [5]))
        other_walk = Walk(1, seed=5, mark=99)
        old = None
        for start in range(starts):
            session = inference_server.open(harness.hello(NUMBER, [0, 1]))
            if old is not None:
                with pytest.raises(service.Fenced, match="replaced by actor"):
                    old.step(number_steps([0, 0]))
            old = session
            steps = int(random.integers(1, 13))
            for index in range(steps):
                # An episode of five transitions, and one that breaks off in the middle.
                kind = [FIRST, MID, MID, MID, MID, LAST][index % 6]
                values = [1000 * start + index] * 2
                session.step(number_steps(values, kind, reward=[float(kind != FIRST)] * 2))
                other.step(other_walk())
            if start < starts - 1:
                # What is left of `steps` when every fifth step, and then every fourth, is whole.
                dropped += 2 * (steps if steps <= length else 1 + (steps - 1) % length)
        harness.settle(inference_server)
        statistics = inference_server.statistics()
    for environment_id in (0, 1):
        for unroll in sink.of(environment_id):
            assert len(set(unroll.inputs.observation // 1000)) == 1
            assert set(unroll.info.incarnation) == set(unroll.inputs.observation // 1000)
            np.testing.assert_array_equal(unroll.info.step_index, unroll.inputs.observation % 1000)
            if unroll.info.step_index[0] == 0:
                assert unroll.inputs.step_type[0] == FIRST
                assert unroll.initial_state["count"] == 0
                assert unroll.inputs.previous_action[0] == 0
    assert len(sink.of(0)) > 30
    assert {(i, total, n) for i, total, n, _ in observed.episodes if i != 5} <= {
        (0, 5.0, 5),
        (1, 5.0, 5),
    }
    undisturbed = np.concatenate([u.inputs.observation[:-1] for u in sink.of(5)])
    np.testing.assert_array_equal(undisturbed, 99_000 + np.arange(len(undisturbed)))
    assert set(np.concatenate([u.info.incarnation for u in sink.of(5)])) == {0}
    assert statistics.fenced_sessions == starts - 1
    assert statistics.dropped_steps == dropped
    assert statistics.sessions == 2


def test_a_closed_session_frees_its_environments():
    with harness.serving(counting(), NUMBER, max_environments=3) as inference_server:
        for _ in range(10):
            session = inference_server.open(harness.hello(NUMBER, [0, 1, 2]))
            session.step(number_steps([0, 0, 0], FIRST))
            session.close()
            session.close()
            with pytest.raises(service.Unavailable, match="closed"):
                session.step(number_steps([0, 0, 0]))
        assert inference_server.statistics().sessions == 0


def test_a_session_that_begins_in_the_middle_of_an_episode_has_a_clean_state():
    sink, observed = harness.Recorder(), harness.Observed()
    with harness.serving(counting(length=2), NUMBER, sink, observed) as inference_server:
        session = inference_server.open(harness.hello(NUMBER, [0]))
        for kind in (FIRST, MID):
            session.step(number_steps([-1], kind, reward=[1.0]))
        session.close()
        session = inference_server.open(harness.hello(NUMBER, [0]))
        for index, kind in enumerate((MID, LAST, FIRST, MID)):
            session.step(number_steps([index], kind, reward=[1.0]))
    (unroll,) = sink.unrolls()
    assert unroll.inputs.step_type.tolist() == [MID, LAST, FIRST]
    assert unroll.initial_state["count"] == 0
    assert unroll.inputs.previous_action[0] == 0
    assert observed.episodes == []  # Of both episodes a part is missing.


def test_a_request_of_a_dead_session_in_the_same_batch_leaves_no_trace():
    sink, observed = harness.GatedSink(), harness.Observed()
    with harness.serving(counting(1), NUMBER, sink, observed, in_flight=1) as inference_server:
        lane = inference_server._lanes[0]
        old = inference_server.open(harness.hello(NUMBER, [0]))
        old.step(number_steps([1], FIRST))
        # A pair of another environment blocks the sink, and with it the one thread.
        other = inference_server.open(harness.hello(NUMBER, [7]))
        for kind in (FIRST, FIRST):
            other.step(number_steps([70], kind))
        assert sink.blocked.wait(harness.PATIENCE)

        def filling():
            return lane.batcher._filling is not None and lane.batcher._filling.size

        dead = harness.Call(old.step, number_steps([2]))
        harness.wait_until(lambda: filling() == 1)
        new = inference_server.open(harness.hello(NUMBER, [0]))
        assert new.slots == old.slots
        first = harness.Call(new.step, number_steps([500], FIRST))
        harness.wait_until(lambda: filling() == 2)
        with pytest.raises(service.Fenced):
            dead.result()
        sink.open()
        first.result()
        new.step(number_steps([501]))
        harness.settle(inference_server)
    (unroll,) = sink.of(0)
    assert unroll.inputs.observation.tolist() == [500, 501]
    assert unroll.info.step_index.tolist() == [0, 1]
    assert unroll.extras["count"].tolist() == [0, 1]
    assert observed.agent_steps == 1  # From 500 to 501; the dead one's does not count.


# Bad requests.


def test_bad_requests_end_their_own_sessions_and_nobody_elses():
    sink = harness.Recorder()
    spec = harness.make_spec({"pixels": dm_specs.Array((2,), np.float32)})
    agent = counting(length=1, spec=spec)

    def steps(pixels, step_type=MID, **fields):
        pixels = np.asarray(pixels)
        return harness.time_steps(np.full(len(pixels), step_type), {"pixels": pixels}, **fields)

    good = np.ones((1, 2), np.float32)
    bad = {
        1: (steps(np.ones((1, 3), np.float32)), r"observation/pixels: expected float32 \(1, 2\)"),
        2: (steps(np.array([[1, np.nan]], np.float32)), "environment 2: observation/pixels is not"),
        3: (steps(good, step_type=7), "environment 3: step_type must be 0, 1 or 2, got 7"),
        4: (steps(good, reward=[np.inf]), "environment 4: reward is not finite at its step 3"),
        5: (steps(np.ones((1, 2))), r"observation/pixels: expected float32 .*float64"),
        6: (steps(np.ones((3, 2), np.float32) * np.nan), "expected"),
    }
    with harness.serving(
        agent, spec, sink, minimum_batch_size=8, batch_sizes=(8,), batch_timeout=0.05
    ) as inference_server:
        barrier = threading.Barrier(8)

        def act(me):
            session = inference_server.open(harness.hello(spec, [me], actor_id=f"actor {me}"))
            for _ in range(3):
                session.step(steps(good * me))
            barrier.wait(harness.PATIENCE)
            if me in bad:
                with pytest.raises(service.Refused, match=bad[me][1]) as refusal:
                    session.step(bad[me][0])
                assert str(refusal.value).startswith(f"actor {me}: ")
                with pytest.raises(service.Unavailable, match="closed"):
                    session.step(steps(good))
            else:
                for _ in range(3):
                    session.step(steps(good * me))

        harness.together([lambda me=me: act(me) for me in range(8)])
        # A place is free again, and what a bad request wrote is nowhere.
        session = inference_server.open(harness.hello(spec, [1]))
        session.step(steps(good, FIRST))
        assert inference_server.statistics().sessions == 3
    for unroll in sink.unrolls():
        whose = unroll.inputs.environment_id[0]
        np.testing.assert_array_equal(unroll.inputs.observation["pixels"], whose * np.ones((2, 2)))
    assert len(sink.of(0)) == len(sink.of(7)) == 5
    assert all(len(sink.of(me)) == 2 for me in bad)


@pytest.fixture(scope="module", name="guarded")
def fixture_guarded():
    """A server that asks for a token."""
    with harness.serving(counting(), NUMBER, run_token="secret") as inference_server:
        yield inference_server


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        ({"ids": [3, 3]}, r"environment ids must be distinct and not empty, got \(3, 3\)"),
        ({"ids": []}, "environment ids must be distinct and not empty"),
        ({"ids": [4, -1]}, r"environment ids must be in 0\.\.2\^31-1, got \(4, -1\)"),
        ({"ids": [1 << 31]}, "environment ids must be in"),
        ({"ids": range(9)}, "brings 9 environments; the largest batch size is 8"),
        ({"token": "other"}, "run token"),
        ({"token": ""}, "run token"),
        (
            {"spec": harness.make_spec(dm_specs.Array((), np.float32))},
            r"observation: expected int32 \(\), got float32 \(\)",
        ),
        (
            {"spec": harness.make_spec({"x": dm_specs.Array((), np.int32)})},
            "observation",
        ),
        (
            {"spec": harness.make_spec(NUMBER.observations, dm_specs.DiscreteArray(6, np.int32))},
            "action: expected .*5.* got .*6",
        ),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_and_fences_nobody(guarded, hello, message):
    hello = {"spec": NUMBER, "ids": [3], "token": "secret", **hello}
    session = guarded.open(harness.hello(NUMBER, [3, 4], token="secret"))
    with pytest.raises(service.Refused, match=message):
        guarded.open(harness.hello(**hello))
    session.step(number_steps([0, 0], FIRST))
    session.close()


def test_a_hello_without_room_is_refused_and_fences_nobody():
    with harness.serving(counting(), NUMBER, max_environments=4) as inference_server:
        first = inference_server.open(harness.hello(NUMBER, [0, 1]))
        second = inference_server.open(harness.hello(NUMBER, [2, 3]))
        message = "brings 3 environments, but only 2 of max_environments=4 are free"
        with pytest.raises(service.Refused, match=message):
            inference_server.open(harness.hello(NUMBER, [0, 1, 4]))
        first.step(number_steps([0, 0], FIRST))
        second.step(number_steps([0, 0], FIRST))
        # With the places of those that it replaces there is room.
        inference_server.open(harness.hello(NUMBER, [1, 2, 4]))


# Blocking, ends and failures.


def produce(session, walk, steps_answered):
    """Steps until the service is gone."""
    while True:
        try:
            session.step(walk())
        except service.Unavailable:
            return
        steps_answered[0] += 1


def test_a_full_sink_blocks_producers_in_bounded_memory_and_stop_ends_them():
    sink = harness.GatedSink()
    counts = [[0] for _ in range(12)]
    with harness.serving(
        counting(length=1), NUMBER, sink, batch_sizes=(1, 2, 4), in_flight=2
    ) as inference_server:
        producers = [
            harness.Call(
                produce, inference_server.open(harness.hello(NUMBER, [me])), Walk(1, me), count
            )
            for me, count in enumerate(counts)
        ]
        assert sink.blocked.wait(harness.PATIENCE)
        # Two more batches are computed and one fills; then everybody waits.
        harness.wait_until(lambda: inference_server._lanes[0].batcher._filling is not None)
        answered = sum(count[0] for count in counts)
        inference_server.stop()
        for producer in producers:
            producer.result()
    # Two steps of each are in its first unroll, which blocked; nobody got far beyond it.
    assert answered <= 12 * 2
    assert sum(count[0] for count in counts) <= 12 * 2
    assert sink.batches == []


def test_producers_go_on_when_the_sink_has_room_again():
    sink = harness.GatedSink()
    with harness.serving(counting(length=1), NUMBER, sink) as inference_server:
        sessions = [inference_server.open(harness.hello(NUMBER, [me])) for me in range(4)]
        calls = [
            harness.Call(play, session, Walk(1, me), 30) for me, session in enumerate(sessions)
        ]
        assert sink.blocked.wait(harness.PATIENCE)
        sink.open()
        for call in calls:
            call.result()
        harness.settle(inference_server)
    assert [len(sink.of(me)) for me in range(4)] == [29] * 4  # 30 steps are 29 pairs.


@pytest.mark.parametrize("end", ["close", "fence"])
def test_a_session_that_ends_wakes_its_blocked_step(end):
    sink = harness.GatedSink()
    with harness.serving(
        counting(length=1),
        NUMBER,
        sink,
        batch_sizes=(1,),
        in_flight=1,
        step_timeout=10 * harness.PATIENCE,
    ) as inference_server:
        # More sessions than places: some wait for an answer, others for room in a batch.
        sessions = [inference_server.open(harness.hello(NUMBER, [me])) for me in range(8)]
        calls = [
            harness.Call(produce if end == "close" else play, session, Walk(1, 0), *rest)
            for session in sessions
            for rest in [([0],) if end == "close" else (1 << 30,)]
        ]
        assert sink.blocked.wait(harness.PATIENCE)
        for me, session in enumerate(sessions):
            if end == "close":
                session.close()
            else:
                inference_server.open(harness.hello(NUMBER, [me], actor_id="newer"))
        for call in calls:
            if end == "close":
                call.result()
            else:
                with pytest.raises(service.Fenced, match="replaced by newer"):
                    call.result()


def test_a_closed_sink_leaves_nobody_waiting():
    sink = harness.Recorder()
    with harness.serving(counting(length=1), NUMBER, sink) as inference_server:
        session = inference_server.open(harness.hello(NUMBER, [0]))
        session.step(number_steps([0], FIRST))
        sink.close()
        with pytest.raises(service.Unavailable, match="stopped"):
            for _ in range(10):
                session.step(number_steps([1]))


def test_an_answer_in_time_or_none_ends_the_session():
    sink = harness.GatedSink()
    with harness.serving(counting(length=1), NUMBER, sink, in_flight=1) as inference_server:
        session = inference_server.open(harness.hello(NUMBER, [0]))
        with pytest.raises(service.Unavailable, match="actor: no answer within"):
            for _ in range(10):
                session.step(number_steps([1]), timeout=0.2)
        assert inference_server.statistics().sessions == 0
        sink.open()
        # Late answers go to nobody; a session of the same environment begins anew.
        session = inference_server.open(harness.hello(NUMBER, [0]))
        for value in (50, 51, 52):
            session.step(number_steps([value]))
        harness.settle(inference_server)
    assert [u.inputs.observation.tolist() for u in sink.unrolls()][-2:] == [[50, 51], [51, 52]]


def broken_policy(inputs, extras):
    """Fails on the host, while the device computes, where an observation is 13."""

    def check(observation):
        if np.any(observation == 13):
            raise ArithmeticError("the policy is broken")
        return np.zeros((), np.int32)

    zero = jax.pure_callback(check, jax.ShapeDtypeStruct((), jnp.int32), inputs.observation)
    return {**extras, "count": extras["count"] + zero}


def test_a_policy_that_raises_wakes_everybody_and_ends_the_server():
    with harness.serving(
        counting(on_step=broken_policy), NUMBER, harness.Recorder(), batch_sizes=(1, 2)
    ) as inference_server:
        owner = harness.Call(inference_server.wait)
        sessions = [inference_server.open(harness.hello(NUMBER, [me])) for me in range(5)]
        for session in sessions:
            session.step(number_steps([1], FIRST))

        def act(session, me):
            with pytest.raises(Exception, match=r"the policy is broken|stopped"):
                for index in range(1 << 30):
                    session.step(number_steps([13 if me == 0 and index == 20 else 1]))

        harness.together([lambda a=a: act(*a) for a in zip(sessions, range(5), strict=True)])
        with pytest.raises(Exception, match="the policy is broken"):
            owner.result()
        assert not inference_server.ready
        with pytest.raises(service.Unavailable):
            inference_server.open(harness.hello(NUMBER, [0]))


def test_an_observer_that_raises_ends_the_server():
    class Broken:
        def observe(self, agent_steps, episodes):
            raise OSError("disk full")

    with harness.serving(counting(), NUMBER, observer=Broken()) as inference_server:
        session = inference_server.open(harness.hello(NUMBER, [0]))
        with pytest.raises(service.Unavailable):
            for _ in range(10):
                session.step(number_steps([1]))
        with pytest.raises(OSError, match="disk full"):
            inference_server.wait(harness.PATIENCE)


def test_nobody_is_answered_before_the_start_or_after_the_stop():
    agent = counting()
    with harness.serving(agent, NUMBER) as inference_server:
        assert inference_server.ready
        session = inference_server.open(harness.hello(NUMBER, [0]))
        inference_server.stop()
        assert not inference_server.ready
        assert inference_server.wait(harness.PATIENCE)
        with pytest.raises(service.Unavailable, match="stopped"):
            session.step(number_steps([0]))
        with pytest.raises(service.Unavailable):
            inference_server.open(harness.hello(NUMBER, [0]))
    unstarted = inference.InferenceServer(
        agent,
        NUMBER,
        inference_server.store,
        None,
        configs.InferenceConfig(max_environments=1, batch_sizes=(1,)),
    )
    assert not unstarted.ready
    with pytest.raises(service.Unavailable, match="not ready"):
        unstarted.open(harness.hello(NUMBER, [0]), timeout=0.01)
    waiting = harness.Call(unstarted.open, harness.hello(NUMBER, [0]))
    unstarted.stop()
    with pytest.raises(service.Unavailable):
        waiting.result()


def test_without_parameters_the_start_times_out():
    device = jax.local_devices()[0]
    unstarted = inference.InferenceServer(
        counting(),
        NUMBER,
        parameters.ParameterStore([device]),
        None,
        configs.InferenceConfig(max_environments=1, batch_sizes=(1,)),
    )
    with pytest.raises(TimeoutError, match="no parameters were published"):
        unstarted.start(timeout=0.01)
    unstarted.stop()


# Parameters and versions.


def test_the_version_is_stored_for_each_step_and_changes_within_an_unroll():
    sink = harness.Recorder()
    with harness.serving(counting(length=4), NUMBER, sink) as inference_server:
        session = inference_server.open(harness.hello(NUMBER, [0]))
        for index in range(6):
            inference_server.store.publish(10 + index // 2, harness.version_params(index // 2))
            session.step(number_steps([index]))
    (unroll,) = sink.unrolls()
    assert unroll.info.policy_version.tolist() == [10, 10, 11, 11, 12]
    assert unroll.extras["largest"].tolist() == [0, 0, 1, 1, 2]


def test_actions_come_from_one_whole_version():
    sink = harness.Recorder()
    done = threading.Event()
    with harness.serving(counting(length=3), NUMBER, sink) as inference_server:

        def publish():
            version = 0
            while not done.is_set():
                version += 1
                inference_server.store.publish(version, harness.version_params(version))

        publisher = harness.Call(publish)
        sessions = [inference_server.open(harness.hello(NUMBER, [me, 10 + me])) for me in range(3)]
        harness.together([lambda a=a: play(a[1], Walk(2, a[0]), 150) for a in enumerate(sessions)])
        done.set()
        publisher.result()
    unrolls = sink.unrolls()
    for unroll in unrolls:
        np.testing.assert_array_equal(unroll.extras["smallest"], unroll.extras["largest"])
        np.testing.assert_array_equal(unroll.extras["smallest"], unroll.info.policy_version)
        assert np.all(np.diff(unroll.info.policy_version) >= 0)
    assert len({v for u in unrolls for v in u.info.policy_version.tolist()}) > 10


def test_nothing_is_compiled_after_the_start():
    sizes = (2, 5, 8)
    random = np.random.default_rng(0)
    device = jax.local_devices()[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("batch",))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with harness.serving(
        counting(), NUMBER, harness.Recorder(), batch_sizes=sizes, max_environments=40
    ) as inference_server:
        assert inference_server.statistics().compilations == len(sizes)
        sessions = [
            inference_server.open(harness.hello(NUMBER, range(10 * n, 11 * n))) for n in range(1, 9)
        ]
        for call in range(500):
            if call % 50 == 0:  # As a learner publishes: from a mesh.
                params = jax.device_put(harness.version_params(call), replicated)
                inference_server.store.publish(call, params)
            rows = int(random.integers(1, 9))
            sessions[rows - 1].step(number_steps(np.arange(rows), int(random.integers(0, 3))))
        harness.settle(inference_server)
        assert inference_server.statistics().compilations == len(sizes)
        assert inference_server.statistics().batches == 500


# Evaluation, echoes, devices and the network.


def test_evaluation_reaches_neither_the_sink_nor_the_counters_of_training():
    sink, observed = harness.Recorder(), harness.Observed()
    with harness.serving(counting(length=2), NUMBER, sink, observed) as inference_server:
        evaluated = inference_server.open(harness.hello(NUMBER, [0, 1], evaluate=True))
        trained = inference_server.open(harness.hello(NUMBER, [2]))

        def act(session, rows, reward):
            for index in range(31):
                kind = [FIRST, MID, LAST][index % 3]
                earned = np.full(rows, reward * (kind != FIRST))
                session.step(number_steps([index] * rows, kind, reward=earned))

        harness.together([lambda: act(evaluated, 2, 1e6), lambda: act(trained, 1, 1.0)])
        harness.settle(inference_server)
        statistics = inference_server.statistics()
    assert {i for u in sink.unrolls() for i in u.inputs.environment_id} == {2}
    assert max(u.inputs.reward.max() for u in sink.unrolls()) == 1.0
    assert not any(u.inputs.evaluate.any() for u in sink.unrolls())
    # Two transitions in each of ten episodes.
    assert statistics.agent_steps == observed.agent_steps == 20
    ended = sorted(observed.episodes)
    assert ended == sorted([(0, 2e6, 2, True), (1, 2e6, 2, True), (2, 2.0, 2, False)] * 10)


def test_rows_of_training_and_evaluation_share_batches_and_nothing_else():
    def extras_of(inputs, extras):
        return {**extras, "evaluate": inputs.evaluate, "id": inputs.environment_id}

    sink = harness.Recorder()
    agent = counting(length=1, on_step=extras_of)
    with harness.serving(
        agent, NUMBER, sink, minimum_batch_size=5, batch_timeout=harness.PATIENCE
    ) as inference_server:
        evaluated = inference_server.open(harness.hello(NUMBER, [3, 5, 9], evaluate=True))
        trained = inference_server.open(harness.hello(NUMBER, [4, 8]))
        harness.together(
            [lambda: play(evaluated, Walk(3, 0), 40), lambda: play(trained, Walk(2, 1), 40)]
        )
    for unroll in sink.unrolls():
        assert unroll.extras["count"].tolist() == counts_by_hand(unroll)
        assert not unroll.extras["evaluate"].any()
        np.testing.assert_array_equal(unroll.extras["id"], unroll.inputs.environment_id)


def test_answers_that_are_the_inputs_themselves_are_not_overwritten_by_later_batches():
    # A device may hand an input through without a copy, and a CPU may share the host's memory.
    spec = harness.make_spec(dm_specs.Array((256,), np.int32), dm_specs.Array((256,), np.int32))

    def step(params, keys, inputs, state):
        return types.PolicyOutput(inputs.observation, {"seen": inputs.observation}, state)

    agent = counting(spec=spec, length=1)
    agent = agent_lib.Agent(
        policy=agent_lib.Policy(lambda batch_size: (), step),
        init=agent.init,
        update=agent.update,
        policy_params=agent.policy_params,
        unroll=agent.unroll,
        batch_size=1,
    )
    sink = harness.Recorder()
    with harness.serving(agent, spec, sink) as inference_server:

        def act(me):
            session = inference_server.open(harness.hello(spec, [me]))
            kept = []
            for index in range(60):
                observation = np.full((1, 256), 1000 * me + index, np.int32)
                kept.append(session.step(harness.time_steps([MID], observation)))
            for index, action in enumerate(kept):
                assert np.all(action == 1000 * me + index)

        harness.together([lambda me=me: act(me) for me in range(4)])
    for unroll in sink.unrolls():
        np.testing.assert_array_equal(unroll.extras["seen"], unroll.inputs.observation)
        np.testing.assert_array_equal(unroll.action, unroll.inputs.observation)
        assert np.all(unroll.inputs.observation == unroll.inputs.observation[:, :1])


def check_two_devices():
    """Four actors at a server of two devices; run in a process that has two."""
    devices = jax.local_devices()
    assert len(devices) == 2
    catch = environments.load("catch", rows=4)
    spec = specs.make_environment_spec(catch(seed=0))
    agent = vtrace.make_agent(spec, LSTM)
    params = lively(agent.policy_params(agent.init(jax.random.PRNGKey(1))))
    sink = harness.Recorder()
    with harness.serving(
        agent, spec, sink, params=params, devices=devices, batch_sizes=(2, 4), max_environments=4
    ) as inference_server:
        ids = [[2 * me, 2 * me + 1] for me in range(4)]
        actors = [
            actor.EnvironmentActor(actor.SerialEnvironments(catch, i), inference_server, i)
            for i in ids
        ]
        for environment_actor in actors:
            environment_actor.step()
        # Eight environments fill both devices' four places.
        assert [lane.free_slots for lane in inference_server._lanes] == [[], []]
        for lane in inference_server._lanes:
            assert {leaf.devices().pop() for leaf in jax.tree.leaves(lane._memory)} == {
                lane._device
            }
        harness.together([lambda a=a: [a.step() for _ in range(59)] for a in actors])
        harness.settle(inference_server)
        statistics = inference_server.statistics()
        assert [lane.statistics.rows for lane in inference_server._lanes] == [240, 240]
    assert statistics.rows == 8 * 60
    assert statistics.compilations == 2 * 2
    unrolls = sink.unrolls()
    assert len(unrolls) == 8 * 6  # 60 steps hold six windows of 10 that share one.
    for unroll in unrolls:
        assert len(set(unroll.inputs.environment_id.tolist())) == 1
        assert set(np.diff(unroll.info.step_index)) == {1}
    assert log_probability_error(spec, LSTM, params, unrolls) < 1e-5
    print("two devices: ok")


def test_sessions_spread_over_two_inference_devices():
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.components import test_inference; test_inference.check_two_devices()",
        ],
        cwd=ROOT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        capture_output=True,
        text=True,
        timeout=3 * harness.PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "two devices: ok" in result.stdout


def test_unrolls_over_the_network_are_those_of_one_process_byte_for_byte(tmp_path):
    catch = environments.load("catch", rows=5)
    spec = specs.make_environment_spec(catch(seed=0))
    agent = vtrace.make_agent(spec, LSTM)
    params = lively(agent.policy_params(agent.init(jax.random.PRNGKey(2))))
    ids = (4, 5, 9)

    def act(policy):
        environment_actor = actor.EnvironmentActor(
            actor.SerialEnvironments(catch, ids, seed=3), policy, ids
        )
        steps = iter(range(60))
        environment_actor.run(lambda: next(steps, None) is None)

    def record(remote):
        sink = harness.Recorder()
        with harness.serving(
            agent, spec, sink, params=params, batch_sizes=(3,), seed=11
        ) as inference_server:
            if not remote:
                act(inference_server)
            else:
                config = server.ServerConfig(address=f"unix:{tmp_path}/policy")
                with (
                    server.PolicyServer(inference_server, config) as policy_server,
                    client.RemotePolicyService(policy_server.address) as policy,
                ):
                    act(policy)
            assert inference_server.statistics().sessions == 0
        return sink.unrolls()

    local, remote = record(remote=False), record(remote=True)
    assert len(local) == len(remote) > 8
    for ours, theirs in zip(local, remote, strict=True):
        tree.assert_same_structure(ours, theirs)
        for left, right in zip(tree.flatten(ours), tree.flatten(theirs), strict=True):
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            assert left.tobytes() == right.tobytes()


def test_only_what_leaves_the_process_counts_as_bytes_over_the_network():
    agent = counting()
    config = configs.TrajectoryQueueConfig(unrolls_per_item=1, capacity=64)
    layout = trajectory_queue.layout(inference.unroll_specs(agent, NUMBER), 2, config)
    queue = trajectory_queue.TrajectoryQueue(layout, config)
    # As another process has it.
    far = trajectory_queue.TrajectoryQueueClient(queue.address, layout, config)
    try:
        with harness.serving(agent, NUMBER, far.writer()) as inference_server:
            play(inference_server.open(harness.hello(NUMBER, (0, 1))), Walk(2, seed=1), 9)
            assert inference_server.statistics().network_bytes_observations == 0
            with (
                server.PolicyServer(inference_server) as policy_server,
                client.RemotePolicyService(policy_server.address) as policy,
            ):
                play(policy.open(harness.hello(NUMBER, (2, 3, 4))), Walk(3, seed=2), 10)
            harness.settle(inference_server)
            statistics = inference_server.statistics()
    finally:
        far.close()
        queue.stop()
    request, answer = wire.time_step_layout(NUMBER.observations), wire.action_layout(NUMBER.actions)
    assert statistics.network_bytes_observations == 10 * (request.nbytes(3) + answer.nbytes(3))
    assert statistics.network_bytes_parameters == 0
    # Unrolls of four transitions: two of each environment, wherever its session is.
    assert statistics.unrolls == 5 * 2
    assert statistics.network_bytes_unrolls == 10 * layout.unroll_bytes
