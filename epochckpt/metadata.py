"""Metadata handlers: what a run reports while it trains. See `epochckpt.manager.metadata_handlers`."""

from __future__ import annotations

from epochckpt.manager.metadata_handlers import (
    AbstractMetadataHandler,
    EpochRow,
    JsonMetadataHandler,
    RunRow,
    SqliteMetadataHandler,
    StatRow,
)

__all__ = [
    "AbstractMetadataHandler",
    "EpochRow",
    "JsonMetadataHandler",
    "RunRow",
    "SqliteMetadataHandler",
    "StatRow",
]
