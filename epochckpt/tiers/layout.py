"""Where the epochs of one manager lie, as its options say."""

from __future__ import annotations

import dataclasses
import functools

import orbax.checkpoint as ocp

from epochckpt.options import StorageOptions
from epochckpt.saving.job_directory import Kind
from epochckpt.tiers.directory_per_host import DirectoryPerHost
from epochckpt.tiers.job_mirror import NO_MIRROR, JobMirror
from epochckpt.tiers.mirror import Mirror
from epochckpt.tiers.shared_directory import SharedDirectory


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the epochs of one manager lie.

    Attributes:
        kind: makes the directory of the job: one that all processes see, or one on a disk of each host.
        mirror: the mirror of that directory.
    """

    kind: Kind
    mirror: JobMirror


def layout_of(storage: StorageOptions, options: ocp.CheckpointManagerOptions) -> Layout:
    """Where the epochs lie that a manager with these options saves; nothing is looked at."""
    if storage.mirror is None:
        return Layout(kind=functools.partial(SharedDirectory, mirror=NO_MIRROR), mirror=NO_MIRROR)
    mirror = Mirror(storage.mirror, storage, options)
    if storage.local_disks and not options.read_only:
        return Layout(kind=functools.partial(DirectoryPerHost, mirror=mirror), mirror=mirror)
    return Layout(kind=functools.partial(SharedDirectory, mirror=mirror), mirror=mirror)
