"""The kinds of environments: which module makes each, and how its names look.

Kinds come before users' modules of the same name.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of environment.

    Attributes:
      module: a module of this package with `check`, `make` and `action_repeat`.
      usage: how a name of this kind looks.
    """

    module: str
    usage: str


KINDS = {
    "catch": Kind("catch", "catch"),
    "gymnasium": Kind("gymnasium_adapter", "gymnasium:<id>"),
    "atari": Kind("atari", "atari:<Game>"),
    "bsuite": Kind("bsuite_adapter", "bsuite:<experiment>/<setting>"),
    "synthetic": Kind("synthetic", "synthetic:<HxWxC>"),
}

USAGE = ", ".join([*(kind.usage for kind in KINDS.values()), "<module>:<function>"])
"""How every possible name looks, for messages."""
