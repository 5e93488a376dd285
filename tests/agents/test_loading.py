"""An agent comes from a name and settings; what does not exist or fit is refused in one line."""

import dataclasses
import pathlib
import pickle
import subprocess
import sys
import threading
from typing import Optional

import numpy as np
import pytest
from dm_env import specs as dm_specs

import seedlib
from seedlib.agents import agent as agent_lib
from seedlib.agents import loading, vtrace
from seedlib.agents.vtrace import config as vtrace_config

PATIENCE = 60.0

MODULE = '''
"""A module of a user."""

from seedlib.agents import vtrace

calls = []


def make(environment_spec, learning_rate=1e-3, *, size=2):
    calls.append((learning_rate, size))
    return vtrace.make_agent(environment_spec, vtrace.Config(learning_rate=learning_rate))


def make_number(environment_spec):
    return 3


def make_badly(environment_spec):
    return environment_spec.nothing


not_a_function = 3
'''


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """The name of a fresh importable module of a user."""
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def one_line(error):
    text = str(error.value)
    assert text and "\n" not in text
    return text


def test_an_agent_of_the_library_is_made_with_its_settings(vector_spec):
    agent = loading.AgentFactory("vtrace", vector_spec, {"batch_size": 7, "unroll_length": 3})()
    assert isinstance(agent, agent_lib.Agent)
    assert (agent.batch_size, agent.unroll.length) == (7, 3)


@pytest.mark.parametrize(
    "name",
    # Modules beside the agents, python's own folder, paths and nothing are no agents.
    ["", "dqn", "networks", "agent", "loading", "__pycache__", "vtrace.losses", "../vtrace", "3"],
)
def test_an_unknown_agent_is_refused(vector_spec, name):
    for make in (lambda f: f(), lambda f: f.check(), lambda f: loading.config_of(f.name, {})):
        with pytest.raises(loading.AgentError) as error:
            make(loading.AgentFactory(name, vector_spec))
        assert f"unknown agent {name!r}" in one_line(error)
        assert "vtrace" in one_line(error)


def test_an_unknown_setting_is_refused_with_the_known_ones(vector_spec):
    with pytest.raises(loading.AgentError, match="agent vtrace has no setting 'lerning_rate'") as e:
        loading.AgentFactory("vtrace", vector_spec, {"lerning_rate": 1.0}).check()
    assert "learning_rate" in one_line(e)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size=0", "batch_size must be at least 1, got 0"),
        ("batch_size=many", "batch_size must be int, got 'many'"),
        ("batch_size=8.5", "batch_size must be int, got 8.5"),
        ("batch_size=true", "batch_size must be int, got True"),
        ("batch_size=null", "batch_size must be int, got None"),
        ("learning_rate=fast", "learning_rate must be float, got 'fast'"),
        ("learning_rate=NaN", "learning_rate must be positive and finite, got nan"),
        ("reward_clip=[1]", "reward_clip must be float | None, got (1,)"),
        ("lstm_size=64.0", "lstm_size must be int | None, got 64.0"),
        ("hidden_sizes=64", "hidden_sizes must be tuple[int, ...], got 64"),
        ('hidden_sizes=[64,"x"]', "hidden_sizes must be tuple[int, ...], got (64, 'x')"),
        ("use_previous_action=1", "use_previous_action must be bool, got 1"),
        ("optimizer=sgd", "optimizer must be one of ('adam', 'rmsprop'), got 'sgd'"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(vector_spec, text, message):
    factory = loading.AgentFactory("vtrace", vector_spec, loading.parse_options([text]))
    with pytest.raises(ValueError) as error:
        factory.check()
    assert message in one_line(error)


def test_values_of_every_type_arrive(vector_spec):
    options = loading.parse_options(
        ["reward_clip=1", "lstm_size=null", "hidden_sizes=[]", "torso=mlp", "learning_rate=1e-3"]
    )
    config = loading.config_of("vtrace", {**options, "batch_size": np.int64(4)})
    assert config == vtrace.Config(
        reward_clip=1,
        lstm_size=None,
        hidden_sizes=(),
        torso="mlp",
        learning_rate=0.001,
        batch_size=4,
    )


def test_settings_of_types_that_are_not_checked_pass(monkeypatch):
    # What an agent to come may have: optional in the old spelling, pairs, anything.
    @dataclasses.dataclass(frozen=True)
    class Config:
        old: Optional[float] = None  # noqa: UP045
        pair: tuple[int, str] = (1, "a")
        anything: object = None

    monkeypatch.setattr(vtrace_config, "Config", Config)
    config = loading.config_of("vtrace", {"old": 2, "pair": (2, "b"), "anything": {"x": 1}})
    assert config == Config(2, (2, "b"), {"x": 1})
    with pytest.raises(loading.AgentError, match=r"old must be .*Optional\[float\], got 'x'"):
        loading.config_of("vtrace", {"old": "x"})


def test_an_environment_that_does_not_suit_is_refused(make_spec):
    spec = make_spec(dm_specs.Array((5,), np.float32), dm_specs.Array((2,), np.float32))
    with pytest.raises(ValueError, match="action") as error:
        loading.AgentFactory("vtrace", spec).check()
    one_line(error)


def test_an_agent_of_ones_own_is_made_by_its_function(vector_spec, user_module):
    factory = loading.AgentFactory(f"{user_module}:make", vector_spec, {"size": 5})
    factory.check()
    assert isinstance(factory(), agent_lib.Agent)
    assert sys.modules[user_module].calls == [(1e-3, 5)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{module}:nothing", "unknown agent '{module}:nothing'"),
        ("no_such_module_at_all:make", "No module named 'no_such_module_at_all'"),
        (":make", "'' is not the name of a module"),
        (".relative:make", "'.relative' is not the name of a module"),
        ("{module}:", "unknown agent '{module}:'"),
        ("{module}:not_a_function", "agent {module}:not_a_function"),
        ("{module}:make_number", "returned a int, not an Agent"),
    ],
)
def test_an_agent_of_ones_own_that_cannot_be_is_refused(vector_spec, user_module, name, message):
    with pytest.raises(loading.AgentError) as error:
        loading.AgentFactory(name.format(module=user_module), vector_spec)()
    assert message.format(module=user_module) in one_line(error)


def test_an_unknown_setting_of_ones_own_agent_is_refused_by_name(vector_spec, user_module):
    with pytest.raises(loading.AgentError, match="'lerning_rate'") as error:
        loading.AgentFactory(f"{user_module}:make", vector_spec, {"lerning_rate": 1})()
    assert f"{user_module}:make" in one_line(error)


def test_an_error_inside_ones_own_function_is_not_hidden(vector_spec, user_module):
    with pytest.raises(AttributeError, match="nothing"):
        loading.AgentFactory(f"{user_module}:make_badly", vector_spec)()


def test_options_are_json_where_they_parse_and_text_where_not():
    texts = ["a=1", "b=1e-3", "c=true", "d=null", "e=[1, [2]]", "f=adam", 'g="2"', "h=", "i=x=y"]
    assert loading.parse_options(texts) == {
        "a": 1,
        "b": 0.001,
        "c": True,
        "d": None,
        "e": (1, [2]),
        "f": "adam",
        "g": "2",
        "h": "",
        "i": "x=y",
    }
    assert loading.parse_options(["a=1", "a=2"]) == {"a": 2}
    assert loading.parse_options([]) == {}


@pytest.mark.parametrize("text", ["batch_size", "=3", ""])
def test_an_option_without_a_name_or_a_value_is_refused(text):
    with pytest.raises(loading.AgentError, match="expected setting=value") as error:
        loading.parse_options([text])
    assert repr(text) in one_line(error)


def test_equal_factories_give_the_same_object_in_one_process(vector_spec):
    first = loading.AgentFactory("vtrace", vector_spec, {"batch_size": 5, "hidden_sizes": (8,)})
    second = pickle.loads(pickle.dumps(first))
    assert first() is second()
    # Nor does the order of the settings matter.
    third = loading.AgentFactory("vtrace", vector_spec, {"hidden_sizes": (8,), "batch_size": 5})
    assert third() is first()


def test_other_settings_or_specs_give_another_object(vector_spec, make_spec):
    wider = make_spec(dm_specs.Array((6,), np.float32), vector_spec.actions)
    agents = [
        loading.AgentFactory("vtrace", vector_spec)(),
        loading.AgentFactory("vtrace", vector_spec, {"batch_size": 5})(),
        loading.AgentFactory("vtrace", wider)(),
    ]
    assert len({id(agent) for agent in agents}) == 3


def test_threads_that_ask_at_once_get_the_same_object(vector_spec, user_module):
    factory = loading.AgentFactory(f"{user_module}:make", vector_spec, {"size": 9})
    start = threading.Barrier(8)
    agents = []

    def ask():
        start.wait(PATIENCE)
        agents.append(factory())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(agents) == 8
    assert all(agent is agents[0] for agent in agents)
    assert len(sys.modules[user_module].calls) == 1


def test_a_factory_travels_without_jax():
    # What a graph does where it is built: name, settings and spec are all that is looked at.
    program = (
        "import sys, numpy, pickle\n"
        "from acme import specs\n"
        "from seedlib.agents import loading\n"
        "spec = specs.EnvironmentSpec(*[specs.DiscreteArray(3)] * 2,\n"
        "    specs.Array((), numpy.float32), specs.BoundedArray((), numpy.float32, 0, 1))\n"
        "factory = loading.AgentFactory('vtrace', spec, {'batch_size': 3})\n"
        "factory.check()\n"
        "assert pickle.loads(pickle.dumps(factory)) == factory\n"
        "print(sorted({'jax', 'tensorflow', 'haiku'} & set(sys.modules)))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pathlib.Path(seedlib.__file__).parents[1],
        check=True,
        timeout=PATIENCE,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.strip() == "[]"
