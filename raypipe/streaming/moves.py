"""Agreement of the ranks of one execution: do they all leave it for another place? Pure.

An execution brings each rank its share, so the others would wait forever for one that leaves. A rank
that skips a long part says so, and leaves only if all do:

    all ranks skip to the same place                    they leave, and the stream starts again there
    another takes the skipped part, or goes elsewhere   it reads on, as far as it wants to skip
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from raypipe.plan.places import MicroBatchId

StreamPlace = tuple[int, int, int]
"""Place in the order of a stream: epoch, 0 or 1 for training or validation, step."""

END: StreamPlace = (1 << 62, 0, 0)
"""The place after all others."""


def stream_place(position: MicroBatchId) -> StreamPlace:
    """The place of a micro-batch's step."""
    return position.epoch, int(position.split == "val"), position.step


Answer = Literal["leave", "read on", "wait"]


class Move(NamedTuple):
    """A rank's statement: its place, where it goes, and whether it would leave the execution for that."""

    stands: StreamPlace
    goes: StreamPlace
    leaves: bool = False


class Moves:
    """The last moves of the ranks.

    Args:
        world_size: W.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last: dict[int, Move] = {}
        self._takes: dict[StreamPlace, set[int]] = {}
        self._skips: dict[StreamPlace, set[int]] = {}
        self._told = False

    def says(self, rank: int, move: Move) -> str:
        """Record a move; returns a warning, once, if a validation is iterated by some ranks and not by others."""
        self._last[rank] = move
        epoch = move.stands[0]
        validation = (epoch, 1, 0)
        if move.goes == validation:
            self._takes.setdefault(validation, set()).add(rank)
        elif move.stands <= validation < move.goes:
            self._skips.setdefault(validation, set()).add(rank)
        takes = self._takes.get(validation)
        skips = self._skips.get(validation)
        if self._told or not (takes and skips):
            return ""
        self._told = True
        return (
            f"rank {min(takes)} iterates the validation of epoch {epoch}, and rank {min(skips)} does not: each "
            "rank has a share of the samples, and the shares of ranks that leave it out are missing. "
            "Iterate epoch.val on all ranks, and sum over them (docs/training-loop.md)"
        )

    def answer(self, rank: int, is_last: bool = False) -> Answer:
        """Answer a rank that would leave, as far as the others have spoken.

        Args:
            is_last: it waits no longer, and reads on unless all have agreed.
        """
        move = self._last.get(rank)
        if move is None:  # the process that knew has died
            return "read on"
        moves = [said for speaker, said in self._last.items() if speaker != rank]
        have_all_spoken = len(moves) == self._world_size - 1
        if have_all_spoken and all(_agree(move, said) for said in moves):
            return "leave"
        if is_last or not all(
            _agree(move, said) or _is_behind(said, move) for said in moves
        ):
            self._last[rank] = move._replace(leaves=False)
            return "read on"
        return "wait"


def _agree(move: Move, said: Move) -> bool:
    """Return whether another rank has said that it leaves for the same place."""
    return said.leaves and said.goes == move.goes


def _is_behind(said: Move, move: Move) -> bool:
    """Return whether another rank, by its last move, comes before this one's place."""
    return not said.leaves and said.goes < move.stands
