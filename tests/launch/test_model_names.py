from __future__ import annotations

import pytest
import torch

from raypipe.errors import ConfigError
from raypipe.launch.model_names import check_model
from raypipe.train.models import build_model


def test_four_channels_go_to_the_small_model_and_not_to_torchvisions() -> None:
    check_model("small", 4)
    assert build_model("small", 7, channels=4)(torch.zeros(2, 4, 8, 8)).shape == (2, 7)
    with pytest.raises(
        ConfigError, match=r"train\.model='resnet18' needs three channels, .* has 4"
    ):
        check_model("resnet18", 4)


def test_an_unknown_model_is_named_with_what_there_is() -> None:
    with pytest.raises(
        ConfigError, match=r"train\.model='resnet51' is neither 'small' nor .*resnet50"
    ):
        check_model("resnet51")
    with pytest.raises(ConfigError, match=r"train\.model='resnet51': Unknown model"):
        build_model("resnet51", 5)
