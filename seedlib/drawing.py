"""Draws a program as Mermaid text: its nodes, its processes, and which handle points where."""

from collections.abc import Iterator
from typing import Any

import launchpad as lp

from seedlib import nodes


def mermaid(program: lp.Program) -> str:
    """Returns the drawing of a program; nothing is started.

    Processes of a group that are alike are drawn once, with their number. An arrow goes from the
    node that holds a handle to the handle's node: solid within a process, where the handle is the
    component itself, and dotted between processes, where it is a client.

    Args:
      program: nodes of this library, alone or put together by `nodes.colocate`.
    """
    processes = [
        (group, members)
        for group, entries in program.groups.items()
        for members in (list(_members(entry)) for entry in entries)
    ]
    drawn: dict[Any, tuple[str, list[nodes.Node], int]] = {}
    names: dict[str, str] = {}
    for group, members in processes:
        shape = (group, tuple(_kind(member) for member in members))
        first = drawn.get(shape)
        if first is None:
            for member in members:
                names[member.placement.node] = f"{group}_{_kind(member)}"
            drawn[shape] = (group, members, 1)
        else:
            for member, twin in zip(members, first[1], strict=True):
                names[member.placement.node] = names[twin.placement.node]
            drawn[shape] = (group, first[1], first[2] + 1)
    lines = ["flowchart LR"]
    for group, members, count in drawn.values():
        title = group if count == 1 else f"{group} x {count}"
        lines.append(f'  subgraph {group}["{title}"]')
        kinds = [_kind(member) for member in members]
        for kind in dict.fromkeys(kinds):
            several = "" if kinds.count(kind) == 1 else f" x {kinds.count(kind)}"
            lines.append(f'    {group}_{kind}["{kind.replace("_", " ")}{several}"]')
        lines.append("  end")
    arrows: dict[str, None] = {}
    for _, members, _ in drawn.values():
        for member in members:
            for handle in member.input_handles:
                here = handle.placement.process == member.placement.process
                arrow = "-->" if here else "-.->"
                source, target = names[member.placement.node], names[handle.placement.node]
                arrows[f"  {source} {arrow} {target}"] = None
    return "\n".join([*lines, *arrows]) + "\n"


def _members(entry: Any) -> Iterator[nodes.Node]:
    """Returns the nodes of one process."""
    yield from entry.nodes if isinstance(entry, lp.MultiThreadingColocation) else (entry,)


def _kind(node: nodes.Node) -> str:
    """Returns a node's name without its number, as one word."""
    return "_".join(word for word in node.placement.name.split() if not word.isdigit())
