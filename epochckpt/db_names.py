"""What `ec.caffe2` calls a db: a node's epoch; its path, and checks of names and kinds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from epochckpt import layout
from epochckpt.errors import InvalidArgumentError
from epochckpt.reading import epoch_number
from epochckpt.storage import expanded
from epochckpt.tasks import Node

DB_TYPE = "epochckpt"  # the one kind of storage


def get_ckpt_filename(node_name: str, epoch: int) -> str:
    """Where a node's epoch lies below the prefix: `<epoch>/<node>`, with the name of the node's folder."""
    return layout.join(str(epoch_number(epoch)), layout.folder_name(layout.check_node_name(str(node_name))))


def db_name(
    epoch: int, node_name: str, db_prefix: str | os.PathLike[str], path_prefix: str | os.PathLike[str] | None = None
) -> str:
    """The full path of a node's epoch.

    Args:
        epoch: its number.
        node_name: the node.
        db_prefix: the directory.
        path_prefix: in place of the directory; put before `<epoch>/<node>` as it stands, not joined to it.
    """
    name = get_ckpt_filename(node_name, epoch)
    return expanded(f"{os.fspath(path_prefix)}{name}" if path_prefix else os.path.join(os.fspath(db_prefix), name))


def check_type(name: str, value: str | None) -> None:
    """Refuses a kind of storage that is not ours; None will do for `path_type`: the same as `db_type`."""
    if value != DB_TYPE and (value is not None or name == "db_type"):
        raise InvalidArgumentError(f"{name} {value!r} is not known; expected {DB_TYPE!r}, the only kind of storage")


def name_list(names: Iterable[str]) -> list[str]:
    """Names of blobs as a list; one string is refused, as it would be taken for its letters."""
    if isinstance(names, str):
        raise InvalidArgumentError(f"blob_names is a list of names, got the string {names!r}")
    return [str(name) for name in names]


def node_names(nodes: Iterable[Any]) -> list[str]:
    """Names of nodes, each given as its name or as a `Node`, no name twice."""
    given = [nodes] if isinstance(nodes, str | Node) else nodes
    names = [layout.check_node_name(str(node)) for node in given]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InvalidArgumentError(f"node {twice[0]!r} is named twice")
    return names
