"""How the processes of a job agree.

Promises: every wait is bounded, and its error names the processes that did not come; all processes get the same answer.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.agreement.coordination import Calls, Coordinator
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "Calls": "coordination",
            "Coordinator": "coordination",
        }
        return lookup(__name__, modules, name)


__all__ = ["Calls", "Coordinator"]
