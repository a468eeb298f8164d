"""Where the epochs of a job lie: in one directory, on a disk of each host, and in a mirror; and copies between these.

Promises: a copy is a commit of its own, compared with its checksums on the way; a mirror belongs to one directory at a
time, and whoever finds another one's claim there writes nothing; no address that comes out of a directory is opened.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.tiers.directory_per_host import DirectoryPerHost
    from epochckpt.tiers.epoch_copy import EpochCopy, check_place
    from epochckpt.tiers.host_record import HostRecord, read_host_record
    from epochckpt.tiers.job_mirror import NO_MIRROR, JobMirror, MirroredDirectory
    from epochckpt.tiers.layout import layout_of
    from epochckpt.tiers.ledger import Ledger, read_ledger
    from epochckpt.tiers.ledger_file import LedgerFile
    from epochckpt.tiers.mirror import Mirror, named_mirror, viewed
    from epochckpt.tiers.node_copies import CopyCommit, NodeCopies
    from epochckpt.tiers.shared_directory import SharedDirectory
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "DirectoryPerHost": "directory_per_host",
            "CopyCommit": "node_copies",
            "EpochCopy": "epoch_copy",
            "HostRecord": "host_record",
            "read_host_record": "host_record",
            "SharedDirectory": "shared_directory",
            "check_place": "epoch_copy",
            "MirroredDirectory": "job_mirror",
            "JobMirror": "job_mirror",
            "Ledger": "ledger",
            "NO_MIRROR": "job_mirror",
            "layout_of": "layout",
            "LedgerFile": "ledger_file",
            "read_ledger": "ledger",
            "Mirror": "mirror",
            "NodeCopies": "node_copies",
            "named_mirror": "mirror",
            "viewed": "mirror",
        }
        return lookup(__name__, modules, name)


__all__ = [
    "NO_MIRROR",
    "CopyCommit",
    "DirectoryPerHost",
    "EpochCopy",
    "HostRecord",
    "JobMirror",
    "Ledger",
    "LedgerFile",
    "Mirror",
    "MirroredDirectory",
    "NodeCopies",
    "SharedDirectory",
    "check_place",
    "layout_of",
    "named_mirror",
    "read_host_record",
    "read_ledger",
    "viewed",
]
