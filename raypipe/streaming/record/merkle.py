"""A Merkle tree over byte strings: RFC 6962's tree, with SHA-256. Pure.

Its root stands for all leaves and their order. The proof of one leaf has a hash for each level, so a leaf of a
million is proven by twenty hashes.

                 root                  node    SHA-256(0x01, left, right)
               /      \\                leaf    SHA-256(0x00, content)
            node      node
           /    \\    /    \\           A level's last node without a partner moves up as it is.
         leaf  leaf  leaf  leaf
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

# Without them a node could be shown as a leaf.
_LEAF = b"\0"
_NODE = b"\1"


def root(leaves: Sequence[bytes]) -> bytes:
    """Return the root of leaves: 32 bytes."""
    if not leaves:
        return hashlib.sha256().digest()
    return _levels(leaves)[-1][0]


def proof(leaves: Sequence[bytes], index: int) -> list[bytes]:
    """Return the hashes that lead from a leaf to the root, from the bottom up.

    Raises:
        IndexError: there is no such leaf.
    """
    if not 0 <= index < len(leaves):
        raise IndexError(f"leaf {index} of {len(leaves)}")
    path = []
    for level in _levels(leaves):
        partner = index ^ 1
        if partner < len(level):
            path.append(level[partner])
        index //= 2
    return path


def is_proven(
    leaf: bytes, index: int, num_leaves: int, path: Sequence[bytes], root: bytes
) -> bool:
    """Return whether a tree of so many leaves with this root has this leaf at an index.

    Args:
        path: the leaf's `proof`.
    """
    if not 0 <= index < num_leaves:
        return False
    reached = _leaf(leaf)
    last = num_leaves - 1
    rest = list(path)
    while last > 0:
        has_partner = index ^ 1 <= last
        if has_partner:
            if not rest:
                return False
            partner = rest.pop(0)
            if index % 2:
                reached = _node(partner, reached)
            else:
                reached = _node(reached, partner)
        index //= 2
        last //= 2
    return not rest and reached == root


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return the hashes of all levels, the leaves' first, the root last."""
    levels = [[_leaf(leaf) for leaf in leaves]]
    while len(levels[-1]) > 1:
        below = levels[-1]
        pairs = zip(below[::2], below[1::2], strict=False)
        above = [_node(left, right) for left, right in pairs]
        if len(below) % 2:
            above.append(below[-1])
        levels.append(above)
    return levels


def _leaf(content: bytes) -> bytes:
    return hashlib.sha256(_LEAF + content).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()
