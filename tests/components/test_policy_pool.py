"""Several policy services that stand for one."""

import numpy as np
import pytest
from dm_env import specs as dm_specs

from seedlib.components import policy_pool
from seedlib.components.transport import service

HELLO = service.Hello(
    "actor", (0,), "x", False, dm_specs.Array((), np.float32), dm_specs.Array((), np.int32)
)


class Named:
    """A service that opens sessions which are its name, or raises."""

    def __init__(self, name, error=None):
        self.name = name
        self.error = error
        self.opened = 0

    def open(self, hello, timeout=None):
        assert timeout is not None
        self.opened += 1
        if self.error is not None:
            raise self.error
        return self.name


def test_actors_are_spread_by_where_they_begin():
    services = [Named("a"), Named("b"), Named("c")]
    pools = [policy_pool.PolicyPool(services, first=index) for index in range(6)]
    assert [pool.open(HELLO) for pool in pools] == ["a", "b", "c", "a", "b", "c"]


def test_a_service_that_is_away_is_passed_over_and_not_gone_back_to():
    away, here = Named("a", service.Unavailable("gone")), Named("b")
    pool = policy_pool.PolicyPool([away, here])
    assert [pool.open(HELLO), pool.open(HELLO)] == ["b", "b"]
    assert away.opened == 1


def test_a_service_that_comes_later_is_used_when_the_others_go():
    first, late = Named("a"), Named("b", service.Unavailable("not yet"))
    pool = policy_pool.PolicyPool([first, late])
    assert pool.open(HELLO) == "a"
    first.error, late.error = service.Unavailable("gone"), None
    assert pool.open(HELLO) == "b"


def test_at_the_start_an_actor_is_patient_with_its_own():
    slow, quick = Named("a", service.Unavailable("not yet")), Named("b")
    pool = policy_pool.PolicyPool([slow, quick], patience=1000.0)
    with pytest.raises(service.Unavailable, match="not yet"):
        pool.open(HELLO)
    assert quick.opened == 0
    slow.error = None
    assert pool.open(HELLO) == "a"
    slow.error = service.Unavailable("gone")
    assert pool.open(HELLO) == "b"


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
    assert other.opened == 0


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        policy_pool.PolicyPool([])
