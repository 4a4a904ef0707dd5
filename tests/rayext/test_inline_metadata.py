from __future__ import annotations

from typing import Any

import pytest
import ray.data
from ray.data._internal.execution.metadata_fetcher import InlineMetadataFetcher

from raypipe.rayext.inline_metadata import configure


@pytest.mark.cluster
@pytest.mark.usefixtures("ray_cluster")
def test_executions_under_the_context_and_no_others_read_their_metadata_themselves() -> None:
    context = ray.data.DataContext.get_current().copy()
    configure(context)
    for chosen, is_inline in ((context, True), (ray.data.DataContext.get_current(), False)):
        with ray.data.DataContext.current(chosen):
            dataset: Any = ray.data.range(1)
            rows = iter(dataset.iter_batches(batch_size=None))
            assert next(rows)["id"].tolist() == [0]
            assert isinstance(dataset._current_executor._metadata_fetcher, InlineMetadataFetcher) == is_inline
            assert next(rows, None) is None
