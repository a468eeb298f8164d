"""The directory of a job: all processes see one, or each has another one on its own disk.

`JobDirectory` has what differs between the two (`tiers.SharedDirectory`, `tiers.DirectoryPerHost`). A manager calls it
in this order:

1. opening: `introduce` on every process, `check` and `survey` on the primary, `open` on every process;
2. whenever it looks at storage again: `look`;
3. the claim, before the first write: `claimed` on the primary, `join` on every process;
4. a save: `commit` on the primary, `verdict` on the others, and `late_verdict` where that has not come in time;
   `take_back` on all if it has failed; then `here` and `unlisted_elsewhere` say which older epochs each process takes
   out of sight;
5. a deletion or rollback: `agree_on_claim`, `order` on the primary, `follow` on every process;
6. `release`, where `acts`.
"""

from __future__ import annotations

import abc
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import orbax.checkpoint as ocp  # pyright: ignore[reportMissingTypeStubs]

from epochckpt.agreement import CollectiveCalls, Coordinator
from epochckpt.directory import EpochDirectory, directory_of
from epochckpt.directory.epoch_directory import ReplaceCondition, Stager, Staging, Writer
from epochckpt.format import Nodes
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.saving import page_cache
from epochckpt.saving.save import Save
from epochckpt.saving.survey import Survey
from epochckpt.storage import open_store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where the caller says that the directory is, and how it is opened."""

    directory: str | os.PathLike[str]
    options: ocp.CheckpointManagerOptions
    storage: StorageOptions
    names: StepNames

    def epoch_directory(self, address: str | None = None) -> EpochDirectory:
        """The directory, or the one at an address. Nothing is read or written."""
        files = self.options.file_options
        store = open_store(
            address or self.directory,
            folder_mode=files.path_permission_mode if files else None,
            settings=self.storage.store,
            cached_bytes=page_cache.cached_bytes(self.storage),
        )
        return directory_of(store, self.names)


class JobDirectory(abc.ABC):
    """The directory of a job on one process, for one manager.

    Attributes:
        epoch_directory: what this process reads, once it is open.
        coordinator: the processes of the job.
        is_partial: whether it has only the parts of epochs that one host wrote, as of the last look.
        first_word: the key of what the other processes hear first of a save from the primary.
        tells_commits: whether this process sees in it that a save is committed.
    """

    first_word: ClassVar[str]
    tells_commits: ClassVar[bool]

    def __init__(self, place: Place, coordinator: Coordinator):
        self.place = place
        self.coordinator = coordinator
        self.is_partial = False
        self._wait_secs = place.storage.open_timeout_secs
        self._stager: Stager | None = None  # from the claim on; a `Writer` where this process acts

    @property
    def stager(self) -> Stager:
        """Says where the nodes of a save write; only a process that knows of the claim may ask."""
        assert self._stager is not None, "the directory was not claimed"
        return self._stager

    @property
    def writer(self) -> Writer:
        """The right to change the directory; only a process that `acts` may ask, once it has claimed."""
        assert isinstance(self._stager, Writer), "the directory was not claimed by this process"
        return self._stager

    @property
    def incarnation(self) -> str:
        """The run's id; empty before the claim."""
        return "" if self._stager is None else self._stager.incarnation

    def forget_claim(self) -> None:
        """Forgets a claim that failed. The next claim makes a new incarnation, which sweeps what this one left."""
        self._stager = None

    @property
    @abc.abstractmethod
    def acts(self) -> bool:
        """Whether this process deletes, discards and releases by itself."""

    def after_fork(self, alone: Coordinator) -> None:
        """In a forked child, which is `alone`: the other processes are the parent's."""
        self.coordinator = alone

    # -- opening and looking -------------------------------------------------------------------------------------

    @abc.abstractmethod
    def introduce(self, node: str) -> Any:
        """What this process tells the primary when it opens the directory, as JSON; None: nothing."""

    @abc.abstractmethod
    def check(self, epoch_directory: EpochDirectory, told: Sequence[Any]) -> None:
        """On the primary: refuses a directory of another kind, and processes that have `told` that theirs is."""

    @abc.abstractmethod
    def survey(
        self, epoch_directory: EpochDirectory, told: Sequence[Any], known: Mapping[int, ReplaceCondition]
    ) -> Survey:
        """On the primary: makes a survey of what all processes have told.

        The `known` epochs are damaged, see `survey.survey`.
        """

    @abc.abstractmethod
    def address(self, resolved: str) -> str | None:
        """The address that this process opens, when the primary has `resolved` its own; None: the place."""

    def open(self, resolved: str, prefix: str, nodes: Nodes, found: Survey) -> None:
        """Opens it, with a prefix of keys that no other manager of the job has."""
        self.epoch_directory = self.place.epoch_directory(self.address(resolved))
        self.prefix = prefix
        self.nodes = nodes
        self.epoch_directory.ignore([*found.aside.get(self.coordinator.process, ()), *found.diverged])

    def name_nodes(self, nodes: Nodes) -> None:
        """Gives the nodes of the job other names, before the claim."""
        self.nodes = nodes

    @abc.abstractmethod
    def look(self, calls: CollectiveCalls, known: Mapping[int, ReplaceCondition]) -> Survey:
        """On every process: what is on storage now."""

    # -- the claim -----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def claimed(self, writer: Writer, write: Callable[[Writer], None]) -> dict[str, Any]:
        """On the primary, once it has claimed its directory: the claim, for `join`, as JSON.

        `write` writes what every directory has.
        """

    @abc.abstractmethod
    def join(self, claim: Mapping[str, Any], write: Callable[[Writer], None], wait_secs: float) -> Sequence[int]:
        """On every process: takes part in the primary's claim; returns the epochs of the job."""

    # -- a save --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def commit(
        self,
        save: Save,
        staging: Staging,
        record: bytes,
        check: Callable[[], None],
        key: Callable[[str, Save], str],
    ) -> Callable[[], None] | None:
        """On the primary: commits a save that all nodes have written; `check` raises what forbids it.

        `key` gives the prefixes of a save's keys. The result is that of `Writer.publish`.
        """

    def verdict_keys(self, save: Save) -> Sequence[str]:
        """On the primary: the kinds of keys that the other processes may wait for now. The verdict goes to each."""
        del save
        return [self.first_word]

    @abc.abstractmethod
    def verdict(
        self,
        save: Save,
        save_id: str,
        hear: Callable[[str], Mapping[str, Any]],
        key: Callable[[str, Save], str],
    ) -> Mapping[str, Any]:
        """On the other processes: the primary's verdict, once this process has done its part of the commit.

        `hear` waits for what the primary says first, or last, under a kind of key.
        """

    @abc.abstractmethod
    def late_verdict(self, peek: Callable[[str], Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
        """On the other processes: the verdict of a save for which they no longer wait, if it is there by now.

        `peek` looks for what the primary has said under a kind of key.
        """

    def take_back(self, save: Save, save_id: str, failure: BaseException) -> BaseException:
        """On every process: takes what this process has of a failed save out of sight.

        Returns why the save has failed; an UncertainError if that could not be done. By default there is nothing of it.
        """
        del save, save_id
        return failure

    @abc.abstractmethod
    def here(self, epochs: Sequence[int]) -> Sequence[int]:
        """Those of some epochs that this process takes out of sight when they are deleted."""

    def unlisted_elsewhere(self, epochs: Sequence[int]) -> Sequence[int]:
        """Those of some epochs that the primary deletes, and that the other processes take out of sight, too."""
        del epochs
        return ()

    # -- deleting and going back ---------------------------------------------------------------------------------

    def agree_on_claim(self, claim: Callable[[], None]) -> None:
        """On every process, before a change: makes a `claim` of all processes first, if they have to join one."""
        del claim  # the primary claims when it makes the change

    def order(self) -> dict[str, Any]:
        """On the primary, after a change: what `follow` needs on every process, as JSON."""
        return {}

    def follow(self, order: Mapping[str, Any], act: Callable[[], None]) -> None:
        """On every process, after the primary has changed its directory: the others `act` on theirs, and all wait.

        Raises:
            CoordinationTimeoutError: a process did not say in time that it has. What the primary has done holds, and
                the next run makes that process follow.
        """
        del order, act  # the primary has done it for all

    def check_replaceable(self, epoch: int) -> None:
        """Raises UnsupportedError if a save cannot take the place of an epoch."""
        del epoch


Kind = Callable[[Place, Coordinator], JobDirectory]
"""Makes the directory of a job, which has a mirror or none."""
