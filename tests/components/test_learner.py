"""A learner's updates do not depend on devices; they are skipped, counted, published and ended."""

import dataclasses
import itertools
import os
import pathlib
import subprocess
import sys
import threading

import acme
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import seedlib
from seedlib.agents import agent as agent_lib
from seedlib.agents import vtrace
from seedlib.components import configs, devices, learner, parameters, tables
from tests.components import learning

ROOT = str(pathlib.Path(seedlib.__file__).parents[1])


@pytest.fixture
def make_learner():
    """`make_learner(agent, samples, ...)`; every learner is closed after the test."""
    made = []

    def make(agent, samples=(), publisher=None, ends=False, **config):
        source = samples if isinstance(samples, learning.Source) else learning.Source(samples, ends)
        made.append(
            learner.Learner(
                agent, source, learning.ONE_DEVICE, publisher, configs.LearnerConfig(**config)
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def vtrace_agent(batch_size=4, length=5, **config):
    config = {"hidden_sizes": (8,), "learning_rate": 0.01, **config}
    return vtrace.make_agent(
        learning.SPEC, vtrace.Config(batch_size=batch_size, unroll_length=length, **config)
    )


def spoilt(sample, row=2, step=1, value=np.nan):
    """The sample with a reward that is no number."""
    reward = sample.unrolls.inputs.reward.copy()
    reward[row, step] = value
    inputs = sample.unrolls.inputs._replace(reward=reward)
    return sample._replace(unrolls=sample.unrolls._replace(inputs=inputs))


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def fit(w, b, samples):
    """Gradient descent on the mean of (x @ w + b - y)^2, by hand in float64.

    The gradient is 2 mean(error x) for w and 2 mean(error) for b.
    """
    w, b = np.array(w, np.float64), float(b)
    for sample in samples:
        x = sample.unrolls.inputs.observation.reshape(-1, learning.SIZE).astype(np.float64)
        error = x @ w + b - sample.unrolls.inputs.reward.reshape(-1)
        w = w - 0.125 * 2 * (error[:, None] * x).mean(0)
        b = b - 0.125 * 2 * error.mean()
    return w, b


@pytest.mark.parametrize("updates_in_flight", [1, 2, 5])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_updates_are_those_of_the_agent_in_the_order_of_the_batches(
    make_learner, updates_in_flight, prefetch
):
    samples = learning.make_samples(8)
    published = learning.Published()
    one = make_learner(
        learning.tiny_agent(),
        samples,
        published,
        updates_in_flight=updates_in_flight,
        prefetch=prefetch,
    )
    one.run(8)
    assert [version for version, _, _ in published.versions] == list(range(9))
    first = published.versions[0][2]
    for version, _, params in published.versions:
        w, b = fit(first["w"], first["b"], samples[:version])
        np.testing.assert_allclose(params["w"], w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(params["b"], b, rtol=1e-5, atol=1e-6)


def test_it_is_a_learner_of_acme(make_learner):
    one = make_learner(learning.tiny_agent(), learning.make_samples(5))
    assert isinstance(one, acme.core.Learner)
    assert isinstance(one, acme.core.Saveable)
    one.step()
    one.run(num_steps=2)
    assert one.statistics.updates == 3
    (policy,) = one.get_variables(["policy"])
    assert {name: (type(leaf), leaf.shape) for name, leaf in policy.items()} == {
        "w": (np.ndarray, (learning.SIZE,)),
        "b": (np.ndarray, ()),
    }
    assert one.get_variables([]) == []
    assert len(one.get_variables(["policy", "policy"])) == 2
    with pytest.raises(KeyError, match="critic"):
        one.get_variables(["policy", "critic"])
    saved = one.save()
    one.run(2)
    one.restore(saved)
    assert_equal(one.get_variables(["policy"])[0], policy)
    assert one.statistics.updates == 3


_DEVICES = """
import sys
import jax
import numpy as np
from seedlib.components import configs, devices, learner, parameters
from tests.components import learning, test_learner as here

every = jax.local_devices()
assert len(every) == 8
splits = {f"{n} train": devices.DeviceSplit(every[:1], tuple(every[:n])) for n in (2, 4)}
splits["2 infer, 6 train"] = devices.split_devices(2, every)
splits["8 shared"] = devices.split_devices(0, every)
splits["1 shared"] = devices.split_devices(None, every[:1])
assert len(splits["2 infer, 6 train"].training) == 6
for name, split in splits.items():
    agent = here.vtrace_agent(batch_size=24)
    samples = learning.make_samples(3, batch=24, length=5)
    store = parameters.ParameterStore(split.inference)
    one = learner.Learner(agent, learning.Source(samples), split, store)
    for version in range(1, 4):
        one.step()
        for device in split.inference:
            got = store.get(device)
            assert got.version == version
            assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(got.params))
            here.assert_equal(jax.device_get(got.params), one.get_variables(["policy"])[0])
    leaves = jax.tree.leaves(one.save().state)
    np.savez(f"{sys.argv[1]}/{name}.npz", *leaves)
    one.close()
    try:
        learner.Learner(here.vtrace_agent(batch_size=25), learning.Source(), split)
    except ValueError as error:
        print(f"{len(split.training)}: {error}")
"""


def with_state(sample, agent):
    """The sample with recurrent states for the agent, unlike for each row."""
    rng = np.random.default_rng(0)
    batch = len(sample.unrolls.inputs.reward)
    state = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype),
        agent.policy.initial_state(batch),
    )
    return sample._replace(unrolls=sample.unrolls._replace(initial_state=state))


def test_an_update_does_not_depend_on_how_many_devices_share_it(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-c", _DEVICES, str(tmp_path)],
        env={
            **os.environ,
            "PYTHONPATH": ROOT,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        },
        timeout=300,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    # 25 unrolls can be shared by one device, but not by 2, 4, 6 or 8.
    lines = shown.splitlines()
    for count in (2, 4, 6, 8):
        message = f"batch_size 25 cannot be divided among {count} training devices"
        assert f"{count}: {message}" in lines
    assert not any(line.startswith("1:") for line in lines)
    names = sorted(path.stem for path in tmp_path.glob("*.npz"))
    assert len(names) == 5
    loaded = {name: np.load(tmp_path / f"{name}.npz") for name in names}
    expected = loaded["1 shared"]
    for name in names:
        assert loaded[name].files == expected.files
        for leaf in expected.files:
            np.testing.assert_allclose(
                loaded[name][leaf], expected[leaf], rtol=0, atol=1e-5, err_msg=f"{name} {leaf}"
            )


def test_a_batch_that_devices_cannot_share_is_refused_before_anything_starts():
    pair = devices.DeviceSplit(learning.ONE_DEVICE.inference, learning.ONE_DEVICE.training * 2)
    with pytest.raises(ValueError, match="batch_size 5 cannot be divided among 2 training devices"):
        learner.Learner(learning.tiny_agent(batch_size=5), learning.Source(), pair)


@pytest.mark.parametrize("make", [learning.tiny_agent, vtrace_agent])
def test_versions_that_readers_hold_stay_readable(make_learner, make):
    # Updates donate the state's buffers; no reader's may be among them, for as long as it likes.
    agent = make()
    samples = learning.make_samples(4, length=agent.unroll.length)
    published = learning.Published()
    one = make_learner(agent, itertools.cycle(samples), published)
    saved = []
    for update in range(300):
        one.step()
        if update % 100 == 50:
            held = (one.save().state, one.get_variables(["policy"])[0])
            saved.append((held, jax.tree.map(np.array, held)))
    assert len(published.versions) == 301
    for _, params, copy in published.versions:
        assert_equal(jax.device_get(params), copy)
    for held, copy in saved:
        assert_equal(held, copy)


def test_a_state_may_hold_the_same_array_twice(make_learner):
    # As target and online network do at the start, also where they come from outside of `init`.
    shared = jnp.arange(3.0)
    agents = [
        learning.tiny_agent(),
        learning.tiny_agent(
            init=lambda key: learning.TinyState(
                {"w": shared, "b": jnp.zeros(())}, {"w": shared, "b": jnp.zeros(())}, jnp.int32(0)
            )
        ),
    ]
    for agent in agents:
        one = make_learner(agent, learning.make_samples(6))
        one.run(2)
        state = one.save()
        same = dataclasses.replace(state, state=state.state._replace(target=state.state.params))
        one.restore(same)
        one.run(2)
        one.restore(dataclasses.replace(same, state=jax.tree.map(jnp.asarray, same.state)))
        one.run(2)
        assert_equal(same.state.target, same.state.params)
    assert not shared.is_deleted()


def test_a_state_without_floating_numbers_is_trained(make_learner):
    agent = learning.tiny_agent(
        init=lambda key: learning.TinyState(jnp.int32(0), jnp.int32(0), jnp.int32(0)),
        update=lambda state, batch, key: agent_lib.Update(
            state._replace(params=state.params + 1), {}, None
        ),
    )
    one = make_learner(agent, learning.make_samples(3))
    one.run(3)
    assert one.get_variables(["policy"])[0] == 3
    assert one.statistics.skipped_updates == 0


def test_a_batch_that_is_not_finite_is_skipped_and_leaves_nothing_behind(make_learner):
    samples = learning.make_samples(20, length=5)
    with_bad = [*samples[:10], spoilt(samples[0]), *samples[10:]]
    published = learning.Published()
    one = make_learner(vtrace_agent(), with_bad, published)
    with learning.Log() as log:
        for update in range(1, 22):
            one.step()
            state = one.save().state
            for leaf in jax.tree.leaves(state):
                assert np.isfinite(leaf).all()
            assert one.statistics.skipped_updates == (update > 10)
            assert all(np.isfinite(metric) for metric in one.metrics().values())
    assert one.statistics.updates == 21
    # The environment of row 2 is 2, and its steps begin at 200.
    (message,) = log.messages
    assert message == (
        "update 11 was skipped: inputs/reward of environment 2 is not finite at its step 201"
    )
    # Nothing was published for it, and the rest is as if it had not been there.
    assert [version for version, _, _ in published.versions] == [*range(11), *range(12, 22)]
    other = make_learner(vtrace_agent(), samples)
    other.run(20)
    assert_equal(other.save().state, state)


def test_three_bad_batches_in_a_row_end_the_run(make_learner):
    samples = learning.make_samples(6)
    bad = spoilt(samples[0], row=3, step=2)
    # Two, a good one, and then three.
    one = make_learner(learning.tiny_agent(), [bad, bad, samples[1], bad, bad, bad, samples[2]])
    with pytest.raises(learner.LearnerError) as error:
        one.run()
    assert one.statistics.updates == 6
    assert str(error.value) == (
        "3 updates in a row skipped: inputs/reward of environment 3 is not finite at its step 302"
    )


@pytest.mark.parametrize(("limit", "value"), [(1, np.nan), (2, np.inf), (2, -np.inf)])
def test_how_many_bad_batches_end_the_run_is_a_setting(make_learner, limit, value):
    bad = [spoilt(sample, value=value) for sample in learning.make_samples(3)]
    one = make_learner(learning.tiny_agent(), bad, max_skipped_updates=limit, updates_in_flight=1)
    with pytest.raises(learner.LearnerError, match=f"{limit} updates in a row"):
        one.run()
    assert one.statistics.updates == limit


def test_a_bad_recurrent_state_is_named(make_learner):
    agent = vtrace_agent(lstm_size=4)
    sample = with_state(learning.make_samples(1, length=5)[0], agent)
    jax.tree.leaves(sample.unrolls.initial_state)[0][1, 3] = np.inf
    one = make_learner(agent, [sample], max_skipped_updates=1)
    with pytest.raises(learner.LearnerError, match=r"initial_state.* of environment 1 .* step 100"):
        one.run()


def test_an_update_that_diverges_by_itself_is_told_from_a_bad_batch(make_learner):
    def update(state, batch, key):
        return agent_lib.Update(
            state._replace(target=jax.tree.map(lambda leaf: leaf / 0.0, state.target)), {}, None
        )

    one = make_learner(
        learning.tiny_agent(update=update), learning.make_samples(1), max_skipped_updates=1
    )
    with pytest.raises(
        learner.LearnerError, match="the batch is finite; the update itself was not"
    ):
        one.run()


def test_the_nan_checker_of_jax_names_the_nan_and_not_a_deleted_buffer(make_learner):
    samples = learning.make_samples(2)
    with jax.debug_nans(True):
        one = make_learner(learning.tiny_agent(), [samples[0], spoilt(samples[1])])
        one.step()
        with pytest.raises(FloatingPointError, match="nan"):
            one.step()


def test_priorities_go_back_to_the_table_they_came_from(make_learner):
    keys = np.arange(4, dtype=np.uint64) + 2**63

    def update(state, batch, key):
        return agent_lib.Update(state, {}, batch.weight * batch.unrolls.inputs.reward[:, 1])

    unrolls = learning.make_unrolls()
    weight = np.array([0.5, 1.0, 0.25, 2.0], np.float32)
    good = tables.Sample(unrolls, weight, keys)
    source = learning.Source([good, spoilt(good, step=1), good._replace(keys=None)])
    one = make_learner(learning.tiny_agent(update=update), source)
    one.run(3)
    # The second had a priority that is not finite, the third is of a queue.
    ((got_keys, got),) = source.priorities
    np.testing.assert_array_equal(got_keys, keys)
    np.testing.assert_array_equal(got, weight * unrolls.inputs.reward[:, 1])
    assert one.statistics.skipped_updates == 1


@pytest.mark.parametrize("timeout", [None, 30.0])
def test_an_error_of_the_source_comes_out_of_step(make_learner, timeout):
    def broken():
        yield from learning.make_samples(2)
        raise OSError("the table burnt down")

    one = make_learner(learning.tiny_agent(), broken())

    def run():
        while True:
            one.step(timeout)

    with pytest.raises(OSError, match="the table burnt down"):
        learning.Call(run).result()


@pytest.mark.parametrize("timeout", [0.0, 0.05, 0.25])
def test_a_step_without_a_batch_returns_in_time(make_learner, timeout):
    one = make_learner(learning.tiny_agent())
    assert learning.Call(one.step, timeout).result() is False
    assert one.statistics.updates == 0
    assert timeout <= one.statistics.wait_seconds


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_is_left_of_a_source_that_ends_is_used(make_learner, prefetch):
    for count in (0, 1, 5):
        samples = learning.make_samples(count)
        one = make_learner(learning.tiny_agent(), samples, ends=True, prefetch=prefetch)
        learning.Call(one.run).result()
        assert one.statistics.updates == count
        assert one.exhausted
        assert one.step() is False


def test_run_stops_when_it_is_told_to(make_learner):
    samples = itertools.cycle(learning.make_samples(2))
    one = make_learner(learning.tiny_agent(), samples, updates_in_flight=3)
    learning.Call(one.run, stop=lambda: one.statistics.updates >= 5).result()
    # Those in flight are finished, not dropped.
    assert 5 <= one.statistics.updates <= 8
    assert one.statistics.updates == int(one.save().state.updates)


def test_closing_ends_a_blocked_step_and_the_thread(make_learner):
    source = learning.Source()
    one = make_learner(learning.tiny_agent(), source)
    stepping = learning.Call(one.step)
    assert source.waiting.wait(learning.PATIENCE)
    learning.Call(one.close).result(timeout=5.0)
    assert stepping.result(timeout=5.0) is False
    assert source.closed.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name == "learner/prefetch"]
    one.close()


def test_closing_ends_a_thread_that_has_nowhere_to_put_a_batch(make_learner):
    one = make_learner(learning.tiny_agent(), itertools.cycle(learning.make_samples(2)), prefetch=1)
    one.step()
    learning.Call(one.close).result(timeout=5.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "learner/prefetch"]
    assert one.step() is True or one.step() is False


def test_a_learner_that_never_stepped_closes(make_learner):
    source = learning.Source()
    make_learner(learning.tiny_agent(), source).close()
    assert source.closed.is_set()


def test_the_lag_is_updates_between_acting_and_learning(make_learner):
    # At update u (u done before it), steps of version v have lag u - v:
    #   u = 0: 0, 0        u = 1: 1, 0        u = 2: 2, 0        u = 3: 0, 0
    versions = [[0, 0], [0, 1], [0, 2], [3, 3]]
    samples = []
    for version in versions:
        per_step = np.array(version)[:, None].repeat(3, 1)
        samples.append(tables.Sample(learning.make_unrolls(2, version=per_step)))
    one = make_learner(learning.tiny_agent(batch_size=2), samples, updates_in_flight=3)
    lasts = []
    for _ in range(4):
        one.step()
        lasts.append(one.statistics.lag_last)
    assert lasts == [0.0, 0.5, 1.0, 0.0]
    statistics = one.statistics
    # Each version stands for three steps.
    assert (statistics.lag_sum, statistics.lag_count, statistics.lag_max) == (9, 24, 2)


def test_the_lag_goes_on_after_a_restore(make_learner):
    one = make_learner(learning.tiny_agent(), learning.make_samples(1, version=97))
    one.restore(dataclasses.replace(one.save(), updates=100))
    one.step()
    assert (one.statistics.lag_max, one.statistics.lag_last) == (3, 3.0)


def test_transitions_are_counted_as_real_ones(make_learner):
    # Steps go MID, LAST, FIRST from a start of each row's own, so rows of three steps are
    #   MID LAST FIRST: one transition, into LAST; LAST FIRST MID: one; FIRST MID LAST: two;
    # and the fourth is as the first.
    one = make_learner(learning.tiny_agent(), learning.make_samples(3))
    one.run(3)
    assert one.statistics.transitions == 3 * (1 + 1 + 2 + 1)


@pytest.mark.parametrize("start", [2**31 - 100, 2**32 - 100, 2**53 - 100])
def test_counters_go_on_beyond_any_width(make_learner, start):
    published = learning.Published()
    samples = itertools.cycle(learning.make_samples(3, version=start))
    one = make_learner(learning.tiny_agent(), samples, published)
    one.restore(dataclasses.replace(one.save(), updates=start))
    noises = []
    for _ in range(200):
        one.step()
        noises.append(one.metrics()["noise"])
    assert one.statistics.updates == start + 200
    versions = [version for version, _, _ in published.versions]
    assert versions == [0, *range(start, start + 201)]
    # The lag of an unroll of version `start` at the last update, which is the 200th.
    assert one.statistics.lag_max == 199
    # Each update has random numbers of its own.
    assert len(set(noises)) == 200


def test_an_update_is_compiled_once(make_learner):
    # A number of Python in the state and its like after a restore are the same to the compiler.
    traces = []
    tiny = learning.tiny_agent()

    def init(key):
        return tiny.init(key)._replace(target=0.5)

    def update(state, batch, key):
        traces.append(1)
        result = tiny.update(state._replace(target=state.params), batch, key)
        return result._replace(state=result.state._replace(target=state.target * 0.5))

    one = make_learner(
        learning.tiny_agent(init=init, update=update), itertools.cycle(learning.make_samples(3))
    )
    one.run(50)
    saved = one.save()
    one.restore(saved)
    one.run(50)
    one.restore(dataclasses.replace(saved, updates=2**31 + 5))
    one.run(50)
    assert len(traces) == 1
    assert one._update._cache_size() == 1


def test_metrics_are_numbers_of_the_newest_update(make_learner):
    agent = vtrace_agent()
    one = make_learner(agent, learning.make_samples(3, length=5))
    assert one.metrics() == {}
    one.run(3)
    metrics = one.metrics()
    assert {"loss", "gradient_norm", "learning_rate", "valid_transitions"} <= metrics.keys()
    for name, value in metrics.items():
        assert type(value) is float, name
        assert np.isfinite(value), name
    assert metrics["learning_rate"] == pytest.approx(0.01)


def test_random_numbers_depend_on_seed_and_update_alone(make_learner):
    samples = learning.make_samples(6)
    agent = learning.tiny_agent(noise=0.5)
    first = make_learner(agent, samples, seed=3)
    first.run(6)
    second = make_learner(agent, samples[:3], seed=3)
    second.run(3)
    third = make_learner(agent, samples[3:], seed=3, updates_in_flight=2)
    third.restore(second.save())
    third.run(3)
    assert_equal(third.save().state, first.save().state)
    other = make_learner(agent, samples, seed=4)
    other.run(6)
    assert not np.array_equal(other.save().state.params["b"], first.save().state.params["b"])


def test_inference_never_sees_half_a_version(make_learner):
    # All leaves of a version hold the same number, so that a reader would see parts of two.
    names = [f"layer_{i}" for i in range(20)]

    def init(key):
        return {name: jnp.zeros((64, 64)) for name in names}

    agent = dataclasses.replace(
        learning.tiny_agent(
            init=init,
            update=lambda state, batch, key: agent_lib.Update(
                {name: leaf + 1 for name, leaf in state.items()}, {}, None
            ),
        ),
        policy_params=lambda state: state,
    )
    store = parameters.ParameterStore(learning.ONE_DEVICE.inference)
    one = make_learner(agent, itertools.cycle(learning.make_samples(2)), store)
    done = threading.Event()

    def read():
        (device,) = learning.ONE_DEVICE.inference
        seen = []
        while not done.is_set():
            version, params = store.get(device)
            for leaf in jax.tree.leaves(params):
                assert (np.asarray(leaf) == version).all()
            seen.append(version)
        return seen

    readers = [learning.Call(read) for _ in range(3)]
    try:
        one.run(200)
    finally:
        done.set()
    for reader in readers:
        seen = reader.result()
        assert seen == sorted(seen)
    assert store.get(learning.ONE_DEVICE.inference[0]).version == 200
