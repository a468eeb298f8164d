"""When to save: policies beside those of `orbax.checkpoint.checkpoint_managers`, which work as they are."""

from epochckpt.saving.auto_interval import auto_interval

__all__ = ["auto_interval"]
