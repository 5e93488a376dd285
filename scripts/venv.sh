#!/usr/bin/env bash
# Makes .venv, or renews it when it is stale; says nothing and takes 20 ms when it is neither.
#
#   scripts/venv.sh              make or renew .venv
#   scripts/venv.sh --python     print the Python 3.10 that would be used
#
# PYTHON=/path/to/python3.10 chooses the Python. Where uv is on PATH it installs, else pip does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
unset PYTHONHOME PYTHONPATH

say() { echo "venv: $*" >&2; }

die() {
  say "$@"
  exit 1
}

# Whether a command really runs (a pyenv shim may exist and fail) and is a CPython 3.10 that can make
# environments (Debian ships python3.10 without venv).
suits() {
  [ -n "$1" ] && "$1" -c '
import sys, venv, ensurepip
assert sys.version_info[:2] == (3, 10) and sys.implementation.name == "cpython"' >/dev/null 2>&1
}

candidates() {
  type -ap python3.10 python3 python 2>/dev/null || true
  local pyenv=${PYENV_ROOT:-}
  [ -n "$pyenv" ] || pyenv=$(pyenv root 2>/dev/null) || pyenv=$HOME/.pyenv
  # The newest first. pyenv's own resolution of .python-version needs a recent pyenv; this does not.
  { ls -d "$pyenv"/versions/3.10*/bin/python3.10 2>/dev/null || true; } | sort -rV
  # Reads .python-version; never downloads here.
  uv python find --no-python-downloads 3.10 2>/dev/null || true
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    suits "$PYTHON" || die "PYTHON=$PYTHON does not run or is not a CPython 3.10 with venv"
    echo "$PYTHON"
    return
  fi
  local candidate
  while IFS= read -r candidate; do
    if suits "$candidate"; then
      echo "$candidate"
      return
    fi
  done < <(candidates)
  if command -v uv >/dev/null && uv python install 3.10 >&2; then
    candidate=$(uv python find 3.10) && suits "$candidate" && echo "$candidate" && return
  fi
  die "no CPython 3.10 with venv found: get it with 'pyenv install 3.10', 'uv python install 3.10'" \
    "or 'apt install python3.10-venv', or name one: make PYTHON=/path/to/python3.10"
}

checksum() { sha256sum -- "$@" | sha256sum | cut -c1-64; }

# What an environment was made of. The place counts, because a copied or moved environment points
# back to where it was made.
packages_stamp() { echo "$(checksum requirements.lock) $root"; }

project_stamp() { checksum pyproject.toml; }

stamped() { [ -f ".venv/$1" ] && [ "$(cat ".venv/$1")" = "$2" ]; }

fresh() {
  stamped .packages "$(packages_stamp)" && stamped .project "$(project_stamp)" &&
    .venv/bin/python -c '' 2>/dev/null
}

# Runs a command quietly; shows what it said only when it fails.
quietly() {
  local log
  log=$(mktemp)
  if "$@" >"$log" 2>&1; then
    rm -f "$log"
  else
    local status=$?
    cat "$log" >&2
    rm -f "$log"
    return "$status"
  fi
}

# The sdists in the lock are built with the setuptools and the wheel (which needs packaging) of the
# lock, not with whatever is newest on the day; so these come first, and nothing is isolated.
build_tools() { awk '/^[^ ]/ { on = /^(packaging|setuptools|wheel)==/ } on' requirements.lock; }

install_packages() {
  local tools installer=("$@")
  tools=$(mktemp)
  build_tools >"$tools"
  quietly "${installer[@]}" --no-deps --require-hashes -r "$tools" &&
    quietly "${installer[@]}" --no-build-isolation --require-hashes -r requirements.lock || {
    rm -f "$tools"
    return 1
  }
  rm -f "$tools"
}

make_venv() {
  local python count started=$SECONDS
  python=$(find_python) || exit 1
  count=$(grep -c '==' requirements.lock) || true
  say "making .venv with $("$python" --version) ($python)"
  rm -rf .venv
  if command -v uv >/dev/null; then
    say "installing $count packages with uv"
    if quietly uv venv --quiet --python "$python" .venv &&
      install_packages uv pip install --quiet --python .venv/bin/python; then
      say "packages installed in $((SECONDS - started)) s"
      return
    fi
    say "uv failed, trying pip"
    rm -rf .venv
  fi
  say "installing $count packages with pip, which takes a minute or two"
  "$python" -m venv .venv || die "could not make .venv with $python"
  install_packages .venv/bin/python -m pip --disable-pip-version-check install --quiet ||
    die "could not install requirements.lock (see above); run make again to try again"
  say "packages installed in $((SECONDS - started)) s"
}

# `seedlib` and `programs` import from any folder; a plain path file needs no build.
link_project() {
  local packages
  packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$root" >"$packages/seedlib.pth"
}

if [ "${1:-}" = "--python" ]; then
  find_python
  exit
fi

fresh && exit

# One at a time: a second make waits here, and then finds the environment fresh. The lock is on this
# file, so that it leaves nothing behind; the system lets go however we end.
exec 9<"$root/scripts/venv.sh"
if ! flock -n 9; then
  say "waiting for another make that is setting up .venv"
  flock 9
fi
fresh && exit
if ! stamped .packages "$(packages_stamp)" || ! .venv/bin/python -c '' 2>/dev/null; then
  make_venv
  # Written last: an environment without its stamp is half made, and is made anew.
  packages_stamp >.venv/.packages
fi
link_project
project_stamp >.venv/.project
