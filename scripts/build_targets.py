"""Writes the Bazel BUILD files from the sources: one target per file, its deps from its imports.

    python scripts/build_targets.py            write every BUILD file
    python scripts/build_targets.py --check    write nothing; fail where one is not up to date

A folder's `__init__.py` is the target named after the folder. A file is a `py_test` where it is
`test_*.py`, a `py_binary` where it lies in `programs`, `benchmarks` or `scripts` and runs as a
command, else a `py_library`. What an interpreter has beside the project is listed as `# pip:`
comments, with the names of pyproject.toml: Bazel takes those packages from the Python on its path.
"""

import argparse
import ast
import dataclasses
import os
import re
import sys
from collections.abc import Iterator

FOLDERS = ("benchmarks", "programs", "scripts", "seedlib", "tests")
"""The folders with sources."""

# Names of packages that are not those of their modules.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl-py",
    "acme": "dm-acme",
    "ale_py": "ale-py",
    "cv2": "opencv-python-headless",
    "dm_env": "dm-env",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "haiku": "dm-haiku",
    "launchpad": "dm-launchpad",
    "orbax": "orbax-checkpoint",
    "reverb": "dm-reverb",
    "tensorflow": "tensorflow-cpu",
    "tensorflow_probability": "tensorflow-probability",
    "tree": "dm-tree",
}

# A `py_test` is a command, and a file of pytest functions is none: this one runs it.
_TEST_RUNNER = "tests/run_pytest.py"

# Tests that read the whole checkout, which a Bazel sandbox does not hold.
_TESTS_OF_THE_CHECKOUT = ("tests/test_build.py", "tests/test_imports.py", "tests/test_project.py")


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of one source file.

    Attributes:
      rule: `py_library`, `py_binary` or `py_test`.
      source: path of the file from the root of the project, with `/`.
      deps: labels of the targets that it imports, absolute.
      pip: packages that it imports.
    """

    rule: str
    source: str
    deps: frozenset[str]
    pip: frozenset[str]

    @property
    def package(self) -> str:
        """The folder."""
        return os.path.dirname(self.source)

    @property
    def name(self) -> str:
        """The name within the package."""
        return label_of(self.source).rpartition(":")[2]


def label_of(source: str) -> str:
    """Returns the absolute label of a source's target, for example `//seedlib/agents:agent`."""
    package, file_name = os.path.split(source)
    stem = file_name.removesuffix(".py")
    return f"//{package}:{os.path.basename(package) if stem == '__init__' else stem}"


def find_sources(root: str) -> list[str]:
    """Returns the paths of all Python sources in the project's folders, sorted."""
    found = []
    for top in FOLDERS:
        for folder, folders, files in os.walk(os.path.join(root, top)):
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
            for name in files:
                if name.endswith(".py"):
                    found.append(os.path.relpath(os.path.join(folder, name), root))
    return sorted(found)


def imported_names(tree: ast.AST, source: str, modules: dict[str, str]) -> set[str]:
    """Returns the dotted names that a source imports, also within functions.

    `from a import b` is `a.b` where that is a module of the project, and `a` where it is not. A
    text that is the name of a module of the project counts too: it is imported by name, or run
    with `python -m`.

    Args:
      tree: the parsed source.
      source: its path.
      modules: source by dotted name, for all modules of the project.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = os.path.dirname(source).split("/")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in modules else base)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_module = node.value in modules and "." in node.value  # "programs" alone is a word.
            names.update([node.value] if is_module else [])
    return names


def make_targets(root: str) -> list[Target]:
    """Returns a target for each source.

    Raises:
      ValueError: where two sources would have the same target, or an import of the project has no
        source.
    """
    sources = find_sources(root)
    modules = {_module_of(source): source for source in sources}
    labels: dict[str, str] = {}
    for source in sources:
        other = labels.setdefault(label_of(source), source)
        if other != source:
            raise ValueError(f"{source} and {other} would both be {label_of(source)}")
    return [_make_target(root, source, modules) for source in sources]


def render(package: str, targets: list[Target]) -> str:
    """Returns the text of the BUILD file of one package, as buildifier formats it."""
    text = "# Written by scripts/build_targets.py from the imports; do not edit.\n\n"
    text += 'package(default_visibility = ["//visibility:public"])\n'
    if any(target.source == _TEST_RUNNER for target in targets):
        text += f'\nexports_files(["{os.path.basename(_TEST_RUNNER)}"])\n'
    for target in sorted(targets, key=lambda target: target.name):
        text += "\n" + "".join(f"# pip: {name}\n" for name in sorted(target.pip))
        text += f"{target.rule}(\n"
        for key, value in _attributes(target, package):
            text += f"    {key} = {_starlark(value)},\n"
        text += ")\n"
    return text


def render_root() -> str:
    """Returns the text of the BUILD file at the top."""
    return (
        "# Written by scripts/build_targets.py; do not edit.\n\n"
        'package(default_visibility = ["//visibility:public"])\n\n'
        'licenses(["notice"])  # Apache-2.0\n\n'
        'exports_files([\n    "LICENSE",\n    "pyproject.toml",\n])\n'
    )


def render_all(root: str) -> dict[str, str]:
    """Returns the text of every BUILD file by its path."""
    packages: dict[str, list[Target]] = {}
    for target in make_targets(root):
        packages.setdefault(target.package, []).append(target)
    files = {f"{package}/BUILD": render(package, targets) for package, targets in packages.items()}
    return {"BUILD": render_root(), **files}


def find_build_files(root: str) -> list[str]:
    """Returns the paths of all BUILD files that lie in the project."""
    found = ["BUILD"] if os.path.exists(os.path.join(root, "BUILD")) else []
    for top in FOLDERS:
        for folder, _, files in os.walk(os.path.join(root, top)):
            if "BUILD" in files:
                found.append(os.path.relpath(os.path.join(folder, "BUILD"), root))
    return sorted(found)


def _make_target(root: str, source: str, modules: dict[str, str]) -> Target:
    """Returns the target of one source."""
    with open(os.path.join(root, source), encoding="utf-8") as file:
        tree = ast.parse(file.read(), source)
    deps, pip = set(), set()
    for name in imported_names(tree, source, modules):
        top = name.partition(".")[0]
        if name in modules:
            deps.add(label_of(modules[name]))
        elif top in FOLDERS:
            raise ValueError(f"{source} imports {name}, which has no source")
        elif top not in sys.stdlib_module_names:
            pip.add(_DISTRIBUTIONS.get(top, top.replace("_", "-").lower()))
    rule = _rule(source, tree)
    if rule == "py_test":
        deps.add(label_of(_TEST_RUNNER))
        for conftest in _conftests(source, modules):
            deps.add(label_of(conftest))
    deps.discard(label_of(source))
    return Target(rule, source, frozenset(deps), frozenset(pip))


def _conftests(source: str, modules: dict[str, str]) -> Iterator[str]:
    """Yields the conftest files that pytest loads for a test."""
    folder = os.path.dirname(source)
    while folder:
        if f"{folder}/conftest.py" in modules.values():
            yield f"{folder}/conftest.py"
        folder = os.path.dirname(folder)


def _rule(source: str, tree: ast.Module) -> str:
    """Returns the rule for a source."""
    if os.path.basename(source).startswith("test_"):
        return "py_test"
    runs = any(
        isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) for node in tree.body
    )
    is_command = source.partition("/")[0] in ("programs", "benchmarks", "scripts") and runs
    return "py_binary" if is_command else "py_library"


def _attributes(target: Target, package: str) -> Iterator[tuple[str, str | list[str]]]:
    """Yields a target's attributes in buildifier's order."""
    sources = [os.path.basename(target.source)]
    yield "name", target.name
    if target.rule == "py_test":
        runner = _relative(label_of(_TEST_RUNNER) + ".py", package)
        yield "srcs", [*sources, runner]
        yield "args", [target.source]
        yield "data", ["//:pyproject.toml"]
        yield "main", runner
        if target.source in _TESTS_OF_THE_CHECKOUT:
            yield "tags", ["manual"]
    else:
        yield "srcs", sources
    if target.deps:
        yield "deps", sorted((_relative(dep, package) for dep in target.deps), key=_label_order)


def _relative(label: str, package: str) -> str:
    """Returns a label as it is written in a package: `:name` there, `//a/b` for `//a/b:b`."""
    folder, _, name = label.removeprefix("//").partition(":")
    if folder == package:
        return f":{name}"
    return f"//{folder}" if os.path.basename(folder) == name else label


def _label_order(label: str) -> tuple[int, list[str]]:
    """Orders labels as buildifier does: those of the package first, then by folder and name."""
    return (0 if label.startswith(":") else 1, re.split("[.:]", label))


def _starlark(value: str | list[str]) -> str:
    """Returns a value as buildifier formats it."""
    if isinstance(value, str):
        return f'"{value}"'
    if len(value) == 1:
        return f'["{value[0]}"]'
    return "[\n" + "".join(f'        "{item}",\n' for item in value) + "    ]"


def _module_of(source: str) -> str:
    """Returns the dotted name of a source."""
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def main() -> int:
    """Writes or checks; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the BUILD files from the sources.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail on a difference")
    options = parser.parse_args()
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    wanted = render_all(root)
    stale = []
    for path in sorted({*wanted, *find_build_files(root)}):
        full = os.path.join(root, path)
        current = None
        if os.path.exists(full):
            with open(full, encoding="utf-8") as file:
                current = file.read()
        if current == wanted.get(path):
            continue
        stale.append(path)
        if options.check:
            continue
        if path in wanted:
            with open(full, "w", encoding="utf-8") as file:
                file.write(wanted[path])
        else:
            os.unlink(full)
    if stale:
        print(("not up to date: " if options.check else "written: ") + " ".join(stale))
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
