"""Several policy services that stand for one."""

import numpy as np
import pytest
from dm_env import specs as dm_specs

from seedlib.agents import agent as agent_lib
from seedlib.components import actor, policy_pool
from seedlib.components.transport import service
from tests.components import harness

HELLO = service.Hello(
    "actor", (0,), "x", False, dm_specs.Array((), np.float32), dm_specs.Array((), np.int32)
)


class Named:
    """A service whose answers are its name, or that raises."""

    def __init__(self, name, error=None):
        self.name = name
        self.error = error
        self.opened = []
        self.closed = 0

    def open(self, hello, timeout=None):
        assert timeout is not None
        self.opened.append(hello)
        if self.error is not None:
            raise self.error
        return Session(self)


class Session:
    """Answers with the name of its service."""

    def __init__(self, owner):
        self._owner = owner
        self._sent = False

    def send(self, time_steps, timeout=None):
        self._sent = True

    def receive(self, timeout=None):
        assert self._sent
        self._sent = False
        return self._owner.name

    def step(self, time_steps, timeout=None):
        self.send(time_steps)
        return self.receive()

    def close(self):
        self._owner.closed += 1


def opened_at(pool):
    return pool.open(HELLO).step(None)


def test_actors_are_spread_by_where_they_begin():
    services = [Named("a"), Named("b"), Named("c")]
    pools = [policy_pool.PolicyPool(services, first=index) for index in range(6)]
    assert [opened_at(pool) for pool in pools] == ["a", "b", "c", "a", "b", "c"]


def test_a_service_that_is_away_is_passed_over():
    away, here = Named("a", service.Unavailable("gone")), Named("b")
    pool = policy_pool.PolicyPool([away, here])
    assert [opened_at(pool), opened_at(pool)] == ["b", "b"]
    assert len(away.opened) == 1


def test_a_service_that_comes_later_is_used_when_the_others_go():
    first, late = Named("a"), Named("b", service.Unavailable("not yet"))
    pool = policy_pool.PolicyPool([first, late])
    assert opened_at(pool) == "a"
    first.error, late.error = service.Unavailable("gone"), None
    assert opened_at(pool) == "b"


def test_a_session_goes_to_its_own_service_once_that_answers():
    own, other = Named("a", service.Unavailable("gone")), Named("b")
    session = policy_pool.PolicyPool([own, other], return_period=0.0).open(HELLO)
    assert [session.step(None) for _ in range(3)] == ["b", "b", "b"]
    assert len(own.opened) == 1 + 3  # It looked each time.
    own.error = service.Refused("no room")
    assert session.step(None) == "b"
    own.error = None
    session.send(None)
    assert (other.closed, own.closed) == (1, 0)
    assert session.receive() == "a"
    looks = len(own.opened)
    assert [session.step(None) for _ in range(3)] == ["a", "a", "a"]
    assert len(own.opened) == looks  # There it stays.
    assert own.opened[-1].incarnation != HELLO.incarnation
    session.close()
    assert (other.closed, own.closed) == (1, 1)


def test_a_session_elsewhere_does_not_look_all_the_time():
    own, other = Named("a", service.Unavailable("gone")), Named("b")
    session = policy_pool.PolicyPool([own, other], return_period=1000.0).open(HELLO)
    own.error = None
    assert [session.step(None) for _ in range(3)] == ["b", "b", "b"]
    assert len(own.opened) == 1


def test_a_session_that_is_closed_while_it_looks_leaves_nothing_open():
    own, other = Named("a", service.Unavailable("gone")), Named("b")
    session = policy_pool.PolicyPool([own, other], return_period=0.0).open(HELLO)

    def open_and_close(hello, timeout):
        session.close()
        return Session(own)

    own.open = open_and_close
    with pytest.raises(service.Unavailable, match="closed"):
        session.send(None)
    assert (own.closed, other.closed) == (1, 1)


def test_a_real_actor_goes_back_and_keeps_its_episode():
    spec = harness.NUMBERED_SPEC
    sinks = [harness.Recorder(), harness.Recorder()]
    agent = harness.counting_agent(spec, agent_lib.UnrollShape(4))
    with (
        harness.serving(agent, spec, sinks[0]) as own,
        harness.serving(agent, spec, sinks[1]) as other,
    ):
        pool = policy_pool.PolicyPool([Late(own), other], return_period=0.0)
        environment_actor = actor.EnvironmentActor(
            actor.SerialEnvironments(lambda seed: harness.Numbered(1000), (0,)), pool, (0,)
        )
        for _ in range(20):
            environment_actor.step()
        assert (own.statistics().sessions, other.statistics().sessions) == (1, 0)
        environment_actor.close()
    seen = [u.inputs.observation[:, 2].tolist() for sink in sinks for u in sink.unrolls()]
    assert seen == [
        [10, 11, 12, 13, 14],
        [14, 15, 16, 17, 18],
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
    ]


class Late:
    """A service that is there from the eleventh time on that it is asked for."""

    def __init__(self, there):
        self._there = there
        self._asked = 0

    def open(self, hello, timeout=None):
        self._asked += 1
        if self._asked <= 11:  # Once to begin with, and then before each of ten steps.
            raise service.Unavailable("not yet")
        return self._there.open(hello, timeout)


def test_at_the_start_an_actor_is_patient_with_its_own():
    slow, quick = Named("a", service.Unavailable("not yet")), Named("b")
    pool = policy_pool.PolicyPool([slow, quick], patience=1000.0)
    with pytest.raises(service.Unavailable, match="not yet"):
        pool.open(HELLO)
    assert quick.opened == []
    slow.error = None
    assert opened_at(pool) == "a"
    slow.error = service.Unavailable("gone")
    assert opened_at(pool) == "b"


def test_none_that_answers_is_an_error_with_every_reason():
    pool = policy_pool.PolicyPool(
        [Named("a", service.Unavailable("one")), Named("b", service.Unavailable("two"))]
    )
    with pytest.raises(service.Unavailable, match="one; two"):
        pool.open(HELLO)


def test_a_refusal_is_not_shopped_around():
    refusing, other = Named("a", service.Refused("other spec")), Named("b")
    with pytest.raises(service.Refused, match="other spec"):
        policy_pool.PolicyPool([refusing, other]).open(HELLO)
    assert other.opened == []


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        policy_pool.PolicyPool([])
