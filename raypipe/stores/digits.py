"""The digits, the data set of a first run: a training and a validation store, written on first use."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raypipe.storage.local_file import cache_folder
from raypipe.stores.destination import write_atomically

_NUM_VAL = 360  # digits held out for validation, the same share of each class


def digits_stores(folder: Path | None = None) -> tuple[str, str]:
    """Addresses of the training and the validation store of the digits; written on first use.

    They are the 1,797 that scikit-learn ships: real scans of 8 x 8 pixels (E. Alpaydin, C. Kaynak, UCI 1998).

    Args:
        folder: where they are kept; None = the cache folder.
    """
    folder = (folder or cache_folder()) / "digits-v1"
    train, val = folder / "train.lmdb", folder / "val.lmdb"
    if not (train.exists() and val.exists()):
        _write_digits(train, val)
    return str(train), str(val)


def _write_digits(train: Path, val: Path) -> None:
    import cv2
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    pixels = np.round(data.images * (255 / 16)).astype(np.uint8)  # scanned with 17 grey levels
    samples = [
        {"image": cv2.imencode(".png", image)[1].tobytes(), "label": int(label)}
        for image, label in zip(pixels, data.target, strict=True)
    ]
    chosen = train_test_split(samples, test_size=_NUM_VAL, random_state=0, stratify=data.target)
    for path, part in zip((train, val), chosen, strict=True):
        write_atomically(str(path), part, classes=tuple("0123456789"), overwrite=True)
