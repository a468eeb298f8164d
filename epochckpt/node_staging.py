"""The staging folder of a job that saves epochs of one node by itself, and the order of such jobs.

The folder's name carries the node, so that nobody takes it for another's. A job that joined later takes over with its
first save: it moves the folders that it found when it joined into its own. Every rename out of them fails from then on.
"""

from __future__ import annotations

import errno
import os
import weakref
from contextlib import suppress

from epochckpt import layout, placing, worker
from epochckpt.errors import AccessError, EpochCheckpointError, FencedError, NotACheckpointDirectoryError, SaveError
from epochckpt.store import Store


class NodeStaging:
    """One job's place in a directory, for one node.

    Attributes:
        home: the staging folder, relative to the directory; empty before `join`.
    """

    def __init__(self, store: Store, node: str):
        self.store, self.node = store, node
        self.home, self._older = "", list[str]()

    @property
    def token(self) -> str:
        """The id in its name."""
        return self.home.removesuffix(layout.TMP_SUFFIX)[-16:]

    def join(self) -> None:
        """Takes this job's place in the order of jobs for this node; a save does it if nobody did before.

        Raises:
            NotACheckpointDirectoryError: the directory is missing.
            AccessError: it may not be written.
        """
        if self.home:
            return
        home = layout.node_staging_folder(self.node, layout.new_id())
        try:
            self.store.make_folder(home)
            # after making our own: of two that join at once, at least one sees the other
            found = [entry.name for entry in self.store.list("") if entry.name != home]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self.missing() from error
        except PermissionError as error:
            raise self.no_access(error) from error
        self.home, self._older = home, [name for name in found if layout.parse_node_staging(name) == self.node]
        weakref.finalize(self, _leave, self.store, home, os.getpid())

    def take_over(self, epoch: int) -> None:
        """Fences off the jobs for this node that were there when this one joined, and removes what they left."""
        swept = []
        for name in self._older:
            away = placing.take_over(self.store, self.home, name)
            if not self.store.exists(self.home):
                raise self.lost(epoch, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.home))
            if away is not None:
                swept.append(away)
        self._older = []
        for away in swept:
            worker.logged("what an earlier job left stays", lambda path=away: self.store.remove_tree(path))

    def missing(self) -> EpochCheckpointError:
        """The error for a directory that is not there."""
        found = "is a file" if os.path.lexists(self.store.root) else "does not exist"
        return NotACheckpointDirectoryError(
            f"{self.store.root} {found}; expected a directory, which is never created here: make or mount it"
        )

    def no_access(self, error: OSError) -> EpochCheckpointError:
        """The error for one that may not be read or written."""
        return AccessError(f"{self.store.root}: {error}; this user (uid {os.getuid()}) needs read and write access")

    def lost(self, epoch: int, error: OSError) -> EpochCheckpointError:
        """Why a place to write to is not there any more."""
        if not os.path.isdir(self.store.root):
            return self.missing()
        if self.store.exists(self.home):
            return SaveError(epoch, f"files of it have disappeared from {self.store.root} ({error})")
        return FencedError(
            epoch,
            f"a newer job for node {self.node} has taken over {self.store.root}, or somebody has removed the staging "
            f"folder of this one, {self.home}; this process can no longer save there",
        )


def _leave(store: Store, home: str, pid: int) -> None:
    """Removes a job's staging folder at its end."""
    if os.getpid() != pid:  # a fork of it ends
        return
    with suppress(OSError):
        placing.leave(store, home)
