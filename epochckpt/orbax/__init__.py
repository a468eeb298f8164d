"""All that epochckpt knows of stock Orbax: options, arguments, handlers, older forms, its steps, and our view for it.

Promises: no other package knows the names of Orbax's files. What an option of Orbax's cannot mean here is refused by
name; the view that is written beside an epoch lets stock Orbax read the epoch without epochckpt.
"""

from epochckpt.orbax.handlers import Handlers, HandlerSave
from epochckpt.orbax.step_names import StepNames
from epochckpt.orbax.steps import OrbaxRecord
from epochckpt.orbax.view import Views

__all__ = ["HandlerSave", "Handlers", "OrbaxRecord", "StepNames", "Views"]
