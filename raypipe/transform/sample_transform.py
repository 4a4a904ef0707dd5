"""Transform of one image, decoded or still to crop, by its key, without memory of earlier images.

Kinds of transform are distinguished by the names of their classes, so torch and Albumentations are imported
only for users of them:

    kind             is given                                its randomness, set from the key
    program          uint8 HWC                               drawn here, see `raypipe.kernel.program`
    Albumentations   image=uint8 HWC, from the first step    its own generators, shared and rewound; with steps
                     on that is not known here               that are the user's code, the global ones as well
    torchvision      tv_tensors.Image, uint8 CHW             torch's, random's and numpy's global ones
    pil              a PIL image: torchvision's old ones     the same
    plain, rng=      uint8 HWC and rng=numpy Generator       the one that it is handed
    plain            uint8 HWC                               random's, numpy's and torch's global ones

The user's code of any kind may hold more generators, or pipelines of Albumentations: `raypipe.transform.reach`
finds them, and they are seeded for each sample as well.

With `transform.decode: array`, all of them get and may return images of any dtype and number of channels.

The last three get another form where they fail on this one, see `raypipe.transform.forms`. They may return several
images by name, see `raypipe.transform.views`.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from raypipe import kernel
from raypipe.kernel import DONE, POINTS, Job, follow
from raypipe.plan.places import Sides
from raypipe.transform.albumentations import find_program
from raypipe.transform.decode.jpeg import Box, Undecoded
from raypipe.transform.fields import IMAGE, SampleFields
from raypipe.transform.forms import for_form, forms_of, in_form, probed
from raypipe.transform.keys import Key, KeyedGenerator
from raypipe.transform.pipelines import has_hooks, has_user_code, transform_kind
from raypipe.transform.pixels import image_of, is_rgb, views_of
from raypipe.transform.process_state import drawn, seed_opencv, seed_process
from raypipe.transform.reach import ReachedGenerators
from raypipe.transform.targets import TARGETS, by_pipeline, target_pipeline
from raypipe.transform.tv_targets import by_torchvision
from raypipe.transform.user_code import NOT_OF_A_SAMPLE, rng_parameter

SourceImage = np.ndarray | Undecoded


class SampleTransform:
    """Transform of one image whose result depends only on the pixels, the transform and the key.

    It holds one set of random generators and rewinds them for every sample, so an object serves one thread at a
    time.

    Args:
        transform: see the module's table; None leaves the image as it is. An Albumentations
            transform is copied, since the generators are put into it.
        are_rgb: whether the images are RGB, as the text below has it, or arrays.
        targets: names of the image's targets.

    Attributes:
        given: the transform as it was passed.
        program: its first steps, as far as they are known; None = none.
        has_rest: whether steps follow the program.
        crops_first: whether it begins with a random resized crop, so that no more of an image need be decoded.
        draws_globally: it may draw from generators that all threads share.
        has_user_code: it may run code that neither raypipe nor the libraries of the table have.
    """

    def __init__(
        self, transform: Any, are_rgb: bool = True, targets: Collection[str] = ()
    ) -> None:
        self.given = transform
        self._are_rgb = are_rgb
        self.program, remaining_steps = find_program(transform)
        has_points = any(TARGETS[name].keyword in POINTS for name in targets)
        lacks_points = has_points and self.program and not self.program.takes_points
        if lacks_points or (remaining_steps and not are_rgb):
            # the library does it all
            self.program = None
            remaining_steps = []
        self._whole = self.program
        # The library transforms arrays that are no RGB in all steps.
        self.has_rest = bool(remaining_steps) or self.program is None or not are_rgb
        if remaining_steps:
            transform = sys.modules["albumentations"].Compose(remaining_steps)
        self.kind = transform_kind(transform)
        self._forms = forms_of(self.kind, are_rgb)
        self._form = self._forms[0]
        # Its first image shows whether it takes that.
        self._may_find_form = len(self._forms) > 1 and not targets
        if targets and self.has_rest and self.kind != "torchvision":
            transform = target_pipeline(transform, targets)
        elif self.kind == "albumentations":
            transform = copy.deepcopy(transform)
        self.transform = for_form(transform, self._form)
        self.has_user_code = self.kind == "plain" or has_user_code(self.transform)
        self._hand_generators()
        self.crops_first = False
        if self.program and are_rgb:
            self.crops_first = self.program.crop_target is not None
        elif are_rgb and not targets:
            self.crops_first = _begins_with_crop(self.transform)

    def _hand_generators(self) -> None:
        """Make the generators, and give them to the transform, or to the generators that it reaches."""
        self._keyed = KeyedGenerator()
        self._random = random.Random()
        if self.kind == "albumentations":
            # Not set_random_seed: it gives every child the same seed, so that two flips always agree.
            self.transform.set_random_state(self._keyed.generator, self._random)
        code = self.transform if self.has_user_code else None
        self._reached = ReachedGenerators(code, self._keyed.generator)
        name = rng_parameter(code) if self.kind == "plain" else None
        self._rng = {name: self._keyed.generator} if name else {}
        draws_here = self.kind in ("none", "program", "albumentations")
        if self.has_user_code:
            draws_here = bool(name)
        self.draws_globally = bool(self._reached) or not draws_here
        self._is_settled = not (self.has_user_code or self._may_find_form)

    def weaken(self, strength: float) -> None:
        """Scale the program's chances and magnitudes by a strength in [0, 1], from now on."""
        self.program = self._whole.at(strength) if self._whole else None

    @property
    def is_fixed(self) -> bool:
        """True if no step draws a random number."""
        if self.kind == "none":
            return True
        if self._whole is None or self.has_rest:
            return False
        return all(step.p >= 1 and step.num_uniforms == 0 for step in self._whole.steps)

    def __call__(self, image: SourceImage, key: Key) -> np.ndarray:
        """Transform an image without targets, see `with_targets`."""
        return self.with_targets(image, {}, key)[IMAGE]

    def with_targets(
        self, image: SourceImage, targets: SampleFields, key: Key
    ) -> SampleFields:
        """Transform one image and its targets.

        Args:
            image: uint8 RGB of shape (H, W, 3), writable; the transform may write into it. Or one that is not
                decoded, where it `crops_first`: the result is the same.
            targets: `mask`, `bboxes` and the like, as Albumentations takes them.
            key: determines all random draws.

        Returns:
            `image`, uint8 (h, w, 3), the same as without targets, maybe a view or the argument; or the views that
            a function returned, by field, also (n, h, w, 3); and the targets, by the same names.

        Raises:
            ConfigError: the transform returns anything else. Errors of it and of the decoding are raised as
                they are.
        """
        if self.program is not None and (self._are_rgb or is_rgb(image)):
            size = image.shape[:2] if isinstance(image, np.ndarray) else image[0]
            keys = np.array([key], np.uint64)
            (params,), _ = self.program.draw(keys, np.array([size]))
            image = self._by_program(image, params)
            if targets:
                applied = self.program.applied(params)
                targets = follow(applied, (size[0], size[1]), targets)
            if self.has_rest and self._are_rgb:
                return self.finish(image, targets, key)
            return {**targets, IMAGE: image}
        if self.transform is None:
            assert isinstance(image, np.ndarray)
            return {**targets, IMAGE: image}
        return self.finish(image, targets, key)

    def _by_program(self, image: SourceImage, params: np.ndarray) -> np.ndarray:
        """Run the program on one image; raise ValueError if it is too small for a crop."""
        program = self.program
        assert program is not None and program.size is not None, (
            "where sizes differ, the library does it"
        )
        if not isinstance(image, np.ndarray):
            top, left, height, width = params[1:5].tolist()
            params, image = params.copy(), image[1]((top, left, height, width))
            params[1:5] = 0, 0, *image.shape[:2]
        image, out = np.ascontiguousarray(image), np.empty((*program.size, 3), np.uint8)
        if kernel.run([image], [Job(program.ops, params[None], out[None])])[0] != DONE:
            return kernel.apply_all(image, program.ops, params)
        return out

    def finish(
        self, image: SourceImage, targets: SampleFields, key: Key
    ) -> SampleFields:
        """Run the steps after the program: `with_targets` by the user's code, or a library."""
        if self._is_settled or not isinstance(image, np.ndarray):
            result = self._called(image, targets, key)
        else:
            result = self._settled(image, targets, key)
        if self.kind != "albumentations" and not targets:
            # A function that returns only `image` has mistaken Albumentations' result for the image.
            if isinstance(result, Mapping) and [*result] != [IMAGE]:
                return views_of(result, self._are_rgb)
            result = {IMAGE: result}
        return {**result, IMAGE: image_of(result[IMAGE], self._are_rgb, self.kind)}

    def _settled(self, image: np.ndarray, targets: SampleFields, key: Key) -> Any:
        """Run it for the first time, which shows its form, and pipelines that its code makes at its first call."""
        self._is_settled = True
        kept = image.copy()
        try:
            result = self._called(image, targets, key)
        except NOT_OF_A_SAMPLE:
            raise
        except Exception:
            form = self._form
            if self._may_find_form:
                self._form = probed(self.given, self._forms, **self._rng)
            if self._form == form:
                raise
            self.transform = for_form(self.given, self._form)
            result = self._called(kept.copy(), targets, key)
        if self._reached.look():
            # A pipeline that it has made drew without a seed.
            self.draws_globally = True
            result = self._called(kept, targets, key)
        return result

    def _called(self, image: SourceImage, targets: SampleFields, key: Key) -> Any:
        if not self.draws_globally or "torch" in sys.modules:
            return self._drawn(image, targets, key)
        # It may write into what it is given.
        return drawn(lambda: self._drawn(*copy.deepcopy((image, targets)), key))

    def _drawn(self, image: SourceImage, targets: SampleFields, key: Key) -> Any:
        """Call it on an image, under a key: to seed what it is handed takes 5 µs, the process 20 to 55 more."""
        k0 = int(key[0])
        k1 = int(key[1])
        if self.kind == "albumentations":
            # AlbumentationsX uses them only in the thread that gave them.
            self.transform.set_random_state(self._keyed.generator, self._random)
        if self.draws_globally:
            seed_process(k0, k1)
        else:
            seed_opencv(k0)  # its randn and kmeans
        self._keyed.rewind((k0, k1))
        self._random.seed(k0 << 64 | k1)
        with self._reached.kept():
            self._reached.rewind((k0, k1))
            if not isinstance(image, np.ndarray):
                return _crop_first(self.transform, *image)
            if self.kind == "albumentations":
                return by_pipeline(self.transform, image, targets)
            given = in_form(image, self._form)
            if targets:
                return by_torchvision(self.transform, given, targets)
            return self.transform(given, **self._rng)


def _begins_with_crop(pipeline: Any) -> bool:
    """True for a pipeline of torchvision's that begins with a random resized crop.

    `v2.Compose([RandomResizedCrop(…), …])` without hooks is recognized, and no look-alike (a subclass may do as it
    likes with the pixels outside).
    """
    v2 = sys.modules.get("torchvision.transforms.v2")
    if not v2 or type(pipeline) is not v2.Compose or not pipeline.transforms:
        return False
    first = pipeline.transforms[0]
    is_crop = type(first) is v2.RandomResizedCrop and hasattr(first, "make_params")
    return is_crop and not (has_hooks(pipeline) or has_hooks(first))


def _crop_first(
    pipeline: Any, size: Sides, decode_box: Callable[[Box], np.ndarray]
) -> Any:
    """Run a pipeline that begins with a crop, on an image of this (height, width).

    The library's own code draws the crop from an image that has only the size, by torch's global generator; the
    crop is then decoded, and the library resizes it and continues.
    """
    import torch
    from torchvision import tv_tensors

    first, *later_transforms = pipeline.transforms
    # takes no memory
    whole = tv_tensors.Image(torch.zeros((), dtype=torch.uint8).expand(3, *size))
    drawn = first.make_params([whole])
    crop = decode_box((drawn["top"], drawn["left"], drawn["height"], drawn["width"]))
    height, width = crop.shape[:2]
    image = tv_tensors.Image(torch.from_numpy(crop).permute(2, 0, 1))
    result = first.transform(
        image, {"top": 0, "left": 0, "height": height, "width": width}
    )
    for transform in later_transforms:
        result = transform(result)
    return result
