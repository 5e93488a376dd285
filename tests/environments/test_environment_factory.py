"""Names: what they lead to, what is refused and how, and what importing brings."""

import importlib
import subprocess
import sys

import dm_env
import gymnasium
import numpy as np
import pytest

from seedlib.environments import (
    EnvironmentFactory,
    EnvironmentLoadError,
    UnknownEnvironmentError,
    UnsupportedEnvironmentError,
    load,
)
from seedlib.environments.catch import Catch

MODULE = """
import functools

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
from seedlib.environments.catch import Catch, CatchSettings

calls = []

def by_name(rows=10, seed=None):
    calls.append(seed)
    return Catch(seed, CatchSettings(rows=rows))

def keyword_only(*, seed):
    calls.append(seed)
    return Catch(seed)

def by_position(number):
    calls.append(number)
    return Catch(number)

def with_size(size, number=0):
    calls.append((size, number))
    return Catch(0)

def without(rows=10):
    calls.append(rows)
    return Catch(0)

without.action_repeat = 3
partial = functools.partial(by_name, rows=4)

def gym_environment():
    return gymnasium.make("CartPole-v1")

class Holder:
    make = by_position

def nothing(seed):
    return 7

def several(seed):
    class Several:
        possible_agents = ["a", "b"]
        def reset(self, seed=None, options=None): ...
        def step(self, actions): ...
    return Several()

number = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "factory_module.py").write_text(MODULE)
    (tmp_path / "broken_module.py").write_text("import missing_dependency_of_mine\n")
    (tmp_path / "atari.py").write_text("def Pong(): raise AssertionError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "factory_module", raising=False)
    return importlib.import_module("factory_module")


@pytest.mark.parametrize(
    ("function", "options", "called_with"),
    [
        ("by_name", {}, 11),
        ("by_name", {"rows": 4}, 11),
        ("keyword_only", {}, 11),
        ("by_position", {}, 11),
        ("Holder.make", {}, 11),
        ("partial", {}, 11),
        ("without", {}, 10),
        ("without", {"rows": 3}, 3),
        # The one required parameter is an option already, so there is no place for the seed.
        ("with_size", {"size": 2}, (2, 0)),
    ],
)
def test_a_function_gets_the_seed_where_it_takes_one(module, function, options, called_with):
    environment = load(f"factory_module:{function}", **options)(seed=11)
    assert isinstance(environment, Catch)
    assert module.calls == [called_with]


def test_loading_does_not_call_the_function(module):
    load("factory_module:by_name")
    assert module.calls == []


def test_a_gymnasium_environment_of_a_function_is_adapted_and_seeded(module):
    environment = load("factory_module:gym_environment")(seed=5)
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=5)
    np.testing.assert_array_equal(environment.reset().observation, expected)


def test_what_is_no_single_environment_is_refused(module):
    with pytest.raises(UnsupportedEnvironmentError, match=r"factory_module:nothing.*got int"):
        load("factory_module:nothing")(0)
    with pytest.raises(
        UnsupportedEnvironmentError, match=r"factory_module:several.*several agents"
    ):
        load("factory_module:several")(0)


def test_a_kind_comes_before_a_module_of_the_same_name(module):
    environment = load("atari:Pong", noop_max=0)(0)
    assert environment.observation_spec().shape == (84, 84, 4)


def test_an_import_error_inside_the_users_module_is_its_own(module):
    with pytest.raises(ModuleNotFoundError, match="missing_dependency_of_mine"):
        load("broken_module:make")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("catchh", ["'catchh'", "gymnasium:<id>", "atari:<Game>", "synthetic:<HxWxC>"]),
        ("", ["''", "catch"]),
        (":make", ["':make'", "catch"]),
        (None, ["None", "catch"]),
        ("catch:5", ["'catch:5'", "expected catch"]),
        ("gymnasum:CartPole-v1", ["'gymnasum:CartPole-v1'", "gymnasium:<id>"]),
        ("gymnasium", ["'gymnasium'", "gymnasium:<id>"]),
        ("gymnasium:CartPol-v1", ["gymnasium:CartPol-v1", "`CartPole`"]),
        ("gymnasium:CartPole-v99", ["gymnasium:CartPole-v99", "v1"]),
        ("atari:Pongg", ["'Pongg'", "Pong", "Surround", "Zaxxon"]),
        ("atari:", ["'atari:'", "atari:<Game>"]),
        ("bsuite:memory/8", ["bsuite:memory/8", "memory_len"]),
        ("bsuite:memory_len/99", ["memory_len/99", "memory_len/0 to memory_len/22"]),
        ("bsuite:memory_len", ["memory_len/0 to memory_len/22"]),
        ("synthetic:84x", ["synthetic:84x", "84x84x4"]),
        ("synthetic:0x4", ["synthetic:0x4", "positive"]),
        ("no_such_module_here:make", ["no_such_module_here", "<module>:<function>"]),
        ("factory_module:absent", ["factory_module:absent", "no attribute 'absent'"]),
        ("factory_module:number", ["factory_module:number", "int"]),
    ],
)
def test_an_unknown_name_is_refused_in_one_line(module, name, says):
    with pytest.raises(UnknownEnvironmentError) as error:
        load(name)
    message = str(error.value)
    assert "\n" not in message
    for text in says:
        assert text in message


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("catch", {"row": 3}, "'row'; possible are rows, columns"),
        ("catch", {"rows": 1}, "rows must be a whole number of at least 2, got 1"),
        ("atari:Pong", {"stack": 0}, "stack must be a whole number of at least 1, got 0"),
        ("atari:Pong", {"sticky_actions": 0.25}, "sticky_actions must be True or False, got 0.25"),
        ("atari:Pong", {"frame_skip": True}, "frame_skip must be a whole number"),
        ("synthetic:4", {"num_actions": 0}, "num_actions must be a whole number of at least 1"),
        ("bsuite:catch/0", {"seed": 1}, "no options, got 'seed'"),
    ],
)
def test_a_bad_option_is_refused_when_loading(name, options, says):
    with pytest.raises(EnvironmentLoadError, match=says):
        load(name, **options)


def test_an_option_that_gymnasium_refuses_is_one_line():
    with pytest.raises(EnvironmentLoadError, match=r"gymnasium:CartPole-v1.*'wheels'") as error:
        load("gymnasium:CartPole-v1", wheels=3)(0)
    assert "\n" not in str(error.value)


def test_our_errors_are_value_errors():
    assert issubclass(UnknownEnvironmentError, EnvironmentLoadError)
    assert issubclass(EnvironmentLoadError, ValueError)


@pytest.mark.parametrize(
    ("name", "options", "repeat"),
    [
        ("catch", {}, 1),
        ("gymnasium:CartPole-v1", {}, 1),
        ("gymnasium:ALE/Pong-v5", {}, 4),  # The id itself skips frames.
        ("atari:Pong", {}, 4),
        ("atari:Pong", {"frame_skip": 2}, 2),
        ("bsuite:memory_len/8", {}, 1),
        ("synthetic:8x8x1", {}, 1),
        ("factory_module:by_name", {}, 1),
        ("factory_module:without", {}, 3),
    ],
)
def test_action_repeat(module, name, options, repeat):
    assert load(name, **options).action_repeat == repeat


def test_a_factory_does_not_see_later_changes_of_its_options():
    options = {"rows": 4}
    factory = EnvironmentFactory("catch", options)
    options["rows"] = 5
    assert factory(0).observation_spec().shape == (4, 5)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import seedlib.environments",
            "gymnasium ale_py bsuite cv2 pandas jax tensorflow reverb gym",
        ),
        (
            "from seedlib.environments import load; load('catch')(0).reset(); load('atari:Pong')",
            "gymnasium ale_py bsuite cv2 pandas jax tensorflow reverb gym",
        ),
        (
            "from seedlib.environments import load; load('gymnasium:CartPole-v1')(0).reset()",
            "ale_py bsuite pandas jax tensorflow reverb gym",
        ),
        (
            "from seedlib.environments import load; load('bsuite:memory_len/0')(0).reset()",
            "ale_py jax tensorflow reverb",
        ),
        (
            "from seedlib.environments import load; load('atari:Pong')(0).reset()",
            "bsuite pandas jax tensorflow reverb gym",
        ),
    ],
)
def test_a_process_imports_only_what_its_environments_need(code, absent):
    check = f"{code}; import sys; print([m for m in {absent.split()} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]", "and nothing else is printed"


def test_a_dm_env_environment_is_used_as_it_is(module):
    assert isinstance(load("factory_module:by_name")(0), dm_env.Environment)
    assert type(load("factory_module:by_name")(0)) is Catch
