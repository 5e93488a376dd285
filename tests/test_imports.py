"""Tests of who may import whom: by the sources, and by what a fresh process has loaded."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

HEAVY = {"jax", "jaxlib", "tensorflow", "reverb"}
"""What an environment actor must not carry: it has no network weights and writes no unrolls."""

# The shared ground: what every room may import, and what itself imports nothing of the house above.
GROUND = ("seedlib", "seedlib.types", "seedlib.specs")

AGENT_LIBRARIES = {
    "chex",
    "distrax",
    "dm_env",
    "haiku",
    "jax",
    "numpy",
    "optax",
    "rlax",
    "tree",
}

# Pure functions need none of these.
MACHINERY = {"asyncio", "concurrent", "multiprocessing", "os", "socket", "subprocess", "threading"}


def source_of(module: str) -> pathlib.Path | None:
    """Returns the file of a module of the project."""
    base = ROOT.joinpath(*module.split("."))
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.exists():
            return path
    return None


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_below(package: str) -> list[str]:
    folder = ROOT.joinpath(*package.split("."))
    return sorted(module_of(path) for path in folder.rglob("*.py"))


def imports(path: pathlib.Path, everywhere: bool = True) -> set[str]:
    """Returns the dotted names that a file imports.

    Args:
      path: the file.
      everywhere: whether those within functions count, which run only when called. Those for the
        type checker alone count never: they do not run.
    """
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if source_of(full) else base)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
        elif everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def loaded_with(module: str) -> set[str]:
    """Returns all names that importing a module of the project imports, through the project.

    Importing `a.b` runs `a/__init__.py` as well.
    """
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        if parent:
            waiting.append(parent)
        path = source_of(name)
        if path is not None:
            waiting.extend(imports(path, everywhere=False))
    return seen


def of_house(names: set[str]) -> set[str]:
    return {name for name in names if name.split(".")[0] in ("seedlib", "programs")}


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def is_below(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def foreign(module: str, *allowed: str) -> set[str]:
    """Returns what a module imports of the house beyond the ground and `allowed`."""
    path = source_of(module)
    assert path is not None
    return {
        name
        for name in of_house(imports(path))
        if name not in GROUND and not is_below(name, *allowed)
    }


@pytest.mark.parametrize("module", ["seedlib.types", "seedlib.specs"])
def test_the_ground_stands_on_nothing(module):
    path = source_of(module)
    assert of_house(imports(path)) <= set(GROUND)
    assert not tops(imports(path)) & (HEAVY | {"launchpad"})


@pytest.mark.parametrize("module", modules_below("seedlib.components"))
def test_components_know_the_ground_each_other_and_the_contract_of_an_agent(module):
    # `RunDirectory` and the loggers are plain machinery without a room of their own.
    allowed = ("seedlib.components", "seedlib.agents.agent", "seedlib.run_directory")
    assert foreign(module, *allowed, "seedlib.metrics") == set()
    assert "launchpad" not in tops(imports(source_of(module)))


@pytest.mark.parametrize("module", modules_below("seedlib.agents"))
def test_agents_know_the_ground_and_the_libraries_of_jax_only(module):
    assert foreign(module, "seedlib.agents") == set()
    others = tops(imports(source_of(module))) - sys.stdlib_module_names - {"seedlib"}
    assert others <= AGENT_LIBRARIES
    if module != "seedlib.agents.loading":  # It makes agents, for several threads; it is none.
        assert not tops(imports(source_of(module))) & MACHINERY


def test_no_algorithm_knows_another():
    for module in modules_below("seedlib.agents"):
        algorithm = module.split(".")[2:3]
        for name in of_house(imports(source_of(module))):
            other = name.split(".")[2:3]
            if name.startswith("seedlib.agents.") and other != algorithm:
                # What algorithms share lies beside them, in plain files.
                path = source_of(f"seedlib.agents.{other[0]}")
                assert path.name != "__init__.py", f"{module} imports {name}"


@pytest.mark.parametrize("module", modules_below("seedlib.environments"))
def test_environments_know_the_ground_only(module):
    assert foreign(module, "seedlib.environments") == set()


def test_the_batcher_knows_neither_grpc_nor_jax_nor_policies():
    names = imports(source_of("seedlib.components.batcher"))
    assert not tops(names) & (HEAVY | {"grpc"})
    assert "seedlib.agents.agent" not in names


def test_nothing_in_the_library_knows_programs_and_only_the_graph_knows_launchpad():
    # A part is usable without Launchpad; what makes it a node of a graph stands above it.
    graph = ("seedlib.nodes", "seedlib.launching", "seedlib.drawing")
    for module in modules_below("seedlib"):
        names = imports(source_of(module))
        assert not tops(names) & {"programs", "tests", "benchmarks"}, module
        if not is_below(module, *graph):
            assert "launchpad" not in tops(names), module
            assert not any(is_below(name, *graph) for name in names), module


LIGHT = [
    "seedlib",
    "seedlib.components.acme_actor",
    "seedlib.components.actor",
    *modules_below("seedlib.components.transport"),
    *modules_below("seedlib.environments"),
]


@pytest.mark.parametrize("module", LIGHT)
def test_what_an_actor_uses_is_light_by_its_sources(module):
    # Its own file to the last line, and all that it loads.
    assert not tops(imports(source_of(module))) & HEAVY
    assert not tops(loaded_with(module)) & HEAVY


def loaded_in_a_fresh_process(*modules: str) -> set[str]:
    program = "import importlib, sys\n"
    program += "".join(f"importlib.import_module({module!r})\n" for module in modules)
    program += "print('\\n'.join(sys.modules))"
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    return set(shown.stdout.split())


def test_what_an_actor_uses_is_light_in_a_fresh_process():
    # With the modules that the adapters bring lazily, since an actor does load those.
    loaded = loaded_in_a_fresh_process(*LIGHT)
    assert not tops(loaded) & HEAVY
    assert set(LIGHT) <= loaded


def test_what_a_run_leaves_is_written_and_drawn_without_heavy_imports_at_the_start():
    modules = ("curve", "metrics", "progress", "run_directory")
    loaded = loaded_in_a_fresh_process(*(f"seedlib.{module}" for module in modules))
    assert not tops(loaded) & (HEAVY | {"matplotlib"})


def test_importing_the_library_itself_costs_nothing():
    before, after = loaded_in_a_fresh_process(), loaded_in_a_fresh_process("seedlib")
    assert len(after - before) < 5, sorted(after - before)


def test_the_rule_itself_sees_what_it_should(tmp_path, monkeypatch):
    # A tree with an import of each kind, so that a rule that sees nothing would be noticed.
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    package = tmp_path / "seedlib" / "components"
    package.mkdir(parents=True)
    (tmp_path / "seedlib" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("import reverb")
    (package / "light.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import optax\n"
        "from . import helper\n"
        "from seedlib.components.helper import function\n"
        "def late():\n    import jax.numpy\n"
    )
    (package / "helper.py").write_text(
        "try:\n    import tensorflow as tf\nexcept ImportError: raise"
    )
    path = package / "light.py"
    assert imports(path) == {"typing", "seedlib.components.helper", "jax.numpy"}
    assert imports(path, everywhere=False) == {"typing", "seedlib.components.helper"}
    assert {"tensorflow", "reverb"} <= loaded_with("seedlib.components.light")
    assert "jax.numpy" not in loaded_with("seedlib.components.light")
