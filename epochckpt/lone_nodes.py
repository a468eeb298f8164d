"""Epochs of jobs that know nothing of each other (`node_epochs`), as an inspection reads them: node by node."""

from __future__ import annotations

from epochckpt import layout, parsing, surveying
from epochckpt.commit import Commits
from epochckpt.errors import EpochCheckpointError, say
from epochckpt.node_reader import EpochReader
from epochckpt.worker import Pool


def readers(commits: Commits, epoch: int, pool: Pool) -> tuple[dict[str, EpochReader], dict[str, str]]:
    """Readers of what single nodes saved under an epoch's number, and what is wrong with the others, by node.

    Args:
        commits: the directory.
        epoch: the number.
        pool: who reads.
    """
    folder = commits.folder(epoch)
    found: dict[str, EpochReader] = {}
    problems: dict[str, str] = {}
    for name, is_folder in sorted(surveying.names(commits.store, folder)):
        at = layout.join(folder, name)
        if not is_folder or not layout.is_name(name):
            continue
        try:
            record = commits.read_in(at, epoch, parsing.parse_epoch)
        except (EpochCheckpointError, OSError) as error:
            problems[layout.shown_name(name)] = say(error)
            continue
        if record is not None and record.alone and record.nodes[0].folder == name:
            found[record.nodes[0].name] = EpochReader(commits.store, at, record, pool)
    return found, problems
