"""The head of a directory in an object store, `_epochckpt/head.json`: its epochs, and the run that may write there.

A change is one conditional write of the whole head: if two runs change it at once, the second write meets the first.
Readers need one request and no listing.

It has the newest entries. Older ones are in pages, `_epochckpt/head-<digest>.json`: objects that never change. The head
names each page by the digest of its content, with a bit for each of its entries that still counts. So one write of the
head decides about old entries, too. `directory.head_pages` says which entries are in pages.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from epochckpt.directory.epoch_summary import EpochSummary
from epochckpt.directory.lineage import LINEAGE, Lineage
from epochckpt.directory.metrics_log import Line
from epochckpt.errors import DamagedError
from epochckpt.format import checksums, codec, json_kinds, parsing, paths
from epochckpt.format.codec import stored

_MAX_PAST = 4096
SECTIONS = ("epochs", "stock", "aside")  # of the head: the fields whose entries may be in pages
_DIGEST = re.compile("[0-9a-f]{32}")
_COUNTED = re.compile("[0-9a-f]+")


@dataclasses.dataclass(frozen=True)
class RemovedStep:
    """A step of stock Orbax that is no epoch any more, and of which objects lie in its folder."""

    save_id: str
    kept_in: str  # the folder of the directory that they are moved to; empty: they are removed


def _read_folders(fields: codec.Fields, key: str) -> dict[str, str]:
    found = fields.mapping(key)
    for save_id, folder in found.items():
        paths.check_recorded_name(fields.path, save_id)
        _folder(fields.path, folder)
    return found


def _read_removed_steps(fields: codec.Fields, key: str) -> dict[str, RemovedStep]:
    steps: dict[str, RemovedStep] = {}
    for folder, found in fields.mapping(key).items():
        if not json_kinds.is_list(found) or len(found) != 2:
            raise fields.fail(key, "attempts, and where they go")
        save_id, kept_in = found
        paths.check_recorded_name(fields.path, save_id)
        kept_in = paths.check_recorded_name(fields.path, kept_in, paths.is_part) if kept_in != "" else ""
        steps[_folder(fields.path, folder)] = RemovedStep(save_id=save_id, kept_in=kept_in)
    return steps


def _write_removed_steps(steps: Mapping[str, RemovedStep]) -> dict[str, list[str]]:
    return {folder: [step.save_id, step.kept_in] for folder, step in steps.items()}


_FOLDERS: codec.Codec[Mapping[str, str]] = codec.Codec(_read_folders)
_REMOVED_STEPS: codec.Codec[Mapping[str, RemovedStep]] = codec.Codec(_read_removed_steps, _write_removed_steps)
_LINEAGE = codec.maybe(LINEAGE)
_OWNER: codec.Codec[Mapping[str, Any]] = codec.Codec(codec.Fields.mapping)


@dataclasses.dataclass(frozen=True)
class PageEntry:
    """One entry of a page."""

    section: str  # one of SECTIONS
    key: str  # of the entry in that field of the head
    epoch: EpochSummary
    nbytes: int  # of its JSON

    @classmethod
    def of(cls, section: str, key: str, epoch: EpochSummary) -> Self:
        """The entry, measured."""
        return cls(section, key, epoch, len(key) + len(checksums.dumps(epoch.to_json([]))))


@dataclasses.dataclass(frozen=True)
class Page:
    """Entries in an object of their own, which never changes.

    Attributes:
        digest: of its content, which names it.
        data: its content; empty where it was read.
    """

    entries: tuple[PageEntry, ...]
    digest: str
    data: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def of(cls, entries: Sequence[PageEntry]) -> Self:
        """A new page. No other page has the same content, not even one of the same entries."""
        nodes = list[list[str]]()
        sections = {name: {e.key: e.epoch.to_json(nodes) for e in entries if e.section == name} for name in SECTIONS}
        data = codec.seal_fields("head page", {"id": paths.new_id(), "nodes": nodes, **sections})
        ordered = [entry for name in SECTIONS for entry in entries if entry.section == name]
        return cls(tuple(ordered), checksums.digest(data), data)

    @property
    def path(self) -> str:
        """Where it lies in the directory."""
        return paths.head_page(self.digest)

    def counted(self, head: Head) -> list[PageEntry]:
        """The entries that count in this head, which names the page."""
        found = {name: getattr(head, name) for name in SECTIONS}
        return [entry for entry in self.entries if found[entry.section].get(entry.key) is entry.epoch]


@dataclasses.dataclass(frozen=True)
class Head:
    """What the head says. Folders are those of epochs, relative to the directory; attempts are ids."""

    incarnation: str = stored("incarnation", codec.text(16), default="")  # of the run that may write
    owner: Mapping[str, Any] = stored("owner", _OWNER, default_factory=dict)  # its process: host, pid, claimed_ns
    closed: bool = stored("closed", codec.BOOLEAN, default=True)  # it has said that it writes no more
    past: tuple[str, ...] = stored("past", codec.names(), default=())  # earlier incarnations
    begun: Mapping[str, str] = stored("begun", _FOLDERS, default_factory=dict)  # folders, by attempt
    # The same: nobody reads their objects any more.
    dead: Mapping[str, str] = stored("dead", _FOLDERS, default_factory=dict)
    # By folder; see `directory.stock_steps`.
    removed_steps: Mapping[str, RemovedStep] = stored("leaving", _REMOVED_STEPS, default_factory=dict)
    # Folders named like epochs that hold something else.
    foreign: tuple[str, ...] = stored("foreign", codec.names(paths.is_part), default=())
    # Of deleted epochs: the last lines, which come after those of the parts.
    log: tuple[Line, ...] = stored("log", codec.objects(Line), default=())
    # How many lines are in parts alone, see `directory.object_log`.
    logged: int = stored("logged", codec.INTEGER, default=0)
    # Of the directory whose mirror this is.
    lineage: Lineage | None = stored("lineage", _LINEAGE, default=None)
    change: str = stored("change", codec.text(16), default="")  # unlike that of every other content
    # The entries. On storage, the older entries are in pages.
    epochs: Mapping[str, EpochSummary] = dataclasses.field(default_factory=dict[str, EpochSummary])  # by folder
    # Steps of stock Orbax, by folder.
    stock: Mapping[str, EpochSummary] = dataclasses.field(default_factory=dict[str, EpochSummary])
    # Those that were kept, by `<name>/<folder>`.
    aside: Mapping[str, EpochSummary] = dataclasses.field(default_factory=dict[str, EpochSummary])
    pages: tuple[Page, ...] = ()  # that may have some of the entries

    def knows(self, save_id: str) -> bool:
        """Whether one of the runs here has made an attempt."""
        return save_id.partition("-")[0] in {*self.past, self.incarnation}

    def has(self, folder: str, save_id: str) -> bool:
        """Whether an attempt is the epoch of a folder."""
        return folder in self.epochs and self.epochs[folder].save_id == save_id

    @property
    def named(self) -> set[str]:
        """The attempts whose objects are kept: of epochs, and of those that were set aside."""
        return {entry.save_id for entries in (self.epochs, self.aside) for entry in entries.values()}

    def to_bytes(self) -> bytes:
        """The object's content."""
        nodes = list[list[str]]()
        pages = list[list[str]]()
        for page in self.pages:
            counted = {id(entry) for entry in page.counted(self)}
            bits = sum(1 << number for number, entry in enumerate(page.entries) if id(entry) in counted)
            pages += [[page.digest, f"{bits:x}"]] if bits else []
        sections = {
            name: {key: entry.to_json(nodes) for key, entry in entries.items()}
            for name, entries in self.loose().items()
        }
        return codec.seal_fields("head", {**codec.pack(self), "nodes": nodes, **sections, "pages": pages})

    def loose(self) -> dict[str, dict[str, EpochSummary]]:
        """The entries that are in no page, by section."""
        found = {name: dict(getattr(self, name)) for name in SECTIONS}
        for page in self.pages:
            for entry in page.counted(self):
                del found[entry.section][entry.key]
        return found

    @property
    def lines(self) -> list[Line]:
        """The lines of `log` as they are to be in parts."""
        return [dataclasses.replace(line, number=number) for number, line in enumerate(self.log, self.logged + 1)]

    def tidied(self, gone: Collection[str], moved: int) -> Head:
        """The head without dead attempts of which nothing is left, and without the lines that are in parts."""
        dead = {save_id: folder for save_id, folder in self.dead.items() if save_id not in gone}
        count = min(max(moved - self.logged, 0), len(self.log))
        return self.next(dead=dead, log=self.log[count:], logged=self.logged + count)

    def back_to(self, epoch: int) -> tuple[Line, ...]:
        """The line that says in the log that the epochs after this one count no more; none where the log is empty."""
        return (Line(epoch, back=True),) if self.log or self.logged else ()

    @property
    def listed(self) -> dict[str, EpochSummary]:
        """What counts as an epoch, by folder."""
        return {**self.stock, **self.epochs}

    def next(self, **changes: Any) -> Head:
        """The head after a change."""
        return dataclasses.replace(self, **changes, change=paths.new_id())

    def unlisting(self, folder: str, kept_in: str | None) -> Head:
        """The head after an epoch has ceased to count: it is kept as `<kept_in>/<folder>`, or what it wrote is dead."""
        entry = self.listed[folder]
        epochs = {name: other for name, other in self.epochs.items() if name != folder}
        stock = {name: other for name, other in self.stock.items() if name != folder}
        aside = dict(self.aside)
        dead = dict(self.dead)
        removed_steps = dict(self.removed_steps)
        if kept_in is not None:
            aside[paths.join(kept_in, folder)] = entry
        if entry.stock:
            removed_steps[folder] = RemovedStep(save_id=entry.save_id, kept_in=kept_in or "")
        elif kept_in is None:
            dead[entry.save_id] = folder
        return self.next(epochs=epochs, stock=stock, aside=aside, dead=dead, removed_steps=removed_steps)

    def claimed(self, owner: Mapping[str, Any], foreign: tuple[str, ...]) -> Head:
        """The head of the next incarnation: nothing that an earlier one has begun can be committed any more."""
        number = 1 + (int(self.incarnation[:8]) if self.incarnation else 0)
        return self.next(
            incarnation=f"{number:08d}{paths.new_id()[:8]}",
            owner=dict(owner),
            closed=False,
            past=(*self.past, *([self.incarnation] if self.incarnation else []))[-_MAX_PAST:],
            begun={},
            dead={**self.dead, **self.begun},
            foreign=foreign,
            log=self.log if self.listed else (*self.log, *self.back_to(-1)),
        )


def _nodes(fields: codec.Fields) -> list[Any]:
    nodes = fields.array("nodes")
    for names in nodes:
        if not json_kinds.is_list(names):
            raise fields.fail("nodes", "lists of names")
        for name in names:
            paths.check_recorded_name(fields.path, name, paths.is_node_name)
    return nodes


def _entries(fields: codec.Fields, section: str, nodes: Sequence[Sequence[str]]) -> dict[str, EpochSummary]:
    path = fields.path
    check = _aside if section == "aside" else _folder
    return {
        check(path, key): EpochSummary.from_json(path, f"{section}.{key}", entry, nodes)
        for key, entry in fields.mapping(section).items()
    }


def _folder(path: str, name: str) -> str:
    return paths.check_recorded_name(path, name, paths.is_part)


def _aside(path: str, name: str) -> str:
    into, _, folder = name.partition("/")
    return paths.join(_folder(path, into), _folder(path, folder))


def parse_page(digest: str, data: bytes) -> Page:
    """Parses a page; raises like `parse`."""
    path = paths.head_page(digest)
    if checksums.digest(data) != digest:
        raise DamagedError(path, f"is not the page of this name: its digest is {checksums.digest(data)}")
    fields = parsing.open_record(path, data, "head page")
    nodes = _nodes(fields)
    entries = list[PageEntry]()
    for section in SECTIONS:
        entries += [PageEntry.of(section, key, entry) for key, entry in _entries(fields, section, nodes).items()]
    return Page(tuple(entries), digest)


def _no_pages(digests: Sequence[str]) -> list[Page]:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), paths.head_page(digests[0]))


def parse(path: str, data: bytes, read_pages: Callable[[Sequence[str]], Sequence[Page]] = _no_pages) -> Head:
    """Parses the head; raises DamagedError, FormatError or FormatVersionError.

    `read_pages` gives the pages with these digests, in their order. What it raises is raised.
    """
    fields = parsing.open_record(path, data, "head")

    counted = dict[str, int]()
    for found in fields.array("pages"):
        if not (json_kinds.is_list(found) and len(found) == 2 and all(isinstance(text, str) for text in found)):
            raise fields.fail("pages", "pairs of a digest and of bits")
        digest, bits = found
        if not _DIGEST.fullmatch(digest) or not _COUNTED.fullmatch(bits) or digest in counted:
            raise fields.fail("pages", "different digests, each with bits in hexadecimal")
        counted[digest] = int(bits, 16)
    pages = tuple(read_pages(list(counted))) if counted else ()
    entries = {name: dict[str, EpochSummary]() for name in SECTIONS}
    for page in pages:
        if counted[page.digest] >> len(page.entries):
            raise fields.fail("pages", f"no more bits than page {page.digest} has entries")
        for number, entry in enumerate(page.entries):
            if counted[page.digest] >> number & 1:
                entries[entry.section][entry.key] = entry.epoch
    nodes = _nodes(fields)
    for name in SECTIONS:
        entries[name] |= _entries(fields, name, nodes)

    return codec.parse(Head, fields, **entries, pages=pages)
