"""What a runner noted with an epoch, in a few words: what a person wants to know of it, and not how it is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epochckpt import _units

_KEPT = frozenset({"version", "nodes", "metrics", "forms"})  # said elsewhere, or of use to the runner alone


def told(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, what there is to say, as it was found: views escape it); nothing of what is not worth it.

    Args:
        notes: the runner's notes; of whatever types, nobody checked them.
    """
    said: list[tuple[str, str]] = []
    finished = notes.get("finished")
    if finished:
        why = "; ".join(map(str, finished)) if isinstance(finished, list | tuple) else str(finished)
        said.append(("run ended", why))
    if notes.get("partial"):
        said.append(("partial", "the run was left in the middle of this epoch, and goes on there"))
    if notes.get("beside"):
        said.append(("beside", "saved by save_checkpoints() in the middle of a run, which does not go on from it"))
    trained = notes.get("total_secs")
    if isinstance(trained, int | float) and not isinstance(trained, bool):
        said.append(("trained for", f"{_units.secs(trained)} in all"))
    for title, name in (("stop state", "stop"), ("blobs", "blobs")):
        kept = notes.get(name)
        if isinstance(kept, Mapping):
            said += [(title, f"{key}: {_brief(value)}") for key, value in kept.items()]
        elif kept is not None:
            said.append((title, str(kept)))
    known = _KEPT | {"finished", "partial", "beside", "total_secs", "stop", "blobs"}
    return said + [("run", f"{name}: {value}") for name, value in notes.items() if name not in known]


def _brief(value: object) -> str:
    """A value, or the entries of one, without braces; figures as figures."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_brief(each)}" for key, each in value.items())
    return _units.number(value) if isinstance(value, float) else str(value)
