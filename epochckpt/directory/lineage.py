"""The lineage of a mirror: which directory it belongs to, and the last claim of that directory.

It is a part of the mirror's own records: of the head in an object store, `_epochckpt/lineage.json` on a file system. It
changes only with a claim of the mirror, by compare-and-swap: a directory replaces exactly the lineage that it has seen.
Whoever claims the mirror as an ordinary directory takes it away from the directory that it belonged to.
"""

from __future__ import annotations

import dataclasses

from epochckpt.errors import FencedError
from epochckpt.format import codec, parsing, paths
from epochckpt.format.codec import stored

_MAX_PAST = 64
_NAME_OR_NOTHING = codec.name(lambda found: found == "" or paths.is_name(found), limit=32)


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Whose mirror it is.

    Attributes:
        directory: the id of the directory that it belongs to; empty: something else has written to it since.
        claim: the id of the last claim, which no other claim ever has.
        past: the ids of directories that it belonged to before, the newest last.
    """

    directory: str = stored("directory", _NAME_OR_NOTHING)
    claim: str = stored("claim", codec.name(limit=32))
    past: tuple[str, ...] = stored("past", codec.names(), default=())

    def to_bytes(self) -> bytes:
        """The content of `lineage.json`."""
        return codec.seal_fields("lineage", {"lineage": codec.pack(self)})

    def knows(self, directory: str) -> bool:
        """Whether the mirror belongs to a directory, or did so before."""
        return directory in {self.directory, *self.past}


LINEAGE = codec.one(Lineage)


@dataclasses.dataclass(frozen=True)
class ClaimLineage:
    """A directory claims a mirror, as a value: it requires the lineage that the directory has seen."""

    expected: Lineage | None  # None: nobody has claimed it as a mirror yet
    directory: str
    claim: str

    def apply(self, found: Lineage | None) -> Lineage:
        """The lineage after the claim; FencedError if the mirror has another lineage by now."""
        if found != self.expected:
            raise FencedError(0, "another directory, or another run, has claimed the mirror since this one looked")
        return _passed(found, self.directory, self.claim)


@dataclasses.dataclass(frozen=True)
class ClaimDirectly:
    """An ordinary claim: a directory that is somebody's mirror is nobody's from then on."""

    def apply(self, found: Lineage | None) -> Lineage | None:
        """The lineage after the claim; None if it is no mirror."""
        return None if found is None else _passed(found, "", paths.new_id())


def _passed(found: Lineage | None, directory: str, claim: str) -> Lineage:
    before = () if found is None else (*found.past, found.directory)
    past = [name for name in dict.fromkeys(before) if name not in ("", directory)]
    return Lineage(directory=directory, claim=claim, past=tuple(past[-_MAX_PAST:]))


def parse(path: str, data: bytes) -> Lineage:
    """Parses `lineage.json`; raises DamagedError, FormatError or FormatVersionError."""
    return LINEAGE.read(parsing.open_record(path, data, "lineage"), "lineage")
