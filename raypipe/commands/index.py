"""The command that writes the indexes of tars next to them."""

from __future__ import annotations

from typing import Any

from raypipe.config import RunConfig
from raypipe.errors import ConfigError


def index(run: RunConfig, target: str = "") -> dict[str, Any]:
    """Write an index next to each tar, so that no run has to scan it.

    A run that finds no index scans the tars, and keeps the result in the node's cache and in its own folder. The
    indexes are small files in the folder `_raypipe_index` next to the tars. An index belongs to one version of its
    tar, and for the names of the image and target columns that you give.

    Examples:
        raypipe index s3://bucket/shards
        raypipe index 's3://bucket/train-{0000..0099}.tar' --store.target-column json
    """
    from raypipe.stores import open_store, store_options
    from raypipe.stores.tar import TarStore

    addresses = run.store.train
    if not addresses:
        raise ConfigError(
            "raypipe index needs the address of tars: raypipe index s3://bucket/shards"
        )
    if isinstance(addresses, dict):
        raise ConfigError(
            "raypipe index takes one store: give the address of each in turn"
        )
    store = open_store(
        addresses, **store_options(run.store.image_column, run.store.target_column)
    )
    if not isinstance(store, TarStore):
        raise ConfigError(f"{addresses} has no tars: only they need an index")
    return {"store": store.address, **store.write_index()}
