"""Tests of README.md and docs: every snippet and every command runs, and what they name is there.

How commands are made small, and nothing else is changed:

- `.venv/bin/` becomes the folder of the Python that runs the tests;
- `make X` is run as `make -n X`, which prints the commands of X; for `make train` the printed
  program is then run;
- a program gets `--num_steps=2000` at its end (the last of two flags counts);
- everything runs in a folder of its own, so that `runs/...` is new.

Commands with `programs.examples` are run by `tests/programs/test_examples.py` as they stand.
"""

import ast
import importlib.util
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from programs import experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
BIN = pathlib.Path(sys.executable).parent
# What a test that is always run leaves out: they compile convolutions, or take another minute.
SLOW = ("atari:", "bsuite:")


def blocks(language: str) -> list[tuple[str, str]]:
    """Returns `(page:line, text)` of every fenced block of a language."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.M | re.S):
            found.append((f"{page}:{text[: match.start()].count(chr(10)) + 1}", match[1]))
    return found


PYTHON = blocks("python")
EXCERPT = re.compile(r"# (programs/\S+\.py)\n")
SNIPPETS = [pair for pair in PYTHON if not EXCERPT.match(pair[1])]
EXCERPTS = [pair for pair in PYTHON if EXCERPT.match(pair[1])]
COMMANDS = list(dict.fromkeys(line for _, text in blocks("bash") for line in text.splitlines()))
MAKE = [command for command in COMMANDS if command.startswith("make")]
EXAMPLES = [command for command in COMMANDS if "programs.examples" in command]
PROGRAMS = [
    command
    for command in COMMANDS
    if "-m programs." in command
    and command not in EXAMPLES
    and "--help" not in command
    and "--print_graph" not in command
    and "runs/resumed" not in command
]
RESUMED = [command for command in COMMANDS if "-m programs." in command and "resumed" in command]


def run(command: str, folder: pathlib.Path, expected: int = 0) -> str:
    """Runs a command line in a folder and returns its standard output."""
    result = subprocess.run(
        ["bash", "-c", command.replace(".venv/bin/", f"{BIN}/")],
        cwd=folder,
        check=False,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert result.returncode == expected, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


def run_program(command: str, folder: pathlib.Path, num_steps: int = 2000) -> pathlib.Path:
    """Runs a program for a few steps; returns its log directory."""
    said = run(f"{command} --num_steps={num_steps}", folder)
    summary = pathlib.Path(re.search(r"^summary: (.*)$", said, re.M)[1])
    figures = json.loads(summary.read_text())
    assert figures["exit_reason"] == "num_steps"
    assert figures["agent_steps"] >= num_steps
    assert figures["learner_updates"] > 0
    return summary.parent


def made(target: str) -> str:
    """Returns the last command that a `make` line would run, without running anything."""
    # `-n` leaves the environment alone too.
    # Under `make test` it would speak of the folders that it enters and leaves.
    quiet = f"make --no-print-directory -n {target.removeprefix('make')}"
    return run(quiet, ROOT).splitlines()[-1]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> pathlib.Path:
    """The directory of `make train`, the first thing that a newcomer does."""
    return run_program(made("make train").removeprefix("exec "), tmp_path_factory.mktemp("train"))


def marked(commands: list[str]) -> list:
    return [
        pytest.param(command, marks=[pytest.mark.slow] if any(s in command for s in SLOW) else [])
        for command in commands
    ]


def test_there_is_something_to_test():
    assert len(SNIPPETS) >= 8
    assert len(EXCERPTS) == 3
    assert "make train" in MAKE
    assert "make test" in MAKE
    assert len(EXAMPLES) == 3
    assert PROGRAMS


@pytest.mark.parametrize(("where", "text"), SNIPPETS, ids=[where for where, _ in SNIPPETS])
def test_snippets_run_and_print_what_they_say(where, text, capsys):
    exec(compile(text, where, "exec"), {"__name__": "snippet"})
    said = capsys.readouterr().out
    # A comment behind a print is its last line of output.
    for comment in re.findall(r"^ *print\(.*\)  # (.*)$", text, re.M):
        if not comment.endswith("."):
            assert comment in said


@pytest.mark.parametrize(("where", "text"), EXCERPTS, ids=[where for where, _ in EXCERPTS])
def test_excerpts_stand_in_the_files_that_they_name(where, text):
    name = EXCERPT.match(text)
    assert text[name.end() :] in (ROOT / name[1]).read_text(encoding="utf-8")


@pytest.mark.parametrize("command", MAKE)
def test_make_knows_its_targets(command):
    expected = "programs.seed" if "train" in command else "pytest"
    assert expected in made(command)


def test_make_train_leaves_the_files_that_readme_lists(first_run):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w.]+)` \| ", readme, re.M)
    assert len(listed) == 7
    assert [name for name in listed if not (first_run / name).exists()] == []
    for name in re.search(r"^\| `summary.json` .*", readme, re.M)[0].split("`")[3::2]:
        assert name in json.loads((first_run / "summary.json").read_text())


def test_every_figure_that_is_explained_is_in_the_summary(first_run):
    text = (ROOT / "docs/operation.md").read_text(encoding="utf-8")
    table = text.partition("| figure | means |")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines()[2:]))
    assert len(named) > 15
    summary = json.loads((first_run / "summary.json").read_text())
    assert [name for name in named if name not in summary] == []


@pytest.mark.parametrize("command", marked([c for c in MAKE if c.startswith("make train ")]))
def test_make_train_with_variables_runs(command, tmp_path):
    run_program(made(command).removeprefix("exec "), tmp_path)


@pytest.mark.parametrize("command", marked(PROGRAMS))
def test_programs_run(command, tmp_path):
    run_program(command, tmp_path)


@pytest.mark.slow
def test_the_commands_that_go_on_with_a_run_do(tmp_path):
    first, second = RESUMED
    run_program(first, tmp_path)
    summary = run_program(second, tmp_path, num_steps=4000) / "summary.json"
    assert len(list(tmp_path.glob("runs/*"))) == 1
    assert json.loads(summary.read_text())["agent_steps"] < 6000  # It did not begin anew.


def test_the_examples_commands_are_the_ones_that_the_examples_give():
    for command in EXAMPLES:
        name = re.search(r"programs\.examples\.(\w+)", command)[1]
        text = ast.get_docstring(ast.parse((ROOT / f"programs/examples/{name}.py").read_text()))
        assert " ".join(text.replace("\\\n", " ").split()).endswith(
            command.removeprefix(".venv/bin/")
        )


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--print_graph" in c])
def test_graphs_are_printed(command, tmp_path):
    assert run(command, tmp_path).startswith("flowchart LR")


@pytest.mark.parametrize("graph", ["impala", "inference_pool"])
def test_drawings_of_graphs_are_what_the_programs_print(graph, tmp_path):
    printed = run(f".venv/bin/python -m programs.{graph} --print_graph", tmp_path)
    assert f"```mermaid\n{printed}```" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "seedlib.curve" in c])
def test_curves_are_drawn(command, first_run, tmp_path):
    words = shlex.split(command)
    for word in words[words.index("seedlib.curve") + 1 :]:
        if not word.startswith("-"):
            shutil.copytree(first_run, tmp_path / word)
    assert pathlib.Path(run(command, tmp_path).strip()).exists()


def test_every_command_is_of_a_kind_that_is_tested():
    known = ("make", ".venv/bin/python -m ", ".venv/bin/tensorboard ")
    assert [command for command in COMMANDS if not command.startswith(known)] == []
    assert (BIN / "tensorboard").exists()


def test_help_says_what_the_flags_are():
    said = run(".venv/bin/python -m programs.seed --help", ROOT)
    for flag in ("--env", "--num_actors", "--num_steps", "--lp_launch_type"):
        assert flag in said


def texts() -> dict[str, str]:
    return {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}


def test_modules_that_commands_name_exist():
    for page, text in texts().items():
        for module in re.findall(r"python -m ([\w.]*\w)", text):
            assert importlib.util.find_spec(module) is not None, f"{page}: {module}"


def test_flags_that_are_named_exist():
    others = {
        *("help", "x", "out"),
        *("tasks", "seeds", "report_only"),  # Of benchmarks.learning.
        *("logdir",),  # Of TensorBoard too.
        *("num_inference_servers",),  # Of programs.inference_pool.
        *("episodes", "sampled", "checkpoint", "video"),  # Of programs.evaluate.
        "index",  # Of programs.join.
        *("quick", "json", "soak", "deep", "flag", "minutes", "only", "FLAG"),  # Of the benchmarks.
        *("runs", "net"),  # The same.
    }
    for page, text in texts().items():
        for flag in re.findall(r"(?<![\w-])--([a-z]\w+)", text):
            assert flag in experiment.FLAGS or flag in others, f"{page}: --{flag}"


def test_links_lead_somewhere():
    for page, text in texts().items():
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if "://" not in link:
                assert ((ROOT / page).parent / link).exists(), f"{page}: {link}"
