"""How the processes of a job agree.

Promises: every wait is bounded, and its error names the processes that did not come; all processes get the same answer.
"""

from typing import TYPE_CHECKING

from epochckpt._lazy import names_of

if TYPE_CHECKING:
    from epochckpt.agreement.collective import CollectiveCalls
    from epochckpt.agreement.coordination import Coordinator
else:
    __getattr__ = names_of(
        __name__,
        {
            "CollectiveCalls": "collective",
            "Coordinator": "coordination",
        },
    )

__all__ = ["CollectiveCalls", "Coordinator"]
