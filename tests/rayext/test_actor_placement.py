from __future__ import annotations

from typing import Any

import pytest

from raypipe.rayext import placement as module
from raypipe.rayext.placement import placement

CPU = {"NodeID": "aa", "Labels": {"raypipe": "transform"}, "Resources": {"CPU": 8.0}}
GPU = {"NodeID": "bb", "Labels": {}, "Resources": {"CPU": 8.0, "GPU": 4.0}}
PLAIN = {"NodeID": "cc", "Labels": {}, "Resources": {"CPU": 8.0}}
ANY_NODE = [{"label_selector": {}}]


def those(*names: str) -> list[dict[str, Any]]:
    return [{"label_selector": {"ray.io/node-id": f"in({','.join(names)})"}}]


@pytest.mark.parametrize(
    ("nodes", "has_labelled_type", "fallback"),
    [
        pytest.param(
            [CPU, GPU], False, those("bb"), id="a GPU node that is there, and no other"
        ),
        pytest.param([GPU, PLAIN], False, those("bb", "cc"), id="GPUs and no label"),
        pytest.param([CPU], False, None, id="CPU nodes alone"),
        pytest.param([PLAIN], True, those("cc"), id="no node of the label yet"),
        pytest.param([PLAIN], False, ANY_NODE, id="neither GPUs nor the label"),
    ],
)
def test_actors_prefer_the_label_and_else_take_nodes_that_are_there(
    nodes: list[dict[str, Any]],
    has_labelled_type: bool,
    fallback: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "nodes", lambda: nodes)
    monkeypatch.setattr(
        module, "has_labelled_type", lambda label, value: has_labelled_type
    )
    assert placement() == {
        "label_selector": {"raypipe": "transform"},
        "fallback_strategy": fallback,
    }
