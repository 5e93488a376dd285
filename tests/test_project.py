"""Tests of the project's own tools: the lock, the environment that `make` sets up, its commands.

The environment is tried in a small project of its own, with an empty lock, so that no network is
needed and the environment that runs the tests is left alone.
"""

import hashlib
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTHON_310 = getattr(sys, "_base_executable", sys.executable)

needs_310 = pytest.mark.skipif(
    sys.version_info[:2] != (3, 10), reason="the lock is for Python 3.10"
)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    """Returns the version of each package in the lock."""
    text = (ROOT / "requirements.lock").read_text()
    return {
        normal(name): version
        for name, version in re.findall(r"^([\w.-]+).*?==([^\s;]+)", text, re.M)
    }


def test_the_license_is_apache_2():
    # The checksum of the text as the Apache Software Foundation publishes it.
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.md5(text).hexdigest() == "3b83ef96387f14655fc854ddc3c6bd57"
    assert 'license = { text = "Apache-2.0" }' in (ROOT / "pyproject.toml").read_text()


def test_every_line_of_the_lock_is_pinned_with_hashes_and_holds_no_address():
    text = (ROOT / "requirements.lock").read_text()
    assert "://" not in text
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) == len(locked()) > 50
    for entry in entries:
        assert "==" in entry.splitlines()[0]
        assert "--hash=sha256:" in entry, entry.splitlines()[0]


def test_the_lock_holds_what_the_project_declares():
    text = (ROOT / "pyproject.toml").read_text().partition("\n[tool.")[0]
    declared = re.findall(r'^    "([\w.-]+)\b(?!\[)', text, re.M)
    for extra in re.findall(r"^(?:gymnasium|bsuite) = \[(.*)\]", text, re.M):
        declared += re.findall(r'"([\w.-]+)', extra)
    assert len(declared) > 20
    assert {normal(name) for name in declared} <= set(locked())


@needs_310
def test_what_is_installed_is_what_is_locked():
    installed = {name: importlib.metadata.version(name) for name in locked()}
    assert installed == locked()


@pytest.fixture
def project(tmp_path) -> pathlib.Path:
    """A project with our Makefile and scripts, an empty lock and a program that prints itself."""
    path = tmp_path / "project"
    (path / "scripts").mkdir(parents=True)
    (path / "programs").mkdir()
    for name in ("Makefile", "scripts/venv.sh", "pyproject.toml", ".python-version"):
        shutil.copy(ROOT / name, path / name)
    (path / "requirements.lock").write_text("# nothing\n")
    (path / "programs" / "seed.py").write_text("import sys\nprint(*sys.argv[1:], sep='\\n')\n")
    return path


def environment(**changes: str) -> dict[str, str]:
    """Returns the variables for a fresh shell: no uv, no pyenv, our Python first."""
    kept = {key: os.environ[key] for key in ("LANG", "TMPDIR") if key in os.environ}
    home = "/nonexistent"
    path = f"{os.path.dirname(PYTHON_310)}:/usr/bin:/bin"
    return {**kept, "PATH": path, "HOME": home, "PYENV_ROOT": home, **changes}


def run(*command: str, cwd: pathlib.Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(**changes),
        check=False,
        timeout=120,
        capture_output=True,
        text=True,
    )


def set_up(project: pathlib.Path, **changes: str) -> subprocess.CompletedProcess[str]:
    result = run("scripts/venv.sh", cwd=project, **changes)
    assert result.returncode == 0, result.stderr
    return result


def write_command(folder: pathlib.Path, name: str, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return str(folder)


@needs_310
def test_a_python_that_exists_but_does_not_run_is_passed_over(project, tmp_path):
    shim = write_command(tmp_path / "shims", "python3.10", "echo 'not set' >&2; exit 127")
    result = run("scripts/venv.sh", "--python", cwd=project, PATH=f"{shim}:{environment()['PATH']}")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(os.path.dirname(PYTHON_310))


@needs_310
def test_a_python_of_pyenv_is_found_also_where_pyenv_is_not_on_the_path(project, tmp_path):
    versions = tmp_path / "pyenv" / "versions"
    for version in ("3.10.9", "3.10.13", "3.9.1"):
        (versions / version / "bin").mkdir(parents=True)
    broken = write_command(versions / "3.10.13" / "bin", "python3.10", "exit 1")
    working = write_command(versions / "3.10.9" / "bin", "python3.10", f'exec {PYTHON_310} "$@"')
    no_python = write_command(tmp_path / "bin", "python3", "exit 1")
    for name in ("bash", "dirname", "ls", "sort"):
        os.symlink(shutil.which(name), os.path.join(no_python, name))
    result = run(
        "scripts/venv.sh",
        "--python",
        cwd=project,
        PATH=no_python,
        PYENV_ROOT=str(tmp_path / "pyenv"),
    )
    assert result.stdout == f"{working}/python3.10\n"
    # With none that runs, one line says how to get one.
    shutil.rmtree(working)
    none = run(
        "scripts/venv.sh",
        "--python",
        cwd=project,
        PATH=no_python,
        PYENV_ROOT=str(tmp_path / "pyenv"),
    )
    assert none.returncode == 1
    assert none.stdout == ""
    assert len(none.stderr.splitlines()) == 1
    assert "no CPython 3.10 with venv found: get it with" in none.stderr
    assert os.path.exists(broken)


def test_a_python_that_was_named_and_does_not_suit_is_refused_in_one_line(project, tmp_path):
    old = write_command(tmp_path / "old", "python", "exit 1")
    result = run("make", "train", cwd=project, PYTHON=f"{old}/python")
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert lines == [f"venv: PYTHON={old}/python does not run or is not a CPython 3.10 with venv"]
    assert not (project / ".venv").exists()


@needs_310
def test_the_environment_is_made_once_and_renewed_only_when_it_is_stale(project, tmp_path):
    assert "making .venv with Python 3.10" in set_up(project).stderr
    mark = project / ".venv" / "mark"
    mark.touch()

    # Fresh: nothing is done and nothing is said.
    assert set_up(project).stderr == ""
    assert mark.exists()

    # Another pyproject.toml: the project is linked anew, the packages stay.
    with open(project / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    assert set_up(project).stderr == ""
    assert mark.exists()

    # Half made: an environment without its stamp.
    (project / ".venv" / ".packages").unlink()
    assert "making .venv" in set_up(project).stderr
    assert not mark.exists()

    # Another lock.
    mark.touch()
    (project / "requirements.lock").write_text("# other\n")
    assert "making .venv" in set_up(project).stderr
    assert not mark.exists()

    # A copy of the folder would run the original's packages and sources.
    copy = tmp_path / "copy"
    shutil.copytree(project, copy, symlinks=True)
    assert "making .venv" in set_up(copy).stderr
    where = run(
        f"{copy}/.venv/bin/python",
        "-c",
        "import programs; print(list(programs.__path__))",
        cwd=tmp_path,
    )
    assert where.stdout == f"['{copy}/programs']\n"


@needs_310
def test_two_at_once_make_one_environment(project):
    commands = [
        subprocess.Popen(
            ["scripts/venv.sh"], cwd=project, env=environment(), stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    said = [command.communicate(timeout=120)[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0, 0]
    assert sum("making .venv" in text for text in said) == 1
    assert sum("waiting for another make" in text for text in said) == 2


@needs_310
def test_where_uv_fails_pip_goes_on(project, tmp_path):
    # A uv without a way to its packages, as behind a mirror that only pip knows.
    uv = write_command(tmp_path / "uv", "uv", "echo 'no route to the index' >&2; exit 2")
    result = set_up(project, PATH=f"{uv}:{environment()['PATH']}")
    assert "no route to the index" in result.stderr
    assert "uv failed, trying pip" in result.stderr
    assert (project / ".venv" / "bin" / "pip").exists()


@needs_310
def test_a_package_that_cannot_be_had_fails_and_leaves_no_stamp(project):
    (project / "requirements.lock").write_text(
        "nothing-of-this-name==1.0 --hash=sha256:" + "0" * 64
    )
    result = run("make", "test", cwd=project, PIP_NO_INDEX="1")
    assert result.returncode != 0
    assert "nothing-of-this-name" in result.stderr
    assert "could not install requirements.lock" in result.stderr
    assert not (project / ".venv" / ".packages").exists()


@needs_310
def test_train_passes_what_was_given_and_a_fresh_directory_each_time(project):
    set_up(project)
    command = ["make", "train", "ENV=bsuite:memory_len/8", "ARGS=--seed=3 --num_steps=10"]
    # A shell's own variable of that name must not choose the environment.
    first = run(*command, cwd=project, ENV="/etc/shrc").stdout.splitlines()
    second = run(*command, cwd=project).stdout.splitlines()
    assert first[:2] == ["--env=bsuite:memory_len/8", "--agent=vtrace"]
    assert re.fullmatch(r"--logdir=runs/bsuite-memory_len-8-\d{8}-\d{6}-\d+", first[2])
    assert first[3:] == ["--seed=3", "--num_steps=10"]
    assert first[2] != second[2]

    plain = run("make", "train", cwd=project, ENV="/etc/shrc").stdout.splitlines()
    assert plain[0] == "--env=gymnasium:CartPole-v1"
    assert len(plain) == 3
    given = run("make", "train", "LOGDIR=a/b", cwd=project).stdout.splitlines()
    assert given[2] == "--logdir=a/b"


def test_make_alone_says_what_there_is(project):
    shown = run("make", cwd=project).stdout
    for target in ("train", "test", "slow", "lint", "lock", "clean", "help"):
        assert f"make {target} " in shown
