"""All that epochckpt knows of stock Orbax: options, arguments, handlers, older forms, its steps, and our view for it.

Promises: no other package knows the names of Orbax's files. What an option of Orbax's cannot mean here is refused by
name; the view that is written beside an epoch lets stock Orbax read the epoch without epochckpt.
"""

from typing import TYPE_CHECKING

from epochckpt._lazy import names_of

if TYPE_CHECKING:
    from epochckpt.orbax.handlers import Handlers, HandlerSave
    from epochckpt.orbax.step_names import StepNames
    from epochckpt.orbax.steps import OrbaxRecord
    from epochckpt.orbax.view import Views
else:
    __getattr__ = names_of(
        __name__,
        {
            "Handlers": "handlers",
            "HandlerSave": "handlers",
            "StepNames": "step_names",
            "OrbaxRecord": "steps",
            "Views": "view",
        },
    )

__all__ = ["HandlerSave", "Handlers", "OrbaxRecord", "StepNames", "Views"]
