"""Decoded images that stay on a device, and what is done to those of a micro-batch. Knows torch, not Ray.

The stages are those of `raypipe.transform.resident`, whose numbers come from the host: nothing is drawn on the
device, and nothing waits for it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.functional import grid_sample

from raypipe.plan.places import Split
from raypipe.transform.resident import Stage
from raypipe.transform.sizes import Sides


class ResidentImages:
    """The images of each split on one device.

    Args:
        pixels: uint8 (n, H, W, 3), of each split.
        stages: of each split.
    """

    def __init__(self, pixels: Mapping[Split, torch.Tensor], stages: Mapping[Split, Sequence[Stage]]) -> None:
        self._pixels, self._stages = pixels, stages
        first = next(iter(pixels.values()))
        sides = (stage.to for split in stages for stage in stages[split])
        self._count = torch.arange(max((max(to) for to in sides), default=0), device=first.device)

    def gather(self, split: Split, drawn: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The images of a micro-batch, uint8 (B, h, w, 3), in memory of their own.

        Args:
            drawn: what `ResidentContent` has packed, without the prefix, on the device.
        """
        images, stages = self._pixels[split], self._stages[split]
        if not stages or stages[0].kind != "window":  # which takes its pixels out of all images
            images = images.index_select(0, drawn["row"])
        for number, stage in enumerate(stages):
            numbers = drawn[str(number)]
            if stage.kind == "window":
                images = self._window(images, numbers, stage.to)
            else:
                at = self._box_places if stage.kind == "crop_resize" else self._warp_places
                images = _interpolated(images, *at(numbers, stage.to))
        return images

    def _window(self, images: torch.Tensor, numbers: torch.Tensor, size: Sides) -> torch.Tensor:
        first, down, right = numbers[:, :, None, None].unbind(1)
        height, width = size
        places = first + down * self._count[:height, None] + right * self._count[:width]
        # Its own kernel is twice as fast on the CPU as that of an index in brackets.
        return images.view(-1, 3).index_select(0, places.view(-1)).view(*places.shape, 3)

    def _box_places(self, numbers: torch.Tensor, size: Sides) -> tuple[torch.Tensor, torch.Tensor]:
        x, dx, left, right, y, dy, top, bottom = numbers[:, :, None].unbind(1)
        across, down = self._count[: size[1]], self._count[: size[0]]
        x, y = (x + dx * across).clamp(left, right), (y + dy * down).clamp(top, bottom)
        return x[:, None], y[:, :, None]

    def _warp_places(self, numbers: torch.Tensor, size: Sides) -> tuple[torch.Tensor, torch.Tensor]:
        xx, xy, x, yx, yy, y = numbers[:, :, None, None].unbind(1)
        right, down = self._count[: size[1]], self._count[: size[0], None]
        return xx * right + xy * down + x, yx * right + yy * down + y


def _interpolated(images: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Images at places that broadcast to (B, h, w), of which -1 and 1 are the outer edges; black outside."""
    places = torch.stack(torch.broadcast_tensors(x, y), -1)
    found = grid_sample(images.permute(0, 3, 1, 2).float(), places, align_corners=False)
    return found.round_().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def free_bytes(device: torch.device) -> int:
    """What is free of a device's memory; on the CPU of the machine's, or of what this container may have of it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError):  # of Linux
        found.append(1024 * _numbers("/proc/meminfo")["MemAvailable:"])
    with contextlib.suppress(OSError, ValueError):  # of a container's cgroup, version 2, where it has a limit
        group = Path("/sys/fs/cgroup")
        used = int((group / "memory.current").read_text()) - _numbers(group / "memory.stat")["inactive_file"]
        found.append(int((group / "memory.max").read_text()) - used)
    return max(0, min(found))


def _numbers(path: Path | str) -> dict[str, int]:
    """Of a file of the system's: the number behind each name."""
    return {name: int(value) for name, value, *_ in map(str.split, Path(path).read_text().splitlines())}
