"""Runs one file of pytest tests as a command; the `main` of every Bazel `py_test`."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "not slow", "-p", "no:cacheprovider", *sys.argv[1:]]))
