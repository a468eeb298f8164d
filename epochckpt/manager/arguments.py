"""What the calls of a manager take as `args`: one unnamed item, or several by name."""

from __future__ import annotations

from typing import Any

from epochckpt.orbax import Handlers
from epochckpt.orbax.options import check_args


class Arguments:
    """The arguments of one manager's saves and restores.

    Attributes:
        handlers: what takes the items.
        item_names: the names that the manager was opened with, if any.
        several: whether its epochs have several items, by name; None until a save or a restore shows it.
    """

    def __init__(self, handlers: Handlers, item_names: tuple[str, ...]):
        self.handlers = handlers
        self.item_names = item_names or tuple(handlers.names)
        self.several: bool | None = None
        if self.item_names:
            self.several = True
        elif handlers.single:
            self.several = False

    def learn(self, several: bool | None) -> None:
        """A save or a restore shows whether epochs have several items; None: it is not known any more."""
        self.several = several

    def of_save(self, items: Any, save_kwargs: Any, args: Any) -> tuple[Any, bool]:
        """Orbax's argument for a save, and whether it names several items; `items` is Orbax's legacy form of it."""
        args = self.handlers.arguments(items, save_kwargs, args, "save")
        return args, bool(check_args(args, self.several))

    def of_restore(self, items: Any, restore_kwargs: Any, args: Any) -> tuple[Any, bool | None]:
        """The same for a restore; None: the argument does not tell."""
        args = self.handlers.arguments(items, restore_kwargs, args, "restore")
        return args, check_args(args, self.several, restoring=True)
