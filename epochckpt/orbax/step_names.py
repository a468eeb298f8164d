"""How the folders of epochs are called: by Orbax's name formats, and by a user's own.

Also folders of epochs that are not where, or not called as, a reader expects them: a single epoch; another name format.
Those are known by their content: a name alone proves nothing.
"""

from __future__ import annotations

import pathlib
import re
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

from absl import logging

from epochckpt._lazy import ocp
from epochckpt.errors import EpochCheckpointError, InvalidArgumentError, UnsupportedError
from epochckpt.format import parsing, paths
from epochckpt.orbax import step_files

if TYPE_CHECKING:
    from epochckpt.storage import Store

RECORDS = (paths.EPOCH_RECORD, step_files.STEP_RECORD)
_LOOKED_INTO = 50
_MAX_DIGITS = 100
_EXAMPLE = 7  # a step
_FINISHED = '{"item_handlers": {}, "init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}'
_SHOWN = 6
_NAME = re.compile(r"(?:(?P<prefix>.+)_)?(?P<number>\d+)\Z")
_ENDING = re.compile(r"(\d+)\Z")
_NUMBERED = re.compile(r"[/._-](\d{1,18})\Z")


class _Plain:
    """Orbax's default NameFormat without Orbax, which takes long to import."""

    def build_name(self, step: int) -> str:
        return str(step)


def _is_orbax(name_format: Any) -> bool:
    """Whether the format is one of Orbax's own, whose names end in the step's number."""
    return isinstance(name_format, _Plain) or type(name_format).__module__.startswith("orbax.")


class StepNames:
    """Names of epochs' folders, by Orbax's step NameFormat.

    The names of Orbax's own formats end in the step's number. What a name of any other format stands for is asked of
    its `find_all`, on a local folder of that name, so that the answer is the same for a directory in a bucket.
    """

    def __init__(self, name_format: Any):
        self._format = name_format
        self._readable = tuple(getattr(name_format, "read_name_formats", ())) or (name_format,)
        self._foreign = tuple(known for known in self._readable if not _is_orbax(known))
        self._numbers: dict[str, int | None] = {}  # what names of foreign formats stand for, as far as it was asked
        self._built: dict[int, str] = {}  # such a format may build another name tomorrow
        for known in (name_format, *self._readable):
            name = _built(known, _EXAMPLE) if self._foreign else known.build_name(_EXAMPLE)
            if name is not None:  # else it has names for other steps, or is only for reading
                self._check(name, _EXAMPLE)

    def _check(self, name: str, epoch: int) -> None:
        if self._foreign and self.parse(name) != epoch:
            raise UnsupportedError(
                f"step_name_format {self._format} calls the folder of step {epoch} {name!r}, and its find_all does not "
                "find that step in a directory with a folder of this name: no reader would find it either. Correct "
                "find_all, or use a standard_name_format"
            )
        if not paths.is_free_folder(name):
            raise InvalidArgumentError(
                f"step_prefix, or step_name_format, calls the folder of step {epoch} {name!r}, which is not usable: "
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
    def name_format(self) -> Any:
        """Orbax's NameFormat."""
        return self._format

    @property
    def several(self) -> bool:
        """Whether an epoch may have another name than `build` gives: of another format, or of another day."""
        return len(self._readable) > 1 or bool(self._foreign)

    def check(self, epoch: int) -> None:
        """Raises InvalidArgumentError if the format has no name for an epoch, or one under which it is not found."""
        if self._foreign and epoch not in self._built:
            try:
                name = self._format.build_name(epoch)
            except Exception as error:  # of the user's: it may raise anything
                raise InvalidArgumentError(
                    f"step_name_format {self._format} has no name for step {epoch} ({type(error).__name__}: {error})"
                ) from error
            self._check(name, epoch)
            if not paths.is_movable(name):
                raise InvalidArgumentError(f"step_name_format calls the folder of step {epoch} {name!r}: too long")

    def longest(self) -> str:
        """A name as long as any; empty if only the format knows."""
        return "" if self._foreign else self.build(paths.MAX_EPOCH)

    def build(self, epoch: int) -> str:
        """The folder name of an epoch to be written."""
        if not self._foreign:
            return self._format.build_name(epoch)
        return self._built.get(epoch) or self._built.setdefault(epoch, self._format.build_name(epoch))

    def parse(self, name: str) -> int | None:
        """The epoch that a folder name stands for, or None."""
        found = _ENDING.search(name)
        if found and (epoch := int(found[1])) <= paths.MAX_EPOCH:
            for known in self._readable:
                if (_built(known, epoch) if self._foreign else known.build_name(epoch)) == name:
                    return epoch
        if not self._foreign:
            return None
        self.learn([name])
        return self._numbers.get(name)

    def learn(self, names: Iterable[str]) -> None:
        """Asks what folder names stand for, all at once; `parse` asks for one."""
        if not self._foreign:
            return
        new = [name for name in dict.fromkeys(names) if name not in self._numbers]
        asked = [name for name in new if paths.is_free_folder(name)]
        found = _ask(self._format, asked) if asked else {}
        self._numbers.update({name: found.get(name) for name in new})


def _built(name_format: Any, epoch: int) -> str | None:
    """The name that a user's format gives a step; None if the format raises, because it has no name for the step."""
    try:
        return name_format.build_name(epoch)
    except Exception:
        return None


def _ask(name_format: Any, names: Iterable[str]) -> dict[str, int]:
    """The steps that a user's format finds in a directory with folders of these names, by name.

    They look like steps of stock Orbax that are finished: a format may look for that.
    """
    from etils import epath  # it takes long to import, and few directories need it

    with tempfile.TemporaryDirectory(prefix="epochckpt-") as made:
        for name in names:
            folder = pathlib.Path(made, name)
            folder.mkdir()
            (folder / step_files.STEP_RECORD).write_text(_FINISHED)
            (folder / step_files.COMMIT).touch()
        try:
            found = [(one.path.name, int(one.step)) for one in name_format.find_all(epath.Path(made))]
        except Exception as error:  # of the user's: it may raise anything
            text = "find_all of step_name_format %s failed (%s: %s): only folders that end in their step's number count"
            logging.log_first_n(logging.WARNING, text, 3, name_format, type(error).__name__, error)
            return {}
    return {name: step for name, step in found if 0 <= step <= paths.MAX_EPOCH}


def is_single(names: set[str]) -> bool:
    """Whether a folder with these entries is one epoch: of ours, a step of stock Orbax, or a tree that Orbax saved."""
    return paths.NODE_RECORD not in names and bool(names & {*RECORDS, step_files.TREE_RECORD})


def is_item(store: Store, names: set[str]) -> bool:
    """Whether such a folder of a tree is only one item of the epoch above it."""
    return not names & set(RECORDS) and store.has_beside(RECORDS)


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
    """The arguments with which these names count as epochs."""
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
