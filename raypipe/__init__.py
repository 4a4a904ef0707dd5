"""raypipe: deterministic, resumable image input for Ray Train, as one stream per run.

`import raypipe` imports neither ray nor torch: each public name is loaded when it is first used. It changes
nothing in the process: no environment variable, no logger, no library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.commands.convert import convert as convert
    from raypipe.commands.inspection import describe as describe
    from raypipe.commands.preview import preview as preview
    from raypipe.commands.verify import verify as verify
    from raypipe.config import AugmentConfig as AugmentConfig
    from raypipe.config import PlanConfig as PlanConfig
    from raypipe.config import PoolConfig as PoolConfig
    from raypipe.config import TransformConfig as TransformConfig
    from raypipe.errors import RaypipeError as RaypipeError
    from raypipe.history.replay import replay as replay
    from raypipe.plan.custom import Population as Population
    from raypipe.plan.custom import Sampler as Sampler
    from raypipe.plan.schedule import Cursor as Cursor
    from raypipe.plan.schedule import Plan as Plan
    from raypipe.rayext.cluster import connect as connect
    from raypipe.storage.lease import lease as lease
    from raypipe.stores import open_store as open_store
    from raypipe.streaming.data_loader import DataLoader as DataLoader
    from raypipe.streaming.dataset import dataset as dataset
    from raypipe.streaming.handover import check_resources as check_resources
    from raypipe.streaming.handover import loader as loader
    from raypipe.streaming.lmdb_dataset import LMDBDatasource as LMDBDatasource
    from raypipe.streaming.lmdb_dataset import read_lmdb as read_lmdb
    from raypipe.streaming.opening import open_stream as open_stream
    from raypipe.streaming.plain import plain_loaders as plain_loaders
    from raypipe.streaming.resident import resident as resident
    from raypipe.streaming.saving.saved_model import read_checkpoint as read_checkpoint
    from raypipe.streaming.spec import StreamSpec as StreamSpec

_NAMES = {
    "commands.convert": ["convert"],
    "commands.inspection": ["describe"],
    "commands.preview": ["preview"],
    "commands.verify": ["verify"],
    "config": ["AugmentConfig", "PlanConfig", "PoolConfig", "TransformConfig"],
    "errors": ["RaypipeError"],
    "history.replay": ["replay"],
    "plan.custom": ["Population", "Sampler"],
    "plan.schedule": ["Cursor", "Plan"],
    "rayext.cluster": ["connect"],
    "storage.lease": ["lease"],
    "stores": ["open_store"],
    "streaming.data_loader": ["DataLoader"],
    "streaming.dataset": ["dataset"],
    "streaming.handover": ["check_resources", "loader"],
    "streaming.lmdb_dataset": ["LMDBDatasource", "read_lmdb"],
    "streaming.opening": ["open_stream"],
    "streaming.plain": ["plain_loaders"],
    "streaming.resident": ["resident"],
    "streaming.saving.saved_model": ["read_checkpoint"],
    "streaming.spec": ["StreamSpec"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise import_module("raypipe.mistakes").missing_name(name, _HOME)
    value = getattr(import_module(f"raypipe.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
