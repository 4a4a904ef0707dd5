"""A tree of files in memory, with links, for the members of a tar and for the objects of a folder in a bucket."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from raypipe.stores.class_folders import FILE, FOLDER, LINK, Entry, join

_MAX_LINKS = 40  # the limit of Linux


class MemoryTree:
    """See `raypipe.stores.class_folders.FileTree`.

    Args:
        missing: the value of a link that leads nowhere, or out of the tree.
        entries: what `add` is given, in order.
    """

    def __init__(self, missing: Any, entries: Iterable[Entry] = ()) -> None:
        self._root: dict[str, Any] = {}
        self._missing = missing
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        """Add an entry, whose name is a path, and the folders around it; the last of equal paths counts."""
        *parents, name = entry.name.split("/")
        folder = self._root
        for end, parent in enumerate(parents, 1):
            inner = folder.get(parent)
            if _is_link(inner):
                # entries behind a link to a folder are in that folder
                inner = self._node("/".join(parents[:end]))
            if not isinstance(inner, dict):
                inner = folder[parent] = {}
            folder = inner
        if entry.kind != FOLDER:
            folder[name] = entry
        elif not isinstance(folder.get(name), dict):
            folder[name] = {}

    def find(self, path: str) -> Any:
        """Return the value of the file at a path, links followed."""
        node = self._node(path)
        return node.value if isinstance(node, Entry) else self._missing

    def entries(self, folder: str) -> Iterable[Entry]:
        node = self._node(folder)
        for name, child in node.items() if isinstance(node, dict) else ():
            found = self._node(join(folder, name)) if _is_link(child) else child
            if isinstance(found, Entry):
                yield found._replace(name=name)
            else:
                kind = FILE if found is None else FOLDER
                yield Entry(name, kind, self._missing)

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
            node: Any = folder.get(name) if isinstance(folder, dict) else None
            if _is_link(node):
                num_links += 1
                target = node.kind.removeprefix(LINK)
                if num_links > _MAX_LINKS or not target or target.startswith("/"):
                    return None
                pending += target.split("/")[::-1]
            elif node is None:
                return None
            else:
                around.append(node)
        return around[-1]


def _is_link(node: Any) -> bool:
    return isinstance(node, Entry) and node.kind.startswith(LINK)
