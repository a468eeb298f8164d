"""Which settings do not go together. They are refused, by both names; nothing is rewritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Rule:
    """Two settings of which one rules the other out, or is of no use without it.

    Attributes:
        name: the one that is refused, if it is not at its default.
        other: which must not be at its default, or must be.
        needed: whether `other` is needed, or in the way.
        why: the reason, for a person.
    """

    name: str
    other: str
    needed: bool
    why: str

    def problem(self, changed: Mapping[str, str], shown: Callable[[str], str]) -> str | None:
        """What is wrong, if anything is.

        Args:
            changed: the settings that are not at their defaults, as texts.
            shown: how a setting is called where it was given, such as `--ckpt_directory`.
        """
        if self.name not in changed or (self.other in changed) is self.needed:
            return None
        one = f"{shown(self.name)}={changed[self.name]}"
        if self.needed:
            return f"{one} needs {shown(self.other)}: {self.why}"
        return f"{one} contradicts {shown(self.other)}={changed[self.other]}: {self.why}"


_BEYOND = "without it every epoch is kept"
_RANKED = "without it no epoch is ranked"
_NOT_READ_ONLY = {
    "save_interval_steps": "nothing is saved",
    "save_on_steps": "nothing is saved",
    "max_to_keep": "nothing is deleted",
    "keep_period": "nothing is deleted",
    "keep_time_interval_secs": "nothing is deleted",
    "keep_checkpoints_without_metrics": "nothing is deleted",
    "todelete_subdir": "nothing is deleted",
    "enable_async_checkpointing": "nothing is saved",
    "host_memory_limit_bytes": "nothing is saved",
    "metadata_handler": "nothing is reported",
    "resume": "nothing is trained",
    "include": "nothing is saved",
    "exclude": "nothing is saved",
    "unsaved_blobs": "nothing is saved",
    "preemption_deadline_secs": "nothing is trained",
    "max_consecutive_save_failures": "nothing is saved",
    "raise_if_not_saved": "nothing is saved",
}

RULES = (
    *(Rule(name, "read_only", False, f"{why} where everything is only read") for name, why in _NOT_READ_ONLY.items()),
    Rule("keep_period", "max_to_keep", True, _BEYOND),
    Rule("keep_time_interval_secs", "max_to_keep", True, _BEYOND),
    Rule("best_mode", "best_metric", True, _RANKED),
    Rule("keep_checkpoints_without_metrics", "best_metric", True, _RANKED),
    Rule("keep_checkpoints_without_metrics", "max_to_keep", True, _BEYOND),
)
"""All of them. What others need comes as `other`."""
