"""Tests of the BUILD files: up to date, every source in one target, every import with its dep.

The second half reads the BUILD files and the sources by itself and shares nothing with the script
that writes them.
"""

import ast
import importlib.util
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "programs", "scripts", "seedlib", "tests")
RUNNER = "tests/run_pytest.py"


def test_the_build_files_are_up_to_date():
    result = subprocess.run(
        [sys.executable, "scripts/build_targets.py", "--check"],
        cwd=ROOT,
        check=False,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"run `make build`: {result.stdout}{result.stderr}"


def sources() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def targets() -> dict[str, dict]:
    """Returns rule, attributes and pip comment of every py target by its label.

    A BUILD file is read as Python, which this part of the language is.
    """
    found: dict[str, dict] = {}
    for path in [ROOT / "BUILD", *(p for f in FOLDERS for p in (ROOT / f).rglob("BUILD"))]:
        text = path.read_text()
        lines = text.splitlines()
        package = path.parent.relative_to(ROOT).as_posix().removeprefix(".")
        for statement in ast.parse(text).body:
            call = statement.value
            if not call.func.id.startswith("py_"):
                continue
            attributes = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
            pip = set()
            for line in reversed(lines[: statement.lineno - 1]):
                if not line.startswith("# pip: "):
                    break
                pip.add(line.removeprefix("# pip: "))
            label = f"//{package}:{attributes['name']}"
            assert label not in found
            found[label] = {
                "rule": call.func.id,
                "srcs": [path_of(source, package) for source in attributes["srcs"]],
                "deps": {absolute(dep, package) for dep in attributes.get("deps", [])},
                "main": path_of(attributes["main"], package) if "main" in attributes else None,
                "pip": pip,
            }
    return found


def absolute(label: str, package: str) -> str:
    if label.startswith(":"):
        return f"//{package}{label}"
    return label if ":" in label else f"{label}:{label.rpartition('/')[2]}"


def path_of(source: str, package: str) -> str:
    """Returns the file that an entry of `srcs` means."""
    if ":" in source:
        return absolute(source, package).removeprefix("//").replace(":", "/")
    return f"{package}/{source}"


def owners() -> dict[str, list[str]]:
    """Returns the targets of each source; a test's runner is its `main`, not a source of it."""
    found: dict[str, list[str]] = {}
    for label, target in targets().items():
        for source in target["srcs"]:
            if source != target["main"]:
                found.setdefault(source, []).append(label)
    return found


def needed(source: str) -> tuple[set[str], set[str]]:
    """Returns the files of the project and the other packages that a source imports.

    Imports are asked of Python's own machinery: `import_from` of a submodule is tried as one.
    """
    files, others = set(), set()
    for node in ast.walk(ast.parse((ROOT / source).read_text())):
        wanted: list[tuple[str, str | None]] = []
        if isinstance(node, ast.Import):
            wanted = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = source.split("/")[:-1]
            above = folder[: len(folder) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            wanted = [(base, alias.name) for alias in node.names]
        for base, name in wanted:
            if base.split(".")[0] not in FOLDERS:
                others.add(base.split(".")[0])
                continue
            tried = [f"{base}.{name}"] if name else []
            found = [file for module in [*tried, base] if (file := file_of(module))]
            assert found, f"{source} imports {base}, which does not exist"
            files.add(found[0])
    return files, others - sys.stdlib_module_names


def file_of(module: str) -> str | None:
    stem = module.replace(".", "/")
    for path in (f"{stem}.py", f"{stem}/__init__.py"):
        if (ROOT / path).exists():
            return path
    return None


def test_every_source_is_in_exactly_one_target():
    owned = owners()
    assert sorted(owned) == sources()
    assert {source: labels for source, labels in owned.items() if len(labels) != 1} == {}


def test_every_import_of_the_project_has_its_dep_and_every_dep_exists():
    owned, all_targets = owners(), targets()
    missing = []
    for label, target in all_targets.items():
        assert target["deps"] <= set(all_targets), label
        for source in target["srcs"]:
            files, _ = needed(source)
            deps = {owned.get(file, [file])[0] for file in files} - {label}
            missing += [(label, dep) for dep in deps - target["deps"]]
    assert missing == []


def test_every_dep_is_used():
    """By an import, or by a text that names the module (which a test runs, say)."""
    owned, all_targets = owners(), targets()
    source_of = {labels[0]: source for source, labels in owned.items()}
    unused = []
    for label, target in all_targets.items():
        own = source_of[label]
        files, _ = needed(own)
        text = (ROOT / own).read_text()
        for dep in target["deps"]:
            file = source_of[dep]
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            is_harness = target["rule"] == "py_test" and (
                file == RUNNER or file.endswith("conftest.py")
            )
            if file not in files and not is_harness and not re.search(rf"[\"']{module}[\"']", text):
                unused.append((label, dep))
    assert unused == []


def test_every_other_package_is_in_the_comment_and_declared_by_the_project():
    tomli = pytest.importorskip("tomli") if sys.version_info < (3, 11) else __import__("tomllib")
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    declared = {re.match(r"[A-Za-z0-9._-]+", line).group().lower() for line in lines}
    # What comes with a declared package and is its public face.
    declared |= {"pillow", "tomli"}
    for label, target in targets().items():
        counts = [needed(source)[1] for source in target["srcs"] if source != target["main"]]
        assert len(target["pip"]) == len(set().union(*counts)), label
        assert target["pip"] <= declared, f"{label}: not in pyproject.toml"


def test_there_is_no_circle_of_deps():
    all_targets = targets()
    done: set[str] = set()

    def visit(label: str, path: tuple[str, ...]) -> None:
        assert label not in path, " -> ".join([*path, label])
        if label not in done:
            for dep in sorted(all_targets[label]["deps"]):
                visit(dep, (*path, label))
            done.add(label)

    for label in all_targets:
        visit(label, ())


def test_rules_fit_the_sources():
    for label, target in targets().items():
        (source,) = (source for source in target["srcs"] if source != target["main"])
        is_test = pathlib.PurePath(source).name.startswith("test_")
        assert (target["rule"] == "py_test") == is_test, label
        if source.startswith("seedlib/"):
            assert target["rule"] == "py_library", label


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("written", ROOT / "scripts/build_targets.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["written"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["written"]


def test_a_file_with_every_kind_of_import_gets_all_its_deps(script, tmp_path):
    package = tmp_path / "seedlib" / "inner"
    package.mkdir(parents=True)
    (tmp_path / "seedlib" / "__init__.py").write_text("VERSION = 1\n")
    (tmp_path / "seedlib" / "types.py").write_text("")
    for name in ("a", "b", "c", "d", "e"):
        (package / f"{name}.py").write_text("")
    (package / "__init__.py").write_text("from seedlib.inner.a import x\n")
    (package / "user.py").write_text(
        "import os\n"
        "import PIL.Image, acme.specs\n"
        "import seedlib.inner.a\n"
        "from seedlib import VERSION, types\n"
        "from . import b\n"
        "from .c import z\n"
        "from seedlib.inner import exported\n"
        "def late():\n    from seedlib.inner import d\n    return run('seedlib.inner.e')\n"
    )
    text = script.render_all(str(tmp_path))["seedlib/inner/BUILD"]
    block = text[text.index("# pip: dm-acme") :]
    assert block == (
        "# pip: dm-acme\n# pip: pillow\npy_library(\n"
        '    name = "user",\n    srcs = ["user.py"],\n    deps = [\n'
        '        ":a",\n        ":b",\n        ":c",\n        ":d",\n        ":e",\n'
        '        ":inner",\n        "//seedlib",\n        "//seedlib:types",\n    ],\n)\n'
    )


def test_two_sources_of_one_name_and_a_missing_module_are_refused(script, tmp_path):
    (tmp_path / "seedlib").mkdir()
    (tmp_path / "seedlib" / "__init__.py").write_text("")
    (tmp_path / "seedlib" / "seedlib.py").write_text("")
    with pytest.raises(ValueError, match="would both be //seedlib:seedlib"):
        script.make_targets(str(tmp_path))
    (tmp_path / "seedlib" / "seedlib.py").unlink()
    (tmp_path / "seedlib" / "x.py").write_text("import seedlib.gone")
    with pytest.raises(ValueError, match=r"seedlib/x\.py imports seedlib\.gone"):
        script.make_targets(str(tmp_path))
