"""How the processes of a job agree.

Promises: every wait is bounded, and its error names the processes that did not come; all processes get the same answer.
"""

from typing import TYPE_CHECKING

from epochckpt._lazy import names_of

if TYPE_CHECKING:
    from epochckpt.agreement.coordination import Calls, Coordinator
else:
    __getattr__ = names_of(
        __name__,
        {
            "Calls": "coordination",
            "Coordinator": "coordination",
        },
    )

__all__ = ["Calls", "Coordinator"]
