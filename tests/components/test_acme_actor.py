"""Tests of Acme's own loop, wrappers, counters and loggers around central inference."""

import csv
import signal

import acme
import dm_env
import jax
import numpy as np
import pytest
import tree
from acme import wrappers
from acme.utils import counting, loggers
from dm_env import specs as dm_specs

from seedlib import environments, specs
from seedlib.agents import agent as agent_lib
from seedlib.agents import vtrace
from seedlib.components import acme_actor, actor, configs, learner, local_queue
from seedlib.components.transport import client, server, service
from tests.components import harness, learning
from tests.components.harness import FIRST, LAST, MID


@pytest.fixture(autouse=True)
def _signals():
    """Puts back the signal handlers that `EnvironmentLoop.run` replaces for good."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(params=["in process", "over gRPC"])
def reach(request, tmp_path):
    """`reach(play, inference_server)`: calls `play(policy)` with the server or a client of it."""

    def in_process(play, inference_server):
        return play(inference_server)

    def over_grpc(play, inference_server):
        config = server.ServerConfig(address=f"unix:{tmp_path}/policy")
        with (
            server.PolicyServer(inference_server, config) as policy_server,
            client.RemotePolicyService(policy_server.address) as policy,
        ):
            return play(policy)

    return in_process if request.param == "in process" else over_grpc


class Recorded(wrappers.EnvironmentWrapper):
    """Keeps the time steps that an environment gave, and checks and keeps the actions it got."""

    def __init__(self, environment):
        super().__init__(environment)
        self.steps = []
        self.actions = []

    def reset(self):
        return self._keep(self._environment.reset())

    def step(self, action):
        tree.map_structure(
            lambda spec, leaf: spec.validate(leaf), self._environment.action_spec(), action
        )
        self.actions.append(tree.map_structure(np.copy, action))
        return self._keep(self._environment.step(action))

    def _keep(self, time_step):
        kept = tree.map_structure(np.copy, time_step.observation)
        self.steps.append(time_step._replace(observation=kept))
        return time_step

    def stacked(self, field):
        leaves = [getattr(step, field) for step in self.steps]
        return tree.map_structure(lambda *column: np.stack(column), *leaves)


class Doubles(dm_env.Environment):
    """Episodes of two transitions, in 64 bits and in dictionaries."""

    def __init__(self):
        self._count = 0

    def _observation(self):
        return {"x": np.full((2,), self._count / 3), "n": np.array(self._count, np.int64)}

    def reset(self):
        self._count = 0
        return dm_env.restart(self._observation())

    def step(self, action):
        self._count += 1
        if self._count < 2:
            return dm_env.transition(0.1, self._observation(), discount=0.7)
        return dm_env.termination(0.2, self._observation())

    def observation_spec(self):
        return {"x": dm_specs.Array((2,), np.float64), "n": dm_specs.Array((), np.int64)}

    def action_spec(self):
        return {
            "push": dm_specs.BoundedArray((2,), np.float64, 0.0, 4.0),
            "which": dm_specs.DiscreteArray(5, np.int64),
        }


def random_agent(environment, length, num_values=3):
    """An agent that draws actions, and the canonical spec of its environment."""
    spec = specs.make_environment_spec(environment)
    shape = agent_lib.UnrollShape(length)
    return harness.counting_agent(spec, shape, num_values), spec


def quiet_loop(environment, policy_actor, **kwargs):
    """Acme's loop without its default logger, which writes below the home directory."""
    kwargs.setdefault("logger", loggers.NoOpLogger())
    return acme.EnvironmentLoop(environment, policy_actor, **kwargs)


def all_steps(unrolls):
    """Joins the unrolls of one environment; neighbours share a step. Leaves `[steps, ...]`."""
    rows = [u._replace(initial_state=()) for u in unrolls]
    rest = [jax.tree.map(lambda leaf: leaf[1:], unroll) for unroll in rows[1:]]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), rows[0], *rest)


def step_by_hand(environment, policy_actor, time_step):
    action = policy_actor.select_action(time_step.observation)
    following = environment.step(action)
    policy_actor.observe(action, following)
    return following


# What the service sees.


def test_unrolls_hold_every_step_of_an_acme_loop_once_and_in_order(reach):
    environment = Recorded(environments.load("catch")(seed=1))
    agent, spec = random_agent(environment, length=3)
    sink, observed = harness.Recorder(), harness.Observed()
    logger, counter = loggers.InMemoryLogger(), counting.Counter()

    def play(policy):
        policy_actor = acme_actor.PolicyActor(spec, policy, environment_id=5)
        assert isinstance(policy_actor, acme.core.Actor)
        loop = acme.EnvironmentLoop(environment, policy_actor, counter, logger)
        loop.run(num_episodes=7)
        policy_actor.close()

    with harness.serving(agent, spec, sink, observed) as inference_server:
        reach(play, inference_server)
        harness.settle(inference_server)
        statistics = inference_server.statistics()

    # 7 episodes of 10 steps: 1 + 23 * 3, so that 23 unrolls hold all of them.
    assert len(sink.unrolls()) == 23
    steps = all_steps(sink.unrolls())
    assert steps.info.step_index.tolist() == list(range(70))
    assert set(steps.info.incarnation) == {0}
    assert set(steps.inputs.environment_id) == {5}
    assert steps.inputs.step_type.tolist() == 7 * [FIRST, *8 * [MID], LAST]
    assert steps.inputs.discount.tolist() == 7 * [*9 * [1.0], 0.0]
    np.testing.assert_array_equal(steps.inputs.observation, environment.stacked("observation"))
    returns = [environment.steps[10 * episode + 9].reward for episode in range(7)]
    assert set(returns) <= {1.0, -1.0}
    assert steps.inputs.reward.reshape(7, 10)[:, 9].tolist() == returns
    assert not steps.inputs.reward.reshape(7, 10)[:, :9].any()
    # The environment got the actions that are recorded; nobody got the answer to LAST.
    acted = steps.action.reshape(7, 10)[:, :9]
    np.testing.assert_array_equal(acted, np.reshape(environment.actions, (7, 9)))
    previous = steps.inputs.previous_action.reshape(7, 10)
    np.testing.assert_array_equal(previous[:, 1:], acted)
    assert not previous[:, 0].any()
    assert statistics.agent_steps == observed.agent_steps == 7 * 9
    assert statistics.sessions == 0

    # What the loop said is what the server counted.
    assert observed.episodes == [(5, total, 9, False) for total in returns]
    assert [row["episode_return"] for row in logger.data] == returns
    assert [row["episode_length"] for row in logger.data] == 7 * [9]
    assert [row["steps"] for row in logger.data] == [9, 18, 27, 36, 45, 54, 63]
    assert counter.get_counts() == {"episodes": 7, "steps": 63}


def test_truncation_and_termination_stay_what_they_are():
    environment = harness.Numbered(length=3)  # Truncated and terminated in turn.
    agent, spec = random_agent(environment, length=15)
    sink = harness.Recorder()
    with harness.serving(agent, spec, sink) as inference_server:
        loop = quiet_loop(environment, acme_actor.PolicyActor(spec, inference_server, 0))
        assert [loop.run_episode()["episode_return"] for _ in range(4)] == 4 * [3.0]
    (unroll,) = sink.unrolls()
    assert unroll.inputs.step_type.tolist() == 4 * [FIRST, MID, MID, LAST]
    assert unroll.inputs.discount.tolist() == 2 * [1, 1, 1, 1, 1, 1, 1, 0]
    assert unroll.inputs.reward.tolist() == 4 * [0, 1, 1, 1]
    # Observations are `[mark, episode, step of the episode]`.
    assert unroll.inputs.observation[:, 1].tolist() == np.repeat(range(4), 4).tolist()
    assert unroll.inputs.observation[:, 2].tolist() == 4 * [0, 1, 2, 3]


def test_the_step_limit_of_acme_truncates(tmp_path):
    limited = wrappers.StepLimitWrapper(environments.load("catch")(seed=0), step_limit=4)
    agent, spec = random_agent(limited, length=19)
    sink, observed = harness.Recorder(), harness.Observed()
    logger = loggers.CSVLogger(str(tmp_path), "loop", time_delta=0.0, add_uid=False)
    counter = counting.Counter(counting.Counter(), prefix="actor", time_delta=0.0)
    with harness.serving(agent, spec, sink, observed) as inference_server:
        policy_actor = acme_actor.PolicyActor(
            acme.make_environment_spec(limited), inference_server, 0
        )
        quiet_loop(limited, policy_actor, logger=logger, counter=counter).run(num_steps=13)
    logger.close()
    (unroll,) = sink.unrolls()  # 13 steps are reached by 4 episodes.
    assert unroll.inputs.step_type.tolist() == 4 * [FIRST, MID, MID, MID, LAST]
    assert unroll.inputs.discount.tolist() == 20 * [1.0]
    assert observed.episodes == 4 * [(0, 0.0, 4, False)]
    with open(logger.file_path) as file:
        rows = list(csv.DictReader(file))
    assert [(row["episode_length"], row["actor_steps"]) for row in rows] == [
        ("4", "4"),
        ("4", "8"),
        ("4", "12"),
        ("4", "16"),
    ]


@pytest.mark.parametrize("single", [False, True])
def test_wide_numbers_arrive_narrow_and_actions_as_the_environment_wants_them(single, reach):
    inner = Doubles()
    environment = Recorded(wrappers.SinglePrecisionWrapper(inner) if single else inner)
    agent, spec = random_agent(inner, length=5, num_values=5)
    sink, observed = harness.Recorder(), harness.Observed()

    def play(policy):
        own_spec = acme.make_environment_spec(environment)
        policy_actor = acme_actor.PolicyActor(own_spec, policy, 0)
        loop = quiet_loop(environment, policy_actor)
        results = [loop.run_episode() for _ in range(2)]
        policy_actor.close()
        return results

    with harness.serving(agent, spec, sink, observed) as inference_server:
        results = reach(play, inference_server)
    (unroll,) = sink.unrolls()
    inputs = unroll.inputs
    assert inputs.reward.tolist() == np.float32(2 * [0, 0.1, 0.2]).tolist()
    assert inputs.discount.tolist() == np.float32(2 * [1, 0.7, 0]).tolist()
    assert inputs.observation["n"].dtype == np.int32
    assert inputs.observation["n"].tolist() == [0, 1, 2, 0, 1, 2]
    thirds = np.float32([[0, 0], [1 / 3, 1 / 3], [2 / 3, 2 / 3]])
    assert inputs.observation["x"].tolist() == np.concatenate([thirds, thirds]).tolist()
    # `Recorded` has checked them against the spec of the environment that it wraps.
    assert environment.actions[0]["push"].dtype == (np.float32 if single else np.float64)
    assert environment.actions[0]["which"].dtype == (np.int32 if single else np.int64)
    for name in ("push", "which"):
        acted = np.delete(unroll.action[name], [2, 5], axis=0)
        np.testing.assert_array_equal(acted, [action[name] for action in environment.actions])
    for result, (_, total, length, _) in zip(results, observed.episodes, strict=True):
        assert result["episode_return"] == pytest.approx(0.3, rel=1e-6)
        assert result["episode_return"] == pytest.approx(total, rel=1e-6)
        assert result["episode_length"] == length == 2


def test_an_evaluating_actor_leaves_no_unroll():
    environment = harness.Numbered(length=3)
    agent, spec = random_agent(environment, length=1)
    sink, observed = harness.Recorder(), harness.Observed()
    with harness.serving(agent, spec, sink, observed) as inference_server:
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 8, "judge", evaluate=True)
        quiet_loop(environment, policy_actor, should_update=False).run_episode()
    assert observed.episodes == [(8, 3.0, 3, True)]
    assert sink.unrolls() == []


def test_an_episode_that_breaks_off_is_followed_by_the_next():
    environment = harness.Numbered(length=3)
    agent, spec = random_agent(environment, length=1)
    sink, observed = harness.Recorder(), harness.Observed()
    with harness.serving(agent, spec, sink, observed) as inference_server:
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0)
        first = environment.reset()
        policy_actor.observe_first(first)
        step_by_hand(environment, policy_actor, first)  # Nobody acts on the second step.
        quiet_loop(environment, policy_actor).run_episode()
    steps = all_steps(sink.unrolls())
    assert steps.inputs.step_type.tolist() == [FIRST, MID, FIRST, MID, MID, LAST]
    assert steps.inputs.observation[:, 1:].tolist() == [
        *([0, 0], [0, 1]),
        *([1, 0], [1, 1], [1, 2], [1, 3]),
    ]
    assert observed.episodes == [(0, 3.0, 3, False)]


# Services that come and go.


def test_a_service_that_went_away_is_found_again_and_no_step_is_lost(tmp_path):
    environment = harness.Numbered(length=100)
    agent, spec = random_agent(environment, length=1)
    sink = harness.Recorder()
    config = server.ServerConfig(address=f"unix:{tmp_path}/policy")
    with (
        harness.serving(agent, spec, sink) as inference_server,
        client.RemotePolicyService(config.address) as policy,
    ):
        policy_actor = acme_actor.PolicyActor(spec, policy, 0)
        time_step = environment.reset()
        policy_actor.observe_first(time_step)
        for _ in range(2):
            with server.PolicyServer(inference_server, config):
                for _ in range(5):
                    time_step = step_by_hand(environment, policy_actor, time_step)
        policy_actor.close()
    before, after = (
        all_steps([u for u in sink.unrolls() if u.info.incarnation[0] == incarnation])
        for incarnation in (0, 1)
    )
    assert before.inputs.observation[:, 2].tolist() == [0, 1, 2, 3, 4]
    assert after.inputs.observation[:, 2].tolist() == [5, 6, 7, 8, 9]


def test_a_last_step_that_could_not_be_sent_goes_before_the_next_episode():
    environment = harness.Numbered(length=1)
    agent, spec = random_agent(environment, length=1)
    sink = harness.Recorder()
    with harness.serving(agent, spec, sink) as inference_server:
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0)
        first = environment.reset()
        policy_actor.observe_first(first)
        policy_actor.select_action(first.observation)
        inference_server.open(harness.hello(spec, [0], actor_id="another"))
        with pytest.raises(service.Fenced, match="replaced by another"):
            step_by_hand(environment, policy_actor, first)
        with pytest.raises(RuntimeError, match="acme: no episode is under way"):
            policy_actor.select_action(first.observation)
        quiet_loop(environment, policy_actor).run_episode()
    steps = all_steps(sink.unrolls())
    # The other one asked for nothing, so its place in the count of incarnations went to the next.
    assert set(steps.info.incarnation) == {1}
    assert steps.inputs.step_type.tolist() == [LAST, FIRST, LAST]


def test_closing_frees_the_environment_and_ends_the_actor():
    environment = harness.Numbered(length=100)
    agent, spec = random_agent(environment, length=1)
    with harness.serving(agent, spec) as inference_server:
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0)
        policy_actor.close()  # Nothing was opened yet.
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0)
        first = environment.reset()
        policy_actor.observe_first(first)
        second = step_by_hand(environment, policy_actor, first)
        assert inference_server.statistics().sessions == 1
        for _ in range(2):
            policy_actor.close()
            assert inference_server.statistics().sessions == 0
        with pytest.raises(RuntimeError, match="acme: the actor is closed"):
            policy_actor.select_action(second.observation)
        assert inference_server.statistics().sessions == 0
    assert environment.closed == 0


# What is refused.


def test_calls_out_of_order_are_refused_and_harm_nothing():
    environment = harness.Numbered(length=2)
    agent, spec = random_agent(environment, length=1)
    sink = harness.Recorder()
    with harness.serving(agent, spec, sink) as inference_server:
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0, "walker")
        first = environment.reset()
        with pytest.raises(RuntimeError, match="walker: no episode is under way; call observe_fir"):
            policy_actor.select_action(first.observation)
        policy_actor.observe_first(first)
        with pytest.raises(RuntimeError, match="walker: observe was called without select_action"):
            policy_actor.observe(0, dm_env.transition(1.0, first.observation))
        action = policy_actor.select_action(first.observation)
        assert policy_actor.select_action(first.observation) == action  # Sent once.
        other = (action + 1) % 3
        said = f"walker: the service chose the action {action}, but {other} was taken"
        with pytest.raises(ValueError, match=said):
            policy_actor.observe(other, dm_env.transition(1.0, first.observation))
        second = environment.step(action)
        policy_actor.observe(int(action), second)
        step_by_hand(environment, policy_actor, second)
        with pytest.raises(RuntimeError, match="walker: no episode is under way"):
            policy_actor.select_action(second.observation)
        policy_actor.update()
        policy_actor.update(wait=True)
        policy_actor.close()
        with pytest.raises(RuntimeError, match="walker: the actor is closed"):
            quiet_loop(environment, policy_actor).run_episode()
    steps = all_steps(sink.unrolls())
    assert steps.inputs.observation[:, 2].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("time_step", "message"),
    [
        (dm_env.restart(np.zeros(2, np.int32)), r"observation: expected int32 \(3,\), got int32"),
        (dm_env.restart(np.zeros(3)), r"observation: expected int32 \(3,\), got float64 \(3,\)"),
        (dm_env.restart((0, 1)), r"observation: expected 1 arrays, got 2"),
        (
            dm_env.transition(np.zeros(2), np.zeros(3, np.int32)),
            r"reward: expected one number, got float64 \(2,\)",
        ),
        (
            dm_env.transition(1.0, np.zeros(3, np.int32), discount="much"),
            r"discount: expected one number, got <U4 \(\)",
        ),
    ],
)
def test_a_time_step_that_does_not_fit_the_spec_is_named(time_step, message):
    agent, spec = random_agent(harness.Numbered(), length=1)
    with harness.serving(agent, spec) as inference_server:
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0)
        with pytest.raises(specs.SpecError, match=message):
            policy_actor.observe_first(time_step)
        # One that fits is taken, also where its reward has a dimension.
        policy_actor.observe_first(dm_env.transition(np.ones(1), np.zeros(3, np.int32)))
        assert policy_actor.select_action(np.zeros(3, np.int32)) in range(3)


def test_what_the_service_refuses_is_said(reach):
    agent, spec = random_agent(harness.Numbered(), length=1)
    first = environments.load("catch")(seed=0).reset()

    def play(policy):
        other = specs.make_environment_spec(environments.load("catch")(seed=0))
        policy_actor = acme_actor.PolicyActor(other, policy, 0)
        policy_actor.observe_first(first)
        with pytest.raises(service.Refused, match=r"observation: expected int32 \(3,\), got float"):
            policy_actor.select_action(first.observation)

        wrong = actor.ActorConfig(run_token="another")
        policy_actor = acme_actor.PolicyActor(spec, policy, 0, config=wrong)
        policy_actor.observe_first(dm_env.restart(np.zeros(3, np.int32)))
        with pytest.raises(service.Refused, match="run token"):
            policy_actor.select_action(None)

    with harness.serving(agent, spec) as inference_server:
        reach(play, inference_server)
        assert inference_server.statistics().rows == 0


def test_a_service_that_is_gone_is_said_when_patience_ends():
    agent, spec = random_agent(harness.Numbered(), length=1)
    with harness.serving(agent, spec) as inference_server:
        inference_server.stop()
        config = actor.ActorConfig(connect_timeout=0.01)
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0, config=config)
        policy_actor.observe_first(dm_env.restart(np.zeros(3, np.int32)))
        with pytest.raises(service.Unavailable, match="stopped"):
            policy_actor.select_action(None)


def test_a_spec_that_cannot_be_handled_is_refused_at_once():
    spec = harness.make_spec({"name": dm_specs.StringArray(())})
    with pytest.raises(specs.SpecError, match="observation/name: "):
        acme_actor.PolicyActor(spec, None, 0)


# The other half: a learner of Acme's.


def test_a_learner_of_acme_learns_from_an_acme_loop_and_the_loop_acts_with_it():
    environment = environments.load("catch")(seed=0)
    spec = specs.make_environment_spec(environment)
    agent = vtrace.make_agent(spec, vtrace.Config(hidden_sizes=(8,), batch_size=2, unroll_length=9))
    queue = local_queue.LocalQueue(batch_size=2, capacity=100)

    def make_learner(publisher=None) -> acme.core.Learner:
        config = configs.LearnerConfig(prefetch=0)
        return learner.Learner(agent, queue, learning.ONE_DEVICE, publisher, config)

    with harness.serving(agent, spec, queue, inline=True, batch_sizes=(1,)) as inference_server:
        one = make_learner(inference_server.store)
        policy_actor = acme_actor.PolicyActor(spec, inference_server, 0)
        loop = quiet_loop(environment, policy_actor)
        untrained = one.get_variables(["policy"])[0]
        while len(queue) < 4:
            loop.run_episode()
        one.run(num_steps=2)
        trained = one.get_variables(["policy"])[0]
        for _ in range(2):
            loop.run_episode()
        (sample,) = [sample for sample, _ in zip(queue, range(1), strict=False)]
        # Whoever asks the learner gets what the loop acts with.
        _, acting = inference_server.store.get(learning.ONE_DEVICE.training[0])
        tree.map_structure(np.testing.assert_array_equal, acting, trained)
        another = make_learner()
        another.restore(one.save())
        policy_actor.close()
    restored = another.get_variables(["policy"])[0]
    tree.map_structure(np.testing.assert_array_equal, restored, trained)
    changed = tree.map_structure(lambda a, b: bool((a != b).any()), trained, untrained)
    assert any(tree.flatten(changed))
    assert sample.unrolls.info.policy_version.max() == 2
    one.close()
    another.close()
