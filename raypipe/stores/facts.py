"""Facts about a store, as values of JSON: two stores with the same facts give the same samples.

A fingerprint may be that of another store, too, or of one that was written in place: it may know only names and
sizes. So `written_of` is a fact as well, which no other files have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raypipe.storage.local_file import written_facts
from raypipe.stores.base import FileStore, Store
from raypipe.stores.in_memory import InMemoryStore
from raypipe.stores.joined import JoinedStore


def facts_of(store: Store) -> Any:
    """Describe the samples of a store; None = its class is the user's, whose code nobody else knows."""
    if isinstance(store, JoinedStore):
        parts = [[name, facts_of(member)] for name, member in store.parts.items()]
        return None if any(facts is None for _, facts in parts) else parts
    if isinstance(store, InMemoryStore):
        return facts_of(store.inner)
    if type(store).__module__.partition(".")[0] != "raypipe":
        return None
    schema = store.schema.remove_metadata().to_string()
    options = repr(store.options) if isinstance(store, FileStore) else ""
    written = written_of(store)
    return [type(store).__name__, store.fingerprint, schema, options, written]


def written_of(store: Store) -> str:
    """Return what is different once a store's files were written or replaced; "" = it has none that are known.

    It compares only on one machine, since a copy has other times; but for a bucket.
    """
    if isinstance(store, InMemoryStore):
        store = store.inner
    if isinstance(store, FileStore):
        return store.written
    try:
        return repr(written_facts(Path(store.address).stat()))
    except (OSError, ValueError):  # a user's store, not in a file
        return ""
