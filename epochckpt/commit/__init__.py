"""When an epoch is visible, and how the processes of a job agree.

Promises: an epoch that is listed can be restored; only the primary commits and deletes; every wait is bounded, and its
error names the node that is late; a run that a newer one has fenced off changes nothing any more.
"""

from typing import TYPE_CHECKING

from epochckpt._lazy import names_of

if TYPE_CHECKING:
    from epochckpt.commit.attempt import Attempt
    from epochckpt.commit.claiming import Claim
    from epochckpt.commit.coordination import Calls, Coordinator
    from epochckpt.commit.kinds import commits_of
    from epochckpt.commit.protocol import Commits
    from epochckpt.commit.retention import EpochInfo, History
    from epochckpt.commit.saver import Attempts
else:
    __getattr__ = names_of(
        __name__,
        {
            "Attempt": "attempt",
            "Claim": "claiming",
            "Calls": "coordination",
            "Coordinator": "coordination",
            "commits_of": "kinds",
            "Commits": "protocol",
            "EpochInfo": "retention",
            "History": "retention",
            "Attempts": "saver",
        },
    )

__all__ = ["Attempt", "Attempts", "Calls", "Claim", "Commits", "Coordinator", "EpochInfo", "History", "commits_of"]
