"""Tests of the unroll assembler: which steps lie in which unroll, and with which state."""

import hypothesis
import numpy as np
import pytest
import tree
from dm_env import specs as dm_specs
from hypothesis import strategies

from seedlib import types
from seedlib.agents import agent as agent_lib
from seedlib.components import records, unrolls
from tests.components import harness

SCALAR = dm_specs.Array((), np.int64)
NUMBER = dm_specs.Array((), np.int64)
STATE = {"count": NUMBER}


def step_spec(observation=NUMBER):
    return types.Unroll(
        inputs=types.PolicyInput(
            step_type=dm_specs.Array((), np.uint8),
            reward=dm_specs.Array((), np.float32),
            discount=dm_specs.Array((), np.float32),
            observation=observation,
            previous_action=SCALAR,
            environment_id=dm_specs.Array((), np.int32),
            evaluate=dm_specs.Array((), np.bool_),
        ),
        action=SCALAR,
        extras={"logits": dm_specs.Array((2,), np.float32)},
        initial_state=(),
        info=types.UnrollInfo(SCALAR, SCALAR, SCALAR),
    )


def step(slots, observation, index, reward=None, step_type=None):
    """One step of each of some environments; `index` is their step index, `[n]`."""
    index = np.asarray(index)
    zeros = np.zeros(len(slots))
    return types.Unroll(
        inputs=types.PolicyInput(
            step_type=(index > 0).astype(np.uint8) if step_type is None else np.array(step_type),
            reward=zeros if reward is None else np.asarray(reward),
            discount=zeros + 1,
            observation=observation,
            previous_action=index - 1,
            environment_id=np.asarray(slots),
            evaluate=zeros > 0,
        ),
        action=index,
        extras={"logits": np.stack([index, -index], 1)},
        initial_state=(),
        info=types.UnrollInfo(index, index, index),
    )


class Assembler:
    """An assembler that takes steps as they are, and packs them."""

    def __init__(self, observation, state, shape, slots):
        self.layout = records.RecordLayout(step_spec(observation), largest=64)
        self.assembler = unrolls.UnrollAssembler(self.layout, state, shape, slots)
        self.reset = self.assembler.reset

    def append(self, slots, steps, states):
        return self.assembler.append(slots, self.layout.pack_rows(steps), states)


def make_assembler(slots=1, observation=NUMBER, state=STATE, **shape):
    return Assembler(observation, state, agent_lib.UnrollShape(**shape), slots)


def feed(assembler, indices, reward=lambda index: 10 * index):
    """Gives slot 0 the steps `indices`, whose observation is their index; returns the unrolls."""
    whole = []
    for index in indices:
        slots, at = np.array([0]), np.array([index])
        unroll = assembler.append(slots, step(slots, at, at, reward(at)), {"count": at})
        if unroll is not None:
            whole += [tree.map_structure(lambda leaf: leaf[0], unroll)]
    return whole


def test_consecutive_unrolls_share_one_step():
    whole = feed(make_assembler(length=4), range(13))
    assert [u.inputs.observation.tolist() for u in whole] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
    ]


def test_every_reward_is_a_learning_target_exactly_once():
    # A transition's reward is that of the step it leads to: all but the first of an unroll.
    whole = feed(make_assembler(length=4), range(13))
    targets = [reward for u in whole for reward in u.inputs.reward[1:].tolist()]
    assert targets == [10 * index for index in range(1, 13)]


def test_a_bonus_on_a_shared_step_is_counted_once():
    whole = feed(
        make_assembler(length=4), range(13), lambda index: 10 * index + 1000 * (index == 4)
    )
    # 10 + 20 + ... + 120 = 780, and the bonus on step 4, which two unrolls hold.
    assert sum(u.inputs.reward[1:].sum() for u in whole) == 780 + 1000


def test_every_leaf_belongs_to_the_same_step():
    for unroll in feed(make_assembler(length=3), range(10)):
        index = unroll.inputs.observation
        np.testing.assert_array_equal(unroll.action, index)
        np.testing.assert_array_equal(unroll.inputs.previous_action, index - 1)
        np.testing.assert_array_equal(unroll.extras["logits"], np.stack([index, -index], 1))
        for column in unroll.info:
            np.testing.assert_array_equal(column, index)
        assert unroll.initial_state["count"] == index[0]


def test_an_unroll_holds_one_environment_several_episodes_and_consecutive_steps():
    # Episodes of 3 transitions: steps 0 FIRST, 1 and 2 MID, 3 LAST, 4 FIRST, ...
    assembler = make_assembler(slots=4, length=8)
    slots = np.arange(4)
    whole = []
    count = np.zeros(4, np.int64)  # Inputs since FIRST, as a core that counts them has it.
    for index in range(50):
        kind = [harness.FIRST, harness.MID, harness.MID, harness.LAST][index % 4]
        if kind == harness.FIRST:
            count[:] = 0
        observation = 1000 * slots + index
        unroll = assembler.append(
            slots,
            step(slots, observation, [index] * 4, step_type=[kind] * 4),
            {"count": count.copy()},
        )
        count += 1
        if unroll is not None:
            whole += [tree.map_structure(lambda x, k=k: x[k], unroll) for k in range(4)]
    assert len(whole) == 4 * 6  # 50 steps hold six windows of 9 that share one.
    for unroll in whole:
        observation = unroll.inputs.observation
        assert len(set(observation // 1000)) == 1
        assert set(np.diff(observation)) == {1}
        assert observation[0] // 1000 == unroll.inputs.environment_id[0]
        firsts = unroll.inputs.step_type == harness.FIRST
        assert firsts.sum() >= 2
        # Steps since FIRST are the index modulo 4.
        assert unroll.initial_state["count"] == observation[0] % 1000 % 4


def windows(steps, length, burn_in, period):
    """The definition: unroll k is steps `k * period` to `k * period + burn_in + length`."""
    size = burn_in + length + 1
    return [list(range(start, start + size)) for start in range(0, steps - size + 1, period)]


@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=150, deadline=None)
def test_unrolls_are_sliding_windows_of_each_environment(data):
    length = data.draw(strategies.integers(1, 6))
    burn_in = data.draw(strategies.integers(0, 5))
    period = data.draw(strategies.integers(1, burn_in + length + 1))
    slots = data.draw(strategies.integers(1, 4))
    calls = data.draw(strategies.integers(0, 60))
    random = np.random.default_rng(data.draw(strategies.integers(0, 2**32)))
    assembler = make_assembler(slots=slots, length=length, burn_in=burn_in, period=period)
    taken = np.zeros(slots, np.int64)
    found = [[] for _ in range(slots)]
    for _ in range(calls):
        # Any of the environments, in any order: requests of actors meet in a batch by chance.
        some = random.permutation(slots)[: random.integers(0, slots + 1)]
        index = taken[some]
        unroll = assembler.append(
            some, step(some, 1000 * some + index, index), {"count": 7 * index + some}
        )
        taken[some] += 1
        if unroll is None:
            continue
        for row, slot in enumerate(unroll.inputs.environment_id[:, 0]):
            observation = unroll.inputs.observation[row] - 1000 * slot
            found[slot].append(observation.tolist())
            assert unroll.initial_state["count"][row] == 7 * observation[0] + slot
    for slot in range(slots):
        assert found[slot] == windows(taken[slot], length, burn_in, period)


def test_reset_drops_what_is_not_in_an_unroll_yet_and_counts_it():
    assembler = make_assembler(length=4)
    assert feed(assembler, range(3)) == []
    assert assembler.reset(np.array([0])) == 3
    (unroll,) = feed(assembler, range(100, 105))
    assert unroll.inputs.observation.tolist() == [100, 101, 102, 103, 104]
    assert unroll.initial_state["count"] == 100
    # The last step of an unroll is also the first of the next, which is dropped.
    assert assembler.reset(np.array([0])) == 1
    assert assembler.reset(np.array([0])) == 0


def test_reset_leaves_other_environments_alone():
    assembler = make_assembler(slots=2, length=2)
    both = np.array([0, 1])
    for index in range(2):
        assembler.append(both, step(both, both, [index, index]), {"count": both})
    assert assembler.reset(np.array([0])) == 2
    unroll = assembler.append(both, step(both, both, [2, 2]), {"count": both})
    assert unroll.inputs.environment_id.tolist() == [[1, 1, 1]]
    assert unroll.info.step_index.tolist() == [[0, 1, 2]]


def test_stored_pairs_are_neighbours_although_the_observation_is_one_reused_array():
    spec = {"a": (dm_specs.Array((), np.int32), dm_specs.Array((2, 2), np.float32))}
    assembler = make_assembler(observation=spec, length=1)
    shared = {"a": (np.zeros(1, np.int32), np.zeros((1, 2, 2), np.float32))}
    slots, pairs = np.array([0]), []
    for k in range(1001):
        shared["a"][0][:] = k
        shared["a"][1][:] = k
        unroll = assembler.append(slots, step(slots, shared, [k]), {"count": np.array([k])})
        if unroll is not None:
            pairs.append(unroll.inputs.observation["a"])
    shared["a"][0][:] = -1
    shared["a"][1][:] = -1
    assert len(pairs) == 1000
    for k, (number, image) in enumerate(pairs):
        assert number.tolist() == [[k, k + 1]]
        np.testing.assert_array_equal(image[0, :, 0, 0], [k, k + 1])
        np.testing.assert_array_equal(image[0, :, 1, 1], [k, k + 1])


def test_unrolls_are_the_callers_to_keep():
    assembler = make_assembler(length=2, period=1)
    whole = feed(assembler, range(4))
    kept = [tree.map_structure(np.copy, unroll) for unroll in whole]
    for unroll in whole:
        tree.map_structure(lambda leaf: leaf.fill(99) if leaf.shape else None, unroll)
    later = feed(assembler, range(4, 30))
    assert [u.inputs.observation.tolist() for u in kept] == [[0, 1, 2], [1, 2, 3]]
    assert later[0].inputs.observation.tolist() == [2, 3, 4]


def test_a_policy_without_state_gives_unrolls_without_one():
    assembler = make_assembler(state=(), length=1)
    slots = np.array([0])
    for index in range(2):
        unroll = assembler.append(slots, step(slots, slots, [index]), ())
    assert unroll.initial_state == ()


def test_states_are_read_only_where_an_unroll_may_start():
    class Counted:
        """A device array that counts how often somebody copies it to the host."""

        reads = 0

        def __array__(self, dtype=None, copy=None):
            Counted.reads += 1
            return np.zeros(1, np.int64)

    assembler = make_assembler(length=4)
    slots = np.array([0])
    for index in range(13):
        assembler.append(slots, step(slots, slots, [index]), {"count": Counted()})
    assert Counted.reads == 4  # Before steps 0, 4, 8 and 12.


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"length": 0}, "unroll length must be at least 1, got 0"),
        ({"length": 1, "burn_in": -1}, "burn_in must not be negative, got -1"),
        ({"length": 2, "burn_in": 1, "period": 5}, r"period must be in 1\.\.4"),
        ({"length": 2, "period": 0}, r"period must be in 1\.\.3"),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        agent_lib.UnrollShape(**shape)
