"""The epochs of one directory: which there are, who may write, how an epoch appears, gives way and goes.

Promises: an epoch that is listed can be restored; it appears, is replaced and goes at one moment each; a run that
a newer one has fenced off changes nothing any more.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.directory.kinds import commits_of
    from epochckpt.directory.protocol import Commits
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "commits_of": "kinds",
            "Commits": "protocol",
        }
        return lookup(__name__, modules, name)


__all__ = ["Commits", "commits_of"]
