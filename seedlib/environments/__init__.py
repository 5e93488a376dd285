"""Environments: from a name to a `dm_env.Environment`, ready for an environment actor.

Importing this package imports no simulator; each is imported when an environment of its kind is
named or made.
"""

from seedlib.environments.errors import (
    EnvironmentLoadError,
    UnknownEnvironmentError,
    UnsupportedEnvironmentError,
)
from seedlib.environments.factory import EnvironmentFactory, load

__all__ = [
    "EnvironmentFactory",
    "EnvironmentLoadError",
    "UnknownEnvironmentError",
    "UnsupportedEnvironmentError",
    "load",
]
