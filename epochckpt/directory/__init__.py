"""The epochs of one directory: which there are, who may write, how an epoch appears, gives way and goes.

Promises: an epoch that is listed can be restored; it appears, is replaced and goes at one moment each; a run that
a newer one has fenced off changes nothing any more.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.directory.epoch_directory import EpochDirectory
    from epochckpt.directory.kinds import directory_of
    from epochckpt.directory.node_directory import node_directory_of
    from epochckpt.directory.single import single_epoch
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "directory_of": "kinds",
            "EpochDirectory": "epoch_directory",
            "node_directory_of": "node_directory",
            "single_epoch": "single",
        }
        return lookup(__name__, modules, name)


__all__ = ["EpochDirectory", "directory_of", "node_directory_of", "single_epoch"]
