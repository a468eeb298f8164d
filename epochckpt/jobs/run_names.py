"""Which blobs of a run are checkpointed, and what the user is told about the others."""

import dataclasses
import enum
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from epochckpt import _text
from epochckpt.errors import InvalidArgumentError
from epochckpt.jobs import blobs as blob_lib
from epochckpt.jobs import containers
from epochckpt.jobs.backends.base import CheckpointBackend, Names, Restored
from epochckpt.jobs.job import Job
from epochckpt.jobs.run_calls import RunCalls
from epochckpt.jobs.session import Session


class UnsavedBlobs(enum.Enum):
    """What is done about blobs that are not checkpointed. The values are those of `JobRunner(unsaved_blobs=…)`."""

    WARN = "warn"
    ERROR = "error"
    IGNORE = "ignore"


class RunNames:
    """The names of the blobs that one run checkpoints. A run without a backend checkpoints none.

    Args:
        job: tells its unit and the nodes that are checkpointed.
        include: patterns of the blobs to checkpoint; None: all.
        exclude: patterns of those not to checkpoint.
        unsaved_blobs: what becomes of blobs that are not checkpointed and that `exclude` does not name.
        session: has the blobs.
        calls: of the run.
        backend: the manager.
    """

    def __init__(
        self,
        *,
        job: Job,
        include: Sequence[str] | None,
        exclude: Sequence[str] | None,
        unsaved_blobs: UnsavedBlobs,
        session: Session,
        calls: RunCalls,
        backend: CheckpointBackend[Any] | None,
    ):
        self._job = job
        self._include = include
        self._exclude = exclude
        self._unsaved_blobs = unsaved_blobs
        self._session = session
        self._calls = calls
        self._backend = backend
        self.checkpointed: Names = {}  # empty before it is known

    # -- from scratch --------------------------------------------------------------------------------------------

    def declared(self) -> dict[str, set[str]]:
        """The blobs, by node, of which setup tells how they come back."""
        return {
            node: {name for name in (*ws, *ws.targets) if blob_lib.target_of(ws, name) is not None}
            for node, ws in self._session.workspaces().items()
        }

    def begin(self, declared: Mapping[str, Collection[str]]) -> None:
        """Init has run: the blobs that exist now are checkpointed. `declared`: what `declared()` told before it.

        InvalidArgumentError: a name that the user gave fits no blob, or a blob cannot be checkpointed.
        """
        self._check_named_blobs(None)
        kept = self._kept_nodes()
        spaces = self._session.workspaces()
        self._agree({node: list(ws) if node in kept else [] for node, ws in spaces.items()})
        self._warn_of_types(declared)

    def _warn_of_types(self, declared: Mapping[str, Collection[str]]) -> None:
        """Names the blobs that a resume may not be able to give back as they are, except those `declared` by setup."""
        for node, name in ((node, name) for node, names in self.checkpointed.items() for name in names):
            value = None if name in declared[node] else self._session.workspace(node)[name]
            container = containers.of(blob_lib.state_of(value))
            if container is not None and (lost := container.loses()):
                logging.warning(
                    "node %s, blob %r: %s. A resume runs init once more, without computing (jax.eval_shape), to get "
                    "it; where init cannot be traced the blob comes back as dicts and lists. Better say how, in "
                    "@job.setup: ws.target(%r, jax.eval_shape(…what makes it…))",
                    node,
                    name,
                    lost,
                    name,
                )

    # -- from an epoch -------------------------------------------------------------------------------------------

    def check_targets(self, restored: Restored, directory: str) -> None:
        """Refuses an epoch of another job, in which all blobs are missing for which setup declared a target.

        If only some are missing, the epoch may be older than the rest of the job: that is logged.
        """
        for node, workspace in self._session.workspaces().items():
            wanted = self._chosen(sorted(workspace.targets))
            held = restored.names.get(node)
            missing = [name for name in wanted if name not in workspace]
            if not missing or not held:
                continue
            some = f"{', '.join(held[:10])}{', …' if len(held) > 10 else ''}"
            epoch = f"{self._job.unit} {restored.epoch}"
            problem = (
                f"{directory}: {epoch} holds {some} for node {node}, not {', '.join(missing)}, "
                "for which setup declared targets"
            )
            hints = [f"of {name!r} {_text.near(name, held)}" for name in missing if _text.near_names(name, held)]
            hint = f" ({'; '.join(hints)})" if hints else ""
            if len(missing) == len(wanted):
                remedy = "take another directory, or correct the names" if hints else "take another directory"
                raise InvalidArgumentError(f"{problem}{hint}: something else saved it; {remedy}")
            logging.warning("%s%s; these blobs are not there unless the job makes them", problem, hint)

    def go_on(self, restored: Restored, from_setup: Names) -> None:
        """The blobs of an epoch are in the workspaces: they are checkpointed, and those that setup has made.

        InvalidArgumentError: a name that the user gave fits no blob, or a blob cannot be checkpointed.
        """
        self._check_named_blobs(restored.epoch)
        self._agree(self._with_setup(restored.names, from_setup))
        self.explain_left_out(restored.names, from_setup)

    def _with_setup(self, restored: Names, from_setup: Names) -> Names:
        """The blobs of the epoch, and those that setup has made since: a run from scratch would save them, too."""
        if self._backend is None or self._backend.per_node:  # in Caffe2 the epoch alone says what is saved
            return restored
        made = {node: blobs for node, blobs in from_setup.items() if node in self._kept_nodes()}
        nodes = [*restored, *(node for node in made if node not in restored)]
        names = {n: list(dict.fromkeys([*restored.get(n, ()), *made.get(n, ())])) for n in nodes}
        for node, blobs in names.items():
            if new := self._chosen(blob for blob in blobs if blob not in restored.get(node, ())):
                shown = ", ".join(map(repr, new))
                logging.info("node %s: setup made %s, which the epoch lacks; saved from here on", node, shown)
        return names

    # -- from either ---------------------------------------------------------------------------------------------

    def _check_named_blobs(self, resumed_from: int | None) -> None:
        """Refuses a target, or a pattern of `include`, for a blob that no node has when init has run: it is misspelt.

        A resumed run may go on from an epoch that lacks the blob: that is logged, unless nothing would be saved.
        """
        resumed = resumed_from is not None

        def report() -> dict[str, list[str]]:
            spaces = self._session.workspaces().values()
            return {"blobs": self.here(), "targets": sorted({name for ws in spaces for name in ws.targets})}

        def decide(reports: list[dict[str, list[str]]]) -> None:
            names = sorted({name for one in reports for name in one["blobs"]})
            targets = set() if resumed else {name for one in reports for name in one["targets"]}
            given = [(name, f"ws.target({name!r}, …)") for name in sorted(targets) if name not in names]
            given += [(one, f"include=[{one!r}]") for one in self._include or () if not _matching(one, names)]
            for name, form in given:
                when = f"after {self._job.unit} {resumed_from}" if resumed else "when init has run"
                remedy = f"correct the name, or make the blob in init; {_text.near(name, names)}"
                problem = f"{form}: no node has such a blob {when}; {remedy}"
                if not resumed or not self._chosen(names):
                    raise InvalidArgumentError(problem)
                logging.warning("%s", problem)

        self._calls.collective("the names of blobs", report, decide)

    def _agree(self, names: Names) -> None:
        """Checkpoints these blobs, as far as the user chose them."""
        names = {node: self._chosen(blobs) for node, blobs in names.items()}
        if self._backend is not None:
            self._backend.agree_on_names(names)
            self.checkpointed = names

    def explain_left_out(self, names: Names, from_setup: Names) -> None:
        """Tells of blobs that `include` and `exclude` leave out and that no resumed run has: setup does not make them.

        A task that misses a blob is told the same.
        """
        if self._backend is None:
            return
        for node, workspace in self._session.workspaces().items():
            workspace.attach(dataclasses.replace(workspace.hooks, why_missing=self._why_missing))
            lost = [blob for blob in names.get(node, ()) if blob not in from_setup[node] and not self._chosen([blob])]
            if lost and node in self._kept_nodes():
                logging.warning(
                    "node %s: include= and exclude= leave out %s. A resumed run does not run init, and has no such "
                    "blobs: make them in @job.setup, which runs at every start, or in the epoch's tasks",
                    node,
                    ", ".join(map(repr, lost)),
                )

    def _why_missing(self, blob: str) -> str | None:
        if self._chosen([blob]):
            return None
        return "include= and exclude= leave it out, so no checkpoint has it: make it in @job.setup, not in init"

    # -- after the first epoch -----------------------------------------------------------------------------------

    def check_excluded(self, known: Sequence[str]) -> None:
        """On the primary, after the first epoch: warns of a name in `exclude` that no node has: it may be misspelt.

        Patterns may match nothing, and a task may make the blob in a later epoch.
        """
        names = [name for name in self._exclude or () if not any(mark in name for mark in "*?[")]
        for name in (name for name in names if name not in known):
            problem = f"exclude=[{name!r}]: no node has such a blob after the first {self._job.unit} of this run"
            logging.warning("%s; %s", problem, _text.near(name, known))

    def check_unsaved(self, epoch: int) -> None:
        """Names the blobs that stay from epoch to epoch and are not checkpointed, except those that `exclude` names."""
        if self._backend is None or self._unsaved_blobs is UnsavedBlobs.IGNORE:
            return
        listed: list[str] = []
        for node, workspace in self._session.workspaces().items():
            names = self._chosen(name for name in workspace if name not in self.checkpointed.get(node, ()))
            if names and node in self._kept_nodes():
                listed.append(f"{', '.join(map(repr, names))} of node {node}")
        if not listed:
            return
        when = f"after {self._job.unit} {epoch}"
        message = (
            f"blobs that are not checkpointed are in the workspace {when}: {'; '.join(listed)}. "
            "Init had not made them, or the resumed epoch lacks them. If a resumed run reads such a blob before it has "
            "made it, its results differ: make the blobs in init, put them into ws.live, or leave them out with "
            "JobRunner(exclude=[…]); unsaved_blobs='ignore' says that all of them are temporary"
        )
        if self._unsaved_blobs is UnsavedBlobs.ERROR:
            raise InvalidArgumentError(message)
        logging.warning("%s", message)

    # -- helpers -------------------------------------------------------------------------------------------------

    def here(self) -> list[str]:
        """The names of the blobs of all nodes of this process."""
        return sorted({name for workspace in self._session.workspaces().values() for name in workspace})

    def _chosen(self, names: Iterable[str]) -> list[str]:
        """The blobs to checkpoint, by the patterns of the user."""
        include = self._include
        exclude = self._exclude or ()
        wanted = [n for n in names if include is None or any(_matching(pattern, [n]) for pattern in include)]
        return [n for n in wanted if not any(_matching(pattern, [n]) for pattern in exclude)]

    def _kept_nodes(self) -> Sequence[str]:
        return self._job.nodes_to_checkpoint() or self._session.nodes


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match a shell pattern."""
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]
