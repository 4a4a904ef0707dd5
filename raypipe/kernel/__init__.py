"""Programs of integer image operations, for a whole micro-batch at once: the kernel's only door.

    Program, native_step, program_of      steps with Albumentations' names and arguments, drawn under keys
    Job, run, sizes, decode_crop, …       the compiled extension: the images of a micro-batch in one call
    apply_all                             the same pixels by NumPy, one image at a time
    follow                                boxes, keypoints and masks, moved as the image's pixels are
    is_seekable, is_intact, to_seekable   JPEGs that a crop enters at any row
    cv2                                   OpenCV; None = it is not installed

README.md defines each operation. Nothing here imports the rest of raypipe, which imports nothing but these names.
"""

from raypipe.kernel.annotations import POINTS, follow
from raypipe.kernel.color_steps import COLOR_STEPS
from raypipe.kernel.extension import (
    BAD_PARAMS,
    DONE,
    EXTRA_COLUMNS,
    NO_MEMORY,
    SKIPPED,
    UNREADABLE,
    WRONG_SIZE,
    Job,
    available,
    decode_crop,
    run,
    sizes,
    to_seekable,
    why_no_kernel,
)
from raypipe.kernel.geometry_steps import GEOMETRY_STEPS, Pad
from raypipe.kernel.opencv import cv2
from raypipe.kernel.ops import (
    CUBIC,
    LINEAR,
    MAX_DECODE_BYTES,
    MAX_PIXELS,
    NEAREST,
    Op,
    sizes_behind,
)
from raypipe.kernel.program import Program, native_step, program_of
from raypipe.kernel.reference import apply_all
from raypipe.kernel.seekable import is_intact, is_seekable
from raypipe.kernel.step import Step

__all__ = [
    "BAD_PARAMS",
    "COLOR_STEPS",
    "CUBIC",
    "DONE",
    "EXTRA_COLUMNS",
    "GEOMETRY_STEPS",
    "LINEAR",
    "MAX_DECODE_BYTES",
    "MAX_PIXELS",
    "NEAREST",
    "NO_MEMORY",
    "POINTS",
    "SKIPPED",
    "UNREADABLE",
    "WRONG_SIZE",
    "Job",
    "Op",
    "Pad",
    "Program",
    "Step",
    "apply_all",
    "available",
    "cv2",
    "decode_crop",
    "follow",
    "is_intact",
    "is_seekable",
    "native_step",
    "program_of",
    "run",
    "sizes",
    "sizes_behind",
    "to_seekable",
    "why_no_kernel",
]
