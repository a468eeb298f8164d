"""Folders of epochs that are not where, or not called as, a reader expects them: a single epoch; another name format.

By content: a name alone proves nothing.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Self

from epochckpt._lazy import ocp
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, UnsupportedError
from epochckpt.format import parsing, paths
from epochckpt.orbax import steps

if TYPE_CHECKING:
    from epochckpt.storage import Store

RECORDS = (paths.EPOCH_RECORD, steps.STEP_RECORD)
_LOOKED_INTO = 50
_MAX_DIGITS = 100
_SHOWN = 6
_NAME = re.compile(r"(?:(?P<prefix>.+)_)?(?P<number>\d+)\Z")
_ENDING = re.compile(r"(\d+)\Z")
_NUMBERED = re.compile(r"[/._-](\d{1,18})\Z")


class _Plain:
    """Orbax's default NameFormat without Orbax, which takes long to import."""

    def build_name(self, step: int) -> str:
        return str(step)


class StepNames:
    """Names of epochs' folders, by Orbax's step NameFormat."""

    only = ""  # the one folder that is looked at, whatever else lies beside it; empty: all are

    def __init__(self, name_format: Any):
        self._format = name_format
        self._readable = tuple(getattr(name_format, "read_name_formats", ())) or (name_format,)
        for known in (name_format, *self._readable):
            name = known.build_name(7)
            if not _ENDING.search(name):
                problem = "builds names that do not end in the step's number; use a standard_name_format"
                raise UnsupportedError(f"step_name_format {known} {problem}")
            if not paths.is_free_folder(name):
                raise InvalidArgumentError(
                    f"step_prefix, or step_name_format, calls the folder of step 7 {name!r}, which is not usable: "
                    f"expected the name of one folder, of at most 255 bytes, without '/', control characters and "
                    f"{paths.TMP_SUFFIX!r}"
                )

    @classmethod
    def of(cls, options: ocp.CheckpointManagerOptions | None) -> Self:
        """The names that a manager's options ask for; None: the default, plain numbers."""
        if options is None:
            return cls(_Plain())
        if options.step_name_format is not None:
            return cls(options.step_name_format)
        length = options.step_format_fixed_length
        if length is not None and not 0 <= length < _MAX_DIGITS:
            raise InvalidArgumentError(
                f"step_format_fixed_length is {length}; expected a number of digits, from 1 to 100"
            )
        return cls(ocp.path.step.standard_name_format(step_prefix=options.step_prefix, step_format_fixed_length=length))

    @property
    def several(self) -> bool:
        """Whether epochs of other name formats are read, too."""
        return len(self._readable) > 1

    def build(self, epoch: int) -> str:
        """The folder name of an epoch to be written."""
        return self._format.build_name(epoch)

    def parse(self, name: str) -> int | None:
        """The epoch that a folder name stands for, or None."""
        found = _ENDING.search(name)
        if not found:
            return None
        epoch = int(found[1])
        if epoch > paths.MAX_EPOCH:
            return None
        for known in self._readable:
            if known.build_name(epoch) == name:
                return epoch
        return None


def is_single(names: set[str]) -> bool:
    """Whether a folder with these entries is one epoch: of ours, a step of stock Orbax, or a tree that Orbax saved."""
    return paths.NODE_RECORD not in names and bool(names & {*RECORDS, steps.TREE_RECORD})


def is_item(store: Store, names: set[str]) -> bool:
    """Whether such a folder of a tree is only one item of the epoch above it."""
    if names & set(RECORDS):
        return False
    above = os.path.dirname(store.root.rstrip("/"))
    return store.renames and any(os.path.exists(os.path.join(above, record)) for record in RECORDS)


def number_of(store: Store) -> int:
    """The number of the epoch that lies in a folder: as recorded, else as the folder is named, else 0."""
    try:
        record = parsing.read_record(store, paths.EPOCH_RECORD, parsing.parse_head)
    except (OSError, EpochCheckpointError):
        record = None
    if record is not None:
        return record.epoch
    found = _NUMBERED.search(store.root.rstrip("/"))  # of stock Orbax, or damaged
    return int(found[1]) if found else 0


def named_otherwise(store: Store, found: list[tuple[str, bool]]) -> str:
    """What to say of epochs among the entries `found`, (name, is folder), which are not named as readers expect."""
    below = [n for n, is_folder in found if is_folder and not n.startswith(".") and paths.TMP_SUFFIX not in n]
    epochs = [name for name in below[:_LOOKED_INTO] if _ENDING.search(name) and has_one(store, name, RECORDS)]
    if not epochs:
        return ""
    shown = few([f"{name}/" for name in epochs])
    return f"holds epochs whose folders are named otherwise ({shown}): {_advice(epochs)}"


def few(names: list[str]) -> str:
    """The first names, and the number of all if there are more."""
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown}, … ({len(names)} in all)"


def _advice(names: list[str]) -> str:
    """What to pass so that they are seen."""
    parsed = [match for name in names if (match := _NAME.match(name))]
    prefixes = {match["prefix"] or "" for match in parsed}
    if len(parsed) < len(names) or len(prefixes) != 1:
        return "no step_prefix and no step_format_fixed_length means all of them; pass a step_name_format"
    (prefix,) = prefixes
    options = [("step_prefix", prefix)] if prefix else []
    if any(match["number"] != str(int(match["number"])) for match in parsed):  # padded
        options.append(("step_format_fixed_length", max(len(match["number"]) for match in parsed)))
    if not options:
        return "pass no step_prefix and no step_format_fixed_length"
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options)
    arguments = ", ".join(f"{name}={value!r}" for name, value in options)
    return f"pass CheckpointManagerOptions({arguments}), or {flags} to the command"


def has_one(store: Store, folder: str, names: tuple[str, ...]) -> bool:
    """Whether one of these files is in a folder; False where this user may not look."""
    try:
        return any(store.exists(paths.join(folder, name)) for name in names)
    except OSError:
        return False
