"""All that epochckpt knows of stock Orbax: options, arguments, handlers, older forms, its steps, and our view for it.

Promises: other packages take the names of Orbax's files from here (but for `format.paths`, which says what no node may
be called). What an option of Orbax's cannot mean here is refused by name; the view that is written beside an epoch lets
stock Orbax read the epoch without epochckpt.
"""

from typing import TYPE_CHECKING, Any

from epochckpt._lazy import lookup

if TYPE_CHECKING:
    from epochckpt.orbax.handlers import Handlers, HandlerSave
    from epochckpt.orbax.step_names import StepNames
    from epochckpt.orbax.steps import OrbaxRecord
    from epochckpt.orbax.view import Views
else:

    def __getattr__(name: str) -> Any:
        modules = {
            "Handlers": "handlers",
            "HandlerSave": "handlers",
            "StepNames": "step_names",
            "OrbaxRecord": "steps",
            "Views": "view",
        }
        return lookup(__name__, modules, name)


__all__ = ["HandlerSave", "Handlers", "OrbaxRecord", "StepNames", "Views"]
