"""Facts about a store, as values of JSON: two stores with the same facts give the same samples."""

from __future__ import annotations

from typing import Any

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
    return [type(store).__name__, store.fingerprint, schema, options]
