"""What a run looks at where it begins: the types that init makes, and whether an epoch can be that of its job."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import jax
from absl import logging

from epochckpt.errors import InvalidArgumentError, say
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import containers
from epochckpt.jobs.backends.base import Restored
from epochckpt.jobs.job import TaskGroup
from epochckpt.jobs.workspace import Workspace


def traced_init(group: TaskGroup, workspace: Workspace) -> Callable[[], Mapping[str, containers.Container | None]]:
    """A function that gives the containers that `init_group` makes, without computing: for types that no epoch holds.

    At its first call it runs the tasks under `jax.eval_shape`, on a copy of the workspace. It raises
    InvalidArgumentError, with the reason, if init cannot be traced.
    """
    found: dict[str, containers.Container | None] = {}

    def run() -> None:
        scratch = workspace.scratch()
        for task in group.tasks():
            if task.node in (None, workspace.node):
                task.fn(scratch)
        found.update({name: containers.of(blob_lib.state_of(value)) for name, value in scratch.items()})

    @functools.cache
    def trace() -> str:
        logging.info("node %s: init is run abstractly (jax.eval_shape), for the types of its blobs", workspace.node)
        try:
            jax.eval_shape(run)
        except Exception as error:  # init may do anything, and was written to run on real values
            return f"init cannot be run abstractly (jax.eval_shape) to find out: {say(error).splitlines()[0]}"
        return ""

    def made_by_init() -> Mapping[str, containers.Container | None]:
        if problem := trace():
            raise InvalidArgumentError(problem)
        return found

    return made_by_init


def warn_of_types(workspace: Workspace, names: Sequence[str], declared: Collection[str]) -> None:
    """Names, after init, the blobs that a resume may not be able to give back as they are, but for `declared` ones."""
    for name in names:
        found = None if name in declared else containers.of(blob_lib.state_of(workspace[name]))
        lost = "" if found is None else found.loses()
        if lost:
            logging.warning(
                "%s. A resume runs init once more, without computing (jax.eval_shape), to get it; where init cannot be "
                "traced the blob comes back as dicts and lists. Better say how, in @job.setup: %s",
                f"node {workspace.node}, blob {name!r}: {lost}",
                f"ws.target({name!r}, jax.eval_shape(…what makes it…))",
            )


def check_targets(
    restored: Restored, spaces: Mapping[str, Workspace], chosen: Callable[[Iterable[str]], list[str]], directory: str
) -> None:
    """Refuses an epoch of another job: one that has none of the blobs for which setup declared a target.

    `chosen` picks the blobs that are checkpointed. An epoch that has some of those may be older than the rest of the
    job: that is logged.
    """
    for node, workspace in spaces.items():
        wanted = chosen(sorted(workspace.targets))
        missing = [name for name in wanted if name not in workspace]
        held = restored.names.get(node)
        if not missing or not held:
            continue
        problem = (
            f"{directory}: epoch {restored.epoch} holds {', '.join(held[:10])}{', …' if len(held) > 10 else ''} for "
            f"node {node}, not {', '.join(missing)}, for which setup declared targets"
        )
        if len(missing) == len(wanted):
            raise InvalidArgumentError(f"{problem}: something else saved it; take another directory")
        logging.warning("%s; these blobs are not there unless the job makes them", problem)
