"""Names and paths of the format.

A checkpoint directory holds `<epoch>/<node>/…` for committed epochs, and one `incarnation-<id>.orbax-checkpoint-tmp`
folder for everything that is not committed. In an object store attempts lie side by side in the epoch's folder, see
`part_folder`. Paths are relative to the directory and use `/`.
"""

import itertools
import re
import secrets
import urllib.parse
from collections.abc import Callable, Collection

from epochckpt.errors import FormatError, InvalidArgumentError

FORMAT = "epochckpt"
VERSION = 1
FEATURES: frozenset[str] = frozenset()
"""What a record may name in `requires` and this epochckpt can read, see "How the format grows" in docs/format.md."""

EPOCH_RECORD = "epoch.json"
NODE_RECORD = "node.json"
ROLLBACK_RECORD = "rollback.json"
HEAD = "_epochckpt/head.json"  # on object stores, see `directory.head_record`
OWNER_FILE = "owner.json"  # in an incarnation's folder: the process that claimed the directory
HEAD_PAGE_PREFIX = "head-"  # of the names, beside the head, of objects with more of its entries
CONDITIONS = "_epochckpt/conditions"  # empty: what a store is asked with whether it checks the conditions of writes
DEFAULT_ITEM = "default"
UNNAMED = (DEFAULT_ITEM, "pytree", "state")  # what Orbax calls the one unnamed item: v0; older v1; v1
JSON_FILE = "metadata"  # the name Orbax's JSON handler uses inside an item's folder
DATA_SUFFIX = ".safetensors"
ROOT_METADATA = ("metadata", "_ROOT_METADATA")  # where Orbax keeps a manager's own metadata
LEGACY_ROOT_METADATA = ("metadata", "metadata")  # where older versions of Orbax keep it
MIRROR_RECORD = "_epochckpt/mirror.json"  # what a directory knows of its mirror
LINEAGE_RECORD = "_epochckpt/lineage.json"  # of a mirror on a file system, see `directory.lineage`
METRICS_LOG = "_epochckpt/metrics.jsonl"  # of deleted epochs, see `directory.metrics_log`
METRICS_PART_PREFIX = "metrics-"  # of the names of its parts on object stores, see `directory.object_log`
HOST_RECORD = "_epochckpt/host.json"  # the directory is on a disk of one host, see `tiers.host_record`
REPLICA_FOLDER = "_also"  # in a node's folder: cells of other nodes, see `NodeRecord`. No item and no node is called so

MAX_EPOCH = 2**63 - 1
"""The largest number of an epoch: the records' integers, and SQLite's, end there."""

TMP_SUFFIX = ".orbax-checkpoint-tmp"  # Orbax's tools ignore names that contain this
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]+\Z")
_IN_VIEWS = frozenset({"manifest.ocdbt", "index.0", "array_metadatas"})  # lie beside links to nodes
_PART = re.compile(r"-\d{5}\Z")
_INCARNATION = re.compile(r"incarnation-([0-9a-f]{8,16})" + re.escape(TMP_SUFFIX) + r"\Z")
_UNCLAIMED = re.compile(r"unclaimed-([0-9a-f]{8,16})" + re.escape(TMP_SUFFIX) + r"\Z")
_ATTEMPT = re.compile(r"[0-9a-f]{8,16}-(\d+)-\d+\Z")
_NODE_STAGING = re.compile(r"node-(.+)-([0-9a-f]{16})" + re.escape(TMP_SUFFIX) + r"\Z")
_ESCAPED = "x-"
_HEX = re.compile(r"-([0-9a-f]{2})")
_UNSAFE = re.compile(r"[^A-Za-z0-9._]")
_RESERVED = frozenset(
    {EPOCH_RECORD, NODE_RECORD, "_CHECKPOINT_METADATA", "commit_success.txt", "metrics", "descriptor"}
)
# Of the names of folders with quarantined epochs; an id follows:
ROLLED_BACK_PREFIX = "rolled-back-"
DAMAGED_PREFIX = "damaged-"
PARTIAL_PREFIX = "partial-"  # what one disk has of epochs that are not on all disks
DIVERGED_PREFIX = "diverged-"  # they are no part of the history that the mirror has
QUARANTINE_PREFIXES = (ROLLED_BACK_PREFIX, DAMAGED_PREFIX, PARTIAL_PREFIX, DIVERGED_PREFIX)
EXPORT_PREFIX = "export-"  # of the folder in which an export is made
_OWN = frozenset({".", "..", ROOT_METADATA[0], ROLLBACK_RECORD, HEAD.partition("/")[0]})
MAX_NAME = 120
_MAX_PART = 255  # bytes, of most file systems
_MAX_FILE_PATH = 1000
METRICS_PREFIX = "_metrics-"  # no node and no item has such a name
_METRICS = re.compile(re.escape(METRICS_PREFIX) + r"(.+)\.json\Z")


def head_page(digest: str) -> str:
    """Path of the page of a head whose content has this digest."""
    return f"{HEAD.rpartition('/')[0]}/{HEAD_PAGE_PREFIX}{digest}.json"


def metrics_part(first: int) -> str:
    """Path of a part of the log of deleted epochs, by the number of its first line."""
    return f"{HEAD.rpartition('/')[0]}/{METRICS_PART_PREFIX}{first:08d}.jsonl"


def new_id() -> str:
    """A fresh id that no other run has: 16 hex digits."""
    return secrets.token_hex(8)


def is_name(name: object) -> bool:
    """Whether `name` may name a node or an item on storage."""
    return isinstance(name, str) and len(name) <= MAX_NAME and _NAME.match(name) is not None and TMP_SUFFIX not in name


def is_free_folder(name: object) -> bool:
    """Whether a user may give the name to a folder beside the epochs."""
    return (
        isinstance(name, str)
        and len(name.encode("utf-8", "surrogatepass")) <= _MAX_PART
        and _PLAIN.match(name) is not None
        and "/" not in name
        and name not in _OWN
        and not name.startswith(QUARANTINE_PREFIXES)
        and TMP_SUFFIX not in name
    )


def is_movable(folder: str, into: str = "") -> bool:
    """Whether an epoch's folder can be moved away, perhaps `into` another folder, without a name that is too long.

    On its way it is called `moving-<id>-<destination>`, see `directory.staging_folder`. A damaged epoch goes to
    `damaged-<id>/`.
    """
    places = (urllib.parse.quote(join(place, folder), safe="") for place in (into, f"{DAMAGED_PREFIX}{new_id()}"))
    return all(len(f"moving-{new_id()}-{place}") <= _MAX_PART for place in places)


def check_node_name(name: object) -> str:
    """Returns `name` if it may name a node, else raises InvalidArgumentError."""
    if not is_node_name(name):
        raise InvalidArgumentError(
            f"node name {name!r} is not usable: expected a text without "
            f"'/', which stands between a node and its blob, and of at most {MAX_NAME} characters in the name of its "
            "folder, where some count three times"
        )
    return str(name)


def is_node_name(name: object) -> bool:
    """Whether `name` may name a node; its folder is called `folder_name(name)`."""
    return isinstance(name, str) and len(name) > 0 and "/" not in name and is_name(folder_name(name))


def folder_name(name: str) -> str:
    """Name of a node's folder: the node's name if it is usable, else an escaped form; `shown_name` is the inverse.

    `trainer:0` becomes `x-trainer-3a0`: `x-`, then letters, digits, `.` and `_` as they are, and `-` with two hex
    digits for each UTF-8 byte of another character. Different names have different folders.
    """
    if is_name(name) and name not in _RESERVED | _IN_VIEWS and shown_name(name) == name:
        return name
    raw = name.encode("utf-8", "surrogatepass").decode("latin-1")
    return _ESCAPED + _UNSAFE.sub(lambda match: f"-{ord(match[0]):02x}", raw)


def shown_name(folder: str) -> str:
    """The name of the node whose folder this is; the inverse of `folder_name`."""
    if not folder.startswith(_ESCAPED):
        return folder
    try:
        plain = _HEX.sub(lambda match: chr(int(match[1], 16)), folder.removeprefix(_ESCAPED))
        name = plain.encode("latin-1").decode("utf-8", "surrogatepass")
    except ValueError:
        return folder
    return name if folder_name(name) == folder else folder


def check_item_name(name: object, folders: Collection[str] = ()) -> str:
    """Returns `name` if it may name an item beside the folders of nodes, else raises InvalidArgumentError."""
    if not is_name(name) or name in _RESERVED or _PART.search(str(name)) or str(name).endswith(DATA_SUFFIX):
        raise InvalidArgumentError(
            f"item name {name!r} is not usable: expected a letter or digit followed by letters, digits, '.', '_', '-' "
            f"(at most {MAX_NAME}), not ending in '-' and five digits or '.safetensors', not one of {sorted(_RESERVED)}"
        )
    if name in folders:
        raise InvalidArgumentError(
            f"item {name!r} has the name of a node of this job, or of its folder; rename the item or pass node="
        )
    return str(name)


def incarnation_folder(incarnation: str) -> str:
    """Staging folder of an incarnation, 16 hex digits; object stores have none."""
    return f"incarnation-{incarnation}{TMP_SUFFIX}"


def parse_incarnation(name: str) -> str | None:
    """The incarnation, if `name` is an incarnation folder, else None."""
    match = _INCARNATION.match(name)
    return match[1] if match else None


def unclaimed_folder(incarnation: str) -> str:
    """What an incarnation's staging folder is called before it holds its owner, and while it is removed at the end."""
    return f"unclaimed-{incarnation}{TMP_SUFFIX}"


def parse_unclaimed(name: str) -> str | None:
    """The incarnation, if `name` is a folder of `unclaimed_folder`, else None."""
    match = _UNCLAIMED.match(name)
    return match[1] if match else None


def save_id_in(path: str) -> str | None:
    """The attempt that wrote an object, by a path that holds its id (`<incarnation>-<epoch>-<number>`), else None."""
    return next(filter(_ATTEMPT.match, path.removesuffix(".json").split("/")), None)


def node_staging_folder(node: str, token: str) -> str:
    """Staging folder of a job that saves epochs of one node only; see `directory.node_directory`."""
    return f"node-{folder_name(node)}-{token}{TMP_SUFFIX}"


def parse_node_staging(name: str) -> str | None:
    """The node, if `name` is a folder of `node_staging_folder`, else None."""
    match = _NODE_STAGING.match(name)
    return shown_name(match[1]) if match else None


def metrics_file(source: str) -> str:
    """Name of the file, beside the commit record, with the metrics that a source attached to an epoch."""
    return f"{METRICS_PREFIX}{source}.json"


def parse_metrics_file(name: str) -> str | None:
    """The source, if `name` is a file of `metrics_file`, else None."""
    match = _METRICS.match(name)
    return match[1] if match and is_name(match[1]) else None


def is_about_epoch(path: str) -> bool:
    """Whether a file in an epoch's folder is its record, or has metrics that were attached to it."""
    return path == EPOCH_RECORD or parse_metrics_file(path) is not None


def data_file(item: str, part: int) -> str:
    """Name of a part of an array item's data file, in the node's folder."""
    return f"{item}{DATA_SUFFIX}" if part == 0 else f"{item}-{part:05d}{DATA_SUFFIX}"


def part_folder(node_folder: str, save_id: str, item: str = "") -> str:
    """Where an attempt in an object store has what a node wrote, relative to the epoch's folder.

    The data files of an item lie below the item, where the database of the Orbax view reaches them; the node's record
    and handlers' files lie in the folder without an item.
    """
    return join(item, node_folder, save_id)


def join(*parts: str) -> str:
    """Joins relative paths, leaving out empty ones."""
    return "/".join(p for p in parts if p)


def parents(path: str) -> list[str]:
    """The folders on the way to a path, outermost first."""
    return list(itertools.accumulate(path.split("/")[:-1], join))


def is_part(name: object) -> bool:
    """Whether `name` may be one component of a path."""
    return is_file_path(name) and "/" not in str(name)


def is_file_path(name: object) -> bool:
    """Whether `name` may be the path of a handler's file in its item's folder."""
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_FILE_PATH or not _PLAIN.match(name):
        return False
    return all(part not in ("", ".", "..") and len(part.encode()) <= _MAX_PART for part in name.split("/"))


def check_recorded_name(path: str, name: object, usable: Callable[[object], bool] = is_name) -> str:
    """Returns a name read from a record if it is safe to use in a path, else raises FormatError naming `path`."""
    if not usable(name):
        kind = "node name" if usable is is_node_name else "name"
        raise FormatError(path, f"holds the {kind} {str(name)[:80]!r}, which is not allowed in this format")
    return str(name)
