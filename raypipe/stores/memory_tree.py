"""A tree of files in memory, with links, for the members of a tar and for the objects of a folder in a bucket."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from raypipe.stores.class_folders import FILE, FOLDER, Entry, join

_MAX_LINKS = 40  # the limit of Linux


class TreeFile(NamedTuple):
    """A file of a tree, with what its owner knows of it."""

    value: Any


class Link(NamedTuple):
    """A symbolic link of a tree; a target that begins with / leads out of it."""

    target: str


class Special(NamedTuple):
    """An entry that is neither file nor folder, in words."""

    kind: str


Node = TreeFile | Link | Special | None
"""An entry of a tree; None = a folder."""


class MemoryTree:
    """See `raypipe.stores.class_folders.FileTree`.

    Args:
        missing: the value of a link that leads nowhere, or out of the tree.
    """

    def __init__(self, missing: Any) -> None:
        self._root: dict[str, Any] = {}
        self._missing = missing

    def add(self, path: str, node: Node) -> None:
        """Add an entry, and the folders around it; the last of equal paths counts."""
        *parents, name = path.split("/")
        folder = self._root
        for end, parent in enumerate(parents, 1):
            inner = folder.get(parent)
            if isinstance(inner, Link):
                # entries behind a link to a folder are in that folder
                inner = self._node("/".join(parents[:end]))
            if not isinstance(inner, dict):
                inner = folder[parent] = {}
            folder = inner
        if node is not None:
            folder[name] = node
        elif not isinstance(folder.get(name), dict):
            folder[name] = {}

    def find(self, path: str) -> TreeFile | None:
        """Return the file at a path, links followed."""
        node = self._node(path)
        return node if isinstance(node, TreeFile) else None

    def entries(self, folder: str) -> Iterable[Entry]:
        node = self._node(folder)
        for name, child in node.items() if isinstance(node, dict) else ():
            if isinstance(child, Link):
                target = self._node(join(folder, name))
            else:
                target = child
            if isinstance(target, dict):
                yield Entry(name, FOLDER)
            elif isinstance(target, Special):
                yield Entry(name, target.kind)
            else:
                yield Entry(name, FILE, target.value if target else self._missing)

    def identity(self, folder: str) -> Hashable:
        return id(self._node(folder))

    def _node(self, path: str) -> Any:
        """Return the folder, file or special entry at a path, links followed; None for nothing."""
        pending = path.split("/")[::-1]
        around = [self._root]
        num_links = 0
        while pending:
            name = pending.pop()
            if name in ("", "."):
                continue
            if name == "..":
                if len(around) == 1:
                    return None
                around.pop()
                continue
            folder = around[-1]
            node = folder.get(name) if isinstance(folder, dict) else None
            if isinstance(node, Link):
                num_links += 1
                if (
                    num_links > _MAX_LINKS
                    or not node.target
                    or node.target.startswith("/")
                ):
                    return None
                pending += node.target.split("/")[::-1]
            elif node is None:
                return None
            else:
                around.append(node)
        return around[-1]
