# Two commands do everything: `make train` and `make test`. Each sets up .venv by itself.

SHELL := /bin/bash
.DEFAULT_GOAL := help

# Plain assignments: a variable of the shell named ENV (some shells have one) must not choose the
# environment; `make train ENV=...` does.
ENV = gymnasium:CartPole-v1
AGENT = vtrace
LOGDIR = runs/$(subst :,-,$(subst /,-,$(ENV)))-$$(date +%Y%m%d-%H%M%S)-$$$$
ARGS =
unexport ENV LOGDIR ARGS

PY = .venv/bin/python

.PHONY: help train test slow lint lock venv build clean

help:  ## Show this.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

train: venv  ## Train: ENV=gymnasium:CartPole-v1 AGENT=vtrace LOGDIR=runs/... ARGS="--num_actors=2 ..."
	@exec $(PY) -m programs.seed --env='$(ENV)' --agent='$(AGENT)' --logdir="$(LOGDIR)" $(ARGS)

test: venv  ## Run the tests, all but the slow ones (some of them: ARGS="tests/components -x").
	@exec $(PY) -m pytest -m "not slow" $(ARGS)

slow: venv  ## Run the slow tests: learning to the full target.
	@exec $(PY) -m pytest -m slow -o faulthandler_timeout=7200 $(ARGS)

lint: venv  ## Check style and types.
	@# All three, also where the first has something to say.
	@status=0; for check in "ruff check ." "ruff format --check ." "mypy"; do \
	  echo "$$check"; $(PY) -m $$check || status=1; done; exit $$status

lock:  ## Resolve requirements.lock anew from pyproject.toml (needs uv).
	@command -v uv >/dev/null || { echo "make lock needs uv: python3 -m pip install uv" >&2; exit 1; }
	uv pip compile pyproject.toml --extra dev --python-version 3.10 --generate-hashes \
	  --no-emit-index-url --no-header --no-annotate --no-strip-extras --quiet \
	  --output-file requirements.lock

build: venv  ## Write the Bazel BUILD files anew from the sources.
	$(PY) scripts/build_targets.py

venv:
	@PYTHON='$(PYTHON)' scripts/venv.sh

clean:  ## Remove .venv and caches; runs/ stays.
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
