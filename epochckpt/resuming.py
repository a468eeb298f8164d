"""Where a run begins: from scratch, or after an epoch that is on storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt.boundary import Exchange
from epochckpt.errors import DamagedError, EpochNotFoundError, InvalidArgumentError
from epochckpt.keeping import Keeper, Restored
from epochckpt.reporting import Handler
from epochckpt.workspace import Workspace

AUTO, NEVER, MUST = "auto", "never", "must"


def choose(keeper: Keeper, named: int | None, resume: str, exchange: Exchange, handler: Handler) -> Restored | None:
    """Restores the epoch that the run goes on from; None: from scratch.

    A named epoch is a rollback, durable before anything is trained. Otherwise it is the newest that every node can
    read, also where the metadata handler says less: it may have died before it was told.

    Args:
        keeper: the manager.
        named: the epoch that the user named, if any.
        resume: `auto`, `never` or `must`.
        exchange: the other processes.
        handler: may know what was saved last.

    Raises:
        EpochNotFoundError: the named epoch is not there, or there is none although there should be.
        DamagedError: there are epochs, and none of them can be used.
        InvalidArgumentError: `resume="never"` in a directory that has epochs.
    """
    if keeper.chooses:
        if resume == NEVER:
            return None
        epoch = keeper.choose(named)
        if epoch is None:  # the runner's own handler: the manager does not know it
            epoch = exchange.publish("the epoch that was saved last", lambda: handler.last_epoch(must_say=True))
        if epoch is None and resume == MUST:
            raise EpochNotFoundError(None, keeper.directory, [])
        return None if epoch is None else keeper.restore(epoch)
    if named is not None:
        keeper.roll_back(named)
        return keeper.restore(named)

    def look() -> dict[str, Any]:
        epochs = keeper.epochs()
        return {
            "epochs": epochs[-20:],
            "damaged": keeper.damaged()[-20:],
            "known": handler.last_epoch() if resume != NEVER else None,
        }

    found = exchange.publish("the epochs on storage", look)
    epochs, known, damaged = found["epochs"], found["known"], found["damaged"]
    if damaged and not epochs:
        raise DamagedError(
            keeper.directory,
            f"it has the epochs {', '.join(map(str, damaged))}, and none of them can be used (the log says why). "
            "Nothing is started over there: move them away, or take another directory",
        )
    if resume == NEVER:
        if epochs:
            raise InvalidArgumentError(
                f"resume='never', but {keeper.directory} has epochs up to {epochs[-1]}; take another directory, "
                "delete them, or resume='auto'"
            )
        return None
    if not epochs:
        if resume == MUST:
            raise EpochNotFoundError(None, keeper.directory, [])
        if known is not None:
            raise EpochNotFoundError(known, f"{keeper.directory} (the metadata handler says it was saved there)", [])
        return None
    if known is not None and known not in epochs:
        logging.warning("the metadata handler says that epoch %d was saved last; on storage: %s", known, epochs)
    return keeper.restore(None)


def check_targets(restored: Restored, spaces: Mapping[str, Workspace], checkpointed: Sequence[str], where: str) -> None:
    """Refuses an epoch that cannot be this job's: no blob came back that setup declared a target for.

    If some came back and some did not, the job may have grown since it was saved: that is logged.

    Args:
        restored: what came back.
        spaces: the workspaces of this process, by node.
        checkpointed: names of blobs with targets, as far as they are checkpointed at all.
        where: the directory, for messages.

    Raises:
        InvalidArgumentError: it cannot; says what the epoch holds.
    """
    for node, workspace in spaces.items():
        wanted = [name for name in checkpointed if name in workspace.targets]
        missing = [name for name in wanted if name not in workspace]
        held = restored.names.get(node)
        if not missing or not held:
            continue
        problem = (
            f"{where}: epoch {restored.epoch} holds {', '.join(held[:10])}{', …' if len(held) > 10 else ''} for node "
            f"{node}, not {', '.join(missing)}, for which setup declared targets"
        )
        if len(missing) == len(wanted):
            raise InvalidArgumentError(
                f"{problem}: it was saved by something else. Take another directory, or name the blobs alike"
            )
        logging.warning("%s; these blobs are not there unless the job makes them", problem)
