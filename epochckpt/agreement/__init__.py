"""How the processes of a job agree.

Promises: every wait is bounded, and its error names the processes that did not come; all processes get the same answer.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.agreement.collective import CollectiveCalls
    from epochckpt.agreement.coordination import Coordinator
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "CollectiveCalls": "collective",
            "Coordinator": "coordination",
        }
        return lookup(__name__, modules, name)


__all__ = ["CollectiveCalls", "Coordinator"]
