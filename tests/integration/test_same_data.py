"""Every graph makes the same data of the same environments, while nothing is learned."""

import collections
import signal

import numpy as np
import pytest

from tests.integration import running

GRAPHS = {
    "seed": ("seed",),
    "impala": ("impala",),
    "inference_pool": ("inference_pool",),
    "lockstep": ("lockstep",),
    "seed, in turns": ("seed", "--pipeline=2"),
}
_UNROLLS = 20
"""Of each environment, that are compared: 200 steps, more than twenty episodes of catch."""


def unrolls_of(folder, graph, sizes):
    """Runs a graph; returns the unrolls of each environment in order, as dicts of leaves."""
    program, *more = GRAPHS[graph]
    batches = folder / graph / "batches"
    batches.mkdir(parents=True)
    with running.started(
        folder / graph / "run",
        "--env=catch",
        "--agent=tests.integration.agents:recording",
        "--agent_option=batch_size=4",
        f"--agent_option=folder={batches}",
        "--num_actors=2",
        "--envs_per_actor=2",
        "--num_steps=1000000000",
        "--seed=3",
        f"--inference_batch_sizes={sizes}",
        *more,
        module=f"programs.{program}",
    ) as run:
        found = collections.defaultdict(list)
        read = 0

        def enough():
            # The actors share the steps as the machine lets them, so the run has no length.
            nonlocal read
            assert run.process.poll() is None, run.text()
            # The newest may still be being written.
            for path in sorted(batches.iterdir())[read:-1]:
                add(path, found)
                read += 1
            return len(found) == 4 and min(map(len, found.values())) >= _UNROLLS

        running.wait_until(enough, running.START, f"{_UNROLLS} unrolls of each; {run.text()}")
        run.signal(signal.SIGTERM)
        assert run.wait(running.END) == 128 + signal.SIGTERM, run.text()
    assert sorted(found) == [0, 1, 2, 3]
    return found


def add(path, found):
    """Adds the unrolls of a batch to those of their environments."""
    with np.load(path) as batch:
        for row, environment in enumerate(batch["inputs/environment_id"][:, 0]):
            found[int(environment)].append({name: batch[name][row] for name in batch.files})


def differences(ours, theirs):
    """Yields the name, and both values, of each leaf that is not the same byte by byte."""
    for environment in range(4):
        for mine, other in zip(ours[environment], theirs[environment], strict=False):
            assert mine.keys() == other.keys()
            for name, leaf in mine.items():
                if leaf.dtype != other[name].dtype or leaf.tobytes() != other[name].tobytes():
                    yield f"{environment}: {name}", leaf, other[name]


@pytest.fixture(scope="module")
def of_one_size(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_size")
    return {graph: unrolls_of(folder, graph, "4") for graph in GRAPHS}


@pytest.mark.parametrize("graph", list(GRAPHS)[1:])
def test_with_one_batch_size_a_graph_makes_the_same_bytes(of_one_size, graph):
    seed = of_one_size["seed"]
    names = set(seed[0][0])
    assert {"inputs/observation", "action", "initial_state/0"} <= names, names
    # What is compared is not all the same: environments and their actions differ.
    assert seed[0][0]["action"].tolist() != seed[1][0]["action"].tolist()
    assert len({unroll["action"].tobytes() for unroll in seed[0]}) > _UNROLLS // 2
    assert list(differences(seed, of_one_size[graph])) == []


def test_with_several_batch_sizes_steps_are_the_same_and_logits_close(of_one_size, tmp_path):
    several = unrolls_of(tmp_path, "seed", "2,3,4")
    for name, ours, theirs in differences(of_one_size["lockstep"], several):
        assert name.partition(": ")[2].startswith(("extras", "initial_state")), name
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=name)
