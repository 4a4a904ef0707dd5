"""The Merkle tree: roots of RFC 6962's definition, and proofs that hold for one leaf alone."""

from __future__ import annotations

import hashlib

import pytest

from raypipe.streaming.record import merkle


def by_definition(leaves: list[bytes]) -> bytes:
    """RFC 6962, section 2.1, as it is written there."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    half = 1
    while 2 * half < len(leaves):
        half *= 2
    left, right = by_definition(leaves[:half]), by_definition(leaves[half:])
    return hashlib.sha256(b"\1" + left + right).digest()


def leaves(num: int) -> list[bytes]:
    return [f"leaf {number}".encode() for number in range(num)]


def test_roots_are_those_of_rfc_6962() -> None:
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert merkle.root([]).hex() == empty
    for num in range(1, 70):
        assert merkle.root(leaves(num)) == by_definition(leaves(num))


def test_a_proof_has_a_hash_for_each_level_and_holds_for_its_leaf_alone() -> None:
    for num in (1, 2, 3, 7, 8, 33):
        root = merkle.root(leaves(num))
        for index, leaf in enumerate(leaves(num)):
            path = merkle.proof(leaves(num), index)
            assert len(path) <= (num - 1).bit_length()
            assert merkle.is_proven(leaf, index, num, path, root)
            assert not merkle.is_proven(b"another", index, num, path, root)
            assert not merkle.is_proven(leaf, index, num, [*path, root], root)
            assert not path or not merkle.is_proven(leaf, index, num, path[:-1], root)
            elsewhere = [other for other in range(-1, num + 1) if other != index]
            assert not any(
                merkle.is_proven(leaf, other, num, path, root) for other in elsewhere
            )


def test_a_node_cannot_be_shown_as_a_leaf() -> None:
    two = leaves(2)
    nodes = [hashlib.sha256(b"\0" + leaf).digest() for leaf in two]
    root = merkle.root(two)
    assert not merkle.is_proven(b"".join(nodes), 0, 1, [], root)


def test_a_proof_of_a_leaf_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError, match="leaf 3 of 3"):
        merkle.proof(leaves(3), 3)
