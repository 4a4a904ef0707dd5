"""Forms in which transforms get an image: the one of their kind, or else one that they take.

    kind           form                                        or else
    plain          array: uint8 (H, W, 3)                      pil
    torchvision    tensor: tv_tensors.Image, uint8 (3, H, W)   pil
    pil            pil: a PIL image, as of ImageFolder         tensor
    others         array

A transform gets the other form if it works on a probe in that form, and fails on every probe in its kind's. So
the choice depends only on the transform, and is the same in every process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from raypipe.transform.fields import IMAGE
from raypipe.transform.pipelines import (
    TransformKind,
    leaves,
    package_of,
    rebuilt,
    steps_of,
)
from raypipe.transform.process_state import process_kept, seed_process
from raypipe.transform.user_code import copied

Form = Literal["array", "tensor", "pil"]

_FORMS: Mapping[TransformKind, tuple[Form, ...]] = {
    "plain": ("array", "pil"),
    "torchvision": ("tensor", "pil"),
    "pil": ("pil", "tensor"),
}
_OF_PIL = {"ToTensor", "PILToTensor"}
# (height, width): as photographs have them, for large crops, for code that asks for a small size
_PROBES = ((256, 320), (1024, 1200), (28, 28), (256, 320), (224, 224), (32, 32))


def forms_of(kind: TransformKind, is_rgb: bool = True) -> tuple[Form, ...]:
    """The forms of a kind's images, the first one first; other arrays than uint8 RGB have no PIL image."""
    forms = _FORMS.get(kind, ("array",))
    if is_rgb:
        return forms
    return tuple(form for form in forms if form != "pil")


def in_form(image: np.ndarray, form: Form) -> Any:
    """An image (H, W, C) in the form that a transform gets."""
    if form == "array":
        return image
    if form == "pil":
        from PIL import Image

        return Image.fromarray(image)
    import torch
    from torchvision import tv_tensors

    return tv_tensors.Image(torch.from_numpy(image).permute(2, 0, 1))


def for_form(transform: Any, form: Form) -> Any:
    """A transform whose steps take this form: of torchvision v2's, those for PIL images become their like."""
    names = {type(step).__name__ for step in leaves(transform)}
    if form != "tensor" or "ToPILImage" in names or not names & _OF_PIL:
        return transform
    if type(transform).__name__ in _OF_PIL and package_of(transform) == "torchvision":
        import torch
        from torchvision.transforms import v2

        is_scaling = type(transform).__name__ == "ToTensor"
        if is_scaling:
            return v2.ToDtype(torch.float32, scale=True)
        return v2.Identity()
    steps = steps_of(transform)
    if steps is None:
        return transform
    return rebuilt(transform, [for_form(step, form) for step in steps])


def probed(transform: Any, forms: tuple[Form, ...], **arguments: Any) -> Form:
    """The first form in which a transform works on a probe; the first of all if it works in none.

    Args:
        arguments: other arguments of its call.
    """
    with process_kept():
        for form in forms:
            fitting = for_form(transform, form)
            for number, sides in enumerate(_PROBES):
                noise = np.random.default_rng(number)
                image = noise.integers(0, 256, (*sides, 3), np.uint8)
                seed_process(number, number)
                # The generators that it holds stay as they are.
                code, given = copied((fitting, arguments))
                with contextlib.suppress(Exception):
                    called(code, in_form(image, form), given)
                    return form
    return forms[0]


def called(transform: Any, image: Any, arguments: Mapping[str, Any] = {}) -> Any:
    """The image that a transform makes of another."""
    if package_of(transform) == "albumentations":
        return transform(image=image)[IMAGE]
    return transform(image, **arguments)
