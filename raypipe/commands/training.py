"""The command `train`."""

from __future__ import annotations

import logging
from importlib import import_module

from raypipe.config import RunConfig
from raypipe.importing import texts_in
from raypipe.logs import configure_logs
from raypipe.printing import Result
from raypipe.progress import phase
from raypipe.storage.filesystem import is_remote
from raypipe.stores import open_store, store_options

logger = logging.getLogger(__name__)


def train(run: RunConfig) -> Result:
    """Train a classifier.

    Without a store it trains on the handwritten digits that raypipe ships.

    Examples:
        raypipe train --config run.yaml --plan.epochs 90
        raypipe train --resume runs/20261121-104600-3fa2

    Args:
        run: With --name NAME --resume auto the same command starts a run and continues it.
    """
    configure_logs(run.log_format)
    _check_paths(run)
    phase(logger, "loading Ray and torch")
    # no other command needs the whole program
    import_module("raypipe.rayext.cluster").prepare_workers(run.log_format)
    return import_module("raypipe.launch.run").launch(run)


def _check_paths(run: RunConfig) -> None:
    """Raise StoreError if a local store does not exist, before the seconds that Ray and torch take to load."""
    options = store_options(
        run.store.image_column, run.store.target_column, run.store.trust_pickles
    )
    for address in filter(None, texts_in([run.store.train, run.store.val])):
        if not is_remote(address):
            open_store(address, **options)
