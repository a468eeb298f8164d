"""Where the epochs of one manager lie, as its options say."""

from __future__ import annotations

import dataclasses
import functools

import orbax.checkpoint as ocp

from epochckpt.directory import EpochDirectory
from epochckpt.options import StorageOptions
from epochckpt.saving.job_directory import Kind
from epochckpt.tiers.directory_per_host import DirectoryPerHost
from epochckpt.tiers.job_mirror import NO_MIRROR, JobMirror
from epochckpt.tiers.ledger_file import LedgerFile
from epochckpt.tiers.ledger_kinds import ONE_FOR_ALL, ONE_PER_DISK, LedgerKind
from epochckpt.tiers.mirror import Mirror
from epochckpt.tiers.shared_directory import SharedDirectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the epochs of one manager lie.

    Attributes:
        kind: makes the directory of the job: one that all processes see, or one on a disk of each host.
        ledger_kind: how that directory keeps its ledger.
        mirror: the mirror of that directory.
    """

    kind: Kind
    ledger_kind: LedgerKind
    mirror: JobMirror

    def ledger_file(self, local: EpochDirectory) -> LedgerFile:
        """The ledger of the directory that this process has opened."""
        return LedgerFile(local, self.ledger_kind)


def layout_of(storage: StorageOptions, options: ocp.CheckpointManagerOptions) -> Layout:
    """Where the epochs lie that a manager with these options saves; nothing is looked at."""
    if storage.mirror is None:
        kind = functools.partial(SharedDirectory, mirror=NO_MIRROR)
        return Layout(kind=kind, ledger_kind=ONE_FOR_ALL, mirror=NO_MIRROR)
    mirror = Mirror(storage.mirror, storage, options)
    if storage.local_disks and not options.read_only:
        kind = functools.partial(DirectoryPerHost, mirror=mirror)
        return Layout(kind=kind, ledger_kind=ONE_PER_DISK, mirror=mirror)
    return Layout(kind=functools.partial(SharedDirectory, mirror=mirror), ledger_kind=ONE_FOR_ALL, mirror=mirror)
