"""Metadata handlers: what a run reports while it trains. See `epochckpt.manager.metadata_handlers`."""

from epochckpt.manager.metadata_handlers import AbstractMetadataHandler, JsonMetadataHandler
from epochckpt.manager.run_database import RunEpochRow, RunRow, RunStatRow, SqliteMetadataHandler

__all__ = [
    "AbstractMetadataHandler",
    "JsonMetadataHandler",
    "RunEpochRow",
    "RunRow",
    "RunStatRow",
    "SqliteMetadataHandler",
]
