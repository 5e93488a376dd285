"""The same path in the plainest way, to compare the library with: no care, no guarantees.

    python -m benchmarks.plain --env=NAME [--num_actors=N] [--envs_per_actor=E] [--agent_option=X=Y]

One process has a gRPC server, a thread that infers, a Reverb queue and a thread that learns; each
actor is a process with a loop. An actor's environments step together, so its unrolls are whole at
the same time and go as one item. No batching but of what waits, no handshake, limit, check,
truncation, fencing, deadline, checkpoint, figures or restart. Agent and environments are the
library's own, so that both compute the same.

It prints a line of JSON each second, until it is stopped: time in seconds, and agent steps so far.
"""

import argparse
import collections
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any

import grpc
import numpy as np

_METHOD = "Step"
_SERVICE = "plain"
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def act(env: str, address: str, count: int, seed: int) -> None:
    """Steps environments and sends all their rows in one message, until the server is gone."""
    from seedlib import environments

    made = [environments.load(env)(seed=seed * count + index) for index in range(count)]
    steps = [environment.reset() for environment in made]
    outgoing: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send() -> None:
        outgoing.put(
            np.array([step.step_type for step in steps], np.int32).tobytes()
            + np.array([step.reward or 0.0 for step in steps], np.float32).tobytes()
            + np.stack([step.observation for step in steps]).tobytes()
        )

    send()
    call = grpc.insecure_channel(address, _OPTIONS).stream_stream(f"/{_SERVICE}/{_METHOD}")
    for answer in call(iter(outgoing.get, None), wait_for_ready=True):
        actions = np.frombuffer(answer, np.int32)
        steps = [e.step(action) for e, action in zip(made, actions, strict=True)]
        send()


class _Request:
    """The rows of an actor, and where its answer goes."""

    def __init__(self, actor: int, message: bytes, answers: "queue.SimpleQueue[bytes]") -> None:
        self.actor = actor
        self.message = message
        self.answers = answers


class _Plain:
    """The process that infers and learns."""

    def __init__(self, env: str, options: Mapping[str, Any], actors: int, count: int) -> None:
        import jax
        import reverb

        from seedlib import environments, specs
        from seedlib.agents import loading
        from seedlib.components import inference

        sample = environments.load(env)(seed=0)
        self._spec = specs.make_environment_spec(sample)
        sample.close()
        self._agent = loading.AgentFactory("vtrace", self._spec, options)()
        self._template = inference.unroll_specs(self._agent, self._spec)._replace(info=())
        self._actors, self._count = actors, count
        blocks = -(-self._agent.batch_size // count)
        self._table = reverb.Server([reverb.Table.queue("queue", max_size=2 * blocks + actors)])
        self._client = reverb.Client(f"localhost:{self._table.port}")
        key = jax.random.PRNGKey(0)
        self._params = self._agent.policy_params(self._agent.init(key))
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._numbers = iter(range(actors))
        self.acted = 0

    def stream(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serves one actor."""
        del context
        actor = next(self._numbers)
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        for message in requests:
            self._waiting.put(_Request(actor, message, answers))
            yield answers.get()

    def _make_step(self) -> Any:
        import dm_env
        import jax
        import jax.numpy as jnp

        from seedlib import types

        agent = self._agent

        @jax.jit
        def step(params: Any, memory: Any, key: Any, slots: Any, rows: Any) -> Any:
            step_type, reward, observation = rows
            state, previous = jax.tree_util.tree_map(lambda leaf: leaf[slots], memory)
            going_on = (step_type != int(dm_env.StepType.LAST)).astype(jnp.float32)
            training = jnp.zeros(len(slots), bool)
            inputs = types.PolicyInput(
                step_type.astype(jnp.uint8),
                reward,
                going_on,
                observation,
                previous,
                slots.astype(jnp.int32),
                training,
            )
            output = agent.policy.step(params, jax.random.split(key, len(slots)), inputs, state)
            action = output.action.astype(jnp.int32)
            memory = jax.tree_util.tree_map(
                lambda stored, new: stored.at[slots].set(new), memory, (output.state, action)
            )
            return (inputs, action, output.extras, state), memory

        return step

    def infer(self) -> None:
        """Answers whatever waits, for ever."""
        import jax
        import tree

        count, window = self._count, self._agent.unroll.window
        step = self._make_step()
        total = self._actors * count
        memory = self._agent.policy.initial_state(total), np.zeros(total, np.int32)
        history: dict[int, list[Any]] = collections.defaultdict(list)
        writer = self._client.trajectory_writer(1)
        keys = np.random.default_rng(0).integers(0, 2**32, (2**16, 2), np.uint32)
        shape, dtype = self._spec.observations.shape, self._spec.observations.dtype
        for number in range(1 << 62):
            taken = [self._waiting.get()]
            while not self._waiting.empty():
                taken.append(self._waiting.get())
            messages = [request.message for request in taken]
            rows = (
                np.concatenate([np.frombuffer(m, np.int32, count) for m in messages]),
                np.concatenate([np.frombuffer(m, np.float32, count, 4 * count) for m in messages]),
                np.concatenate([np.frombuffer(m, dtype, offset=8 * count) for m in messages]),
            )
            rows = (*rows[:2], rows[2].reshape(-1, *shape))
            slots = np.concatenate(
                [np.arange(r.actor * count, (r.actor + 1) * count) for r in taken]
            )
            outputs, memory = step(self._params, memory, keys[number % len(keys)], slots, rows)
            outputs = jax.tree_util.tree_map(np.asarray, outputs)
            for place, request in enumerate(taken):
                mine = slice(place * count, (place + 1) * count)
                request.answers.put(outputs[1][mine].tobytes())
                steps = history[request.actor]
                steps.append(tree.map_structure(lambda leaf, at=mine: leaf[at], outputs))
                self.acted += count
                if len(steps) == window:
                    self._write(writer, steps)
                    del steps[:-1]

    def _write(self, writer: Any, steps: list[Any]) -> None:
        import tree

        whole = tree.map_structure(lambda *leaves: np.stack(leaves, 1), *[s[:3] for s in steps])
        leaves = tree.flatten((whole, steps[0][3]))
        writer.append({f"{index:02d}": leaf for index, leaf in enumerate(leaves)})
        writer.create_item("queue", 1.0, {k: v[-1:] for k, v in writer.history.items()})
        writer.flush(1)

    def learn(self) -> None:
        """Trains on whatever comes, each unroll once, for ever."""
        import jax
        import jax.numpy as jnp
        import tree

        from seedlib.agents.agent import Batch

        agent, size = self._agent, self._agent.batch_size

        def update(state: Any, batch: Any, key: Any) -> Any:
            state = agent.update(state, batch, key).state
            return state, jax.tree_util.tree_map(jnp.copy, agent.policy_params(state))

        update = jax.jit(update, donate_argnums=0)
        state = jax.jit(agent.init)(jax.random.PRNGKey(0))
        weight = np.ones(size, np.float32)
        held: list[list[np.ndarray]] = []
        for item in self._client.sample("queue", 1 << 40, emit_timesteps=False):
            held.append([column[0] for column in item.data])
            if sum(len(columns[0]) for columns in held) < size:
                continue
            leaves = [np.concatenate(columns) for columns in zip(*held, strict=True)]
            while len(leaves[0]) >= size:
                batch = tree.unflatten_as(self._template, [leaf[:size] for leaf in leaves])
                state, params = update(state, Batch(batch, weight), np.zeros(2, np.uint32))
                jax.block_until_ready(params)
                self._params = params
                leaves = [leaf[size:] for leaf in leaves]
            held = [leaves] if len(leaves[0]) else []


def serve(env: str, options: Mapping[str, Any], actors: int, count: int) -> None:
    """Infers and learns, with actors in processes of their own, until this one is stopped."""
    from seedlib.components import devices

    devices.compute_in_calling_threads()
    plain = _Plain(env, options, actors, count)
    listener = grpc.server(futures.ThreadPoolExecutor(actors + 1), options=_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(plain.stream)
    listener.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),)
    )
    address = f"localhost:{listener.add_insecure_port('localhost:0')}"
    listener.start()
    command = [sys.executable, "-m", "benchmarks.plain", f"--env={env}", f"--address={address}"]
    for actor in range(actors):
        subprocess.Popen([*command, f"--envs_per_actor={count}", f"--seed={actor}"])
    working = [threading.Thread(target=work, daemon=True) for work in (plain.infer, plain.learn)]
    for thread in working:
        thread.start()
    while all(thread.is_alive() for thread in working):
        time.sleep(1.0)
        print(json.dumps([time.monotonic(), plain.acted]), flush=True)
    sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs it, or one of its actors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plain", description=__doc__)
    parser.add_argument("--env", required=True)
    parser.add_argument("--num_actors", type=int, default=2)
    parser.add_argument("--envs_per_actor", type=int, default=8)
    parser.add_argument("--agent_option", action="append", default=[])
    parser.add_argument("--address", help="of the server; then this is an actor")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    env, count = arguments.env, arguments.envs_per_actor
    if arguments.address:
        act(env, arguments.address, count, arguments.seed)
        return
    from programs import presets
    from seedlib.agents import loading

    chosen = {
        **presets.preset(env).agent.get("vtrace", {}),
        **loading.parse_options(arguments.agent_option),
    }
    serve(env, chosen, arguments.num_actors, count)


if __name__ == "__main__":
    main()
