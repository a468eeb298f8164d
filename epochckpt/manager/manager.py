"""`CheckpointManager`: Orbax's interface, composed of components that lie in the modules beside this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_manager

from epochckpt import _threads, errors
from epochckpt.agreement import CollectiveCalls, coordination
from epochckpt.arrays import EpochReader, item_names, restore_items
from epochckpt.arrays.user_json import checked_json, root_metadata
from epochckpt.errors import EpochNotFoundError, InvalidArgumentError, RemovalError
from epochckpt.format import Nodes, paths
from epochckpt.manager import status
from epochckpt.manager.access import Access
from epochckpt.manager.administration import Administration
from epochckpt.manager.arguments import Arguments
from epochckpt.manager.components import Components
from epochckpt.manager.end_at_exit import EndAtExit
from epochckpt.manager.metadata_handlers import check_handler
from epochckpt.manager.notifier import HandlerNotifier
from epochckpt.manager.numbers import epoch_number
from epochckpt.manager.outcomes import Listener
from epochckpt.manager.reader import shown_path
from epochckpt.manager.readers import Readers, shared_reads
from epochckpt.manager.response import Response
from epochckpt.manager.restoring import Restores
from epochckpt.manager.saves import Decisions, Saves, SaveSettings
from epochckpt.options import StorageOptions
from epochckpt.orbax import Handlers, StepNames, step_log
from epochckpt.orbax.options import check_options, storage_options
from epochckpt.saving import History, opening, page_cache, policies
from epochckpt.tiers import layout_of

T = TypeVar("T")

errors.join_orbax()


class CheckpointManager(ocp.AbstractCheckpointManager):
    """Saves and restores epochs as `directory/<epoch>/<node>/`; a drop-in for `orbax.checkpoint.CheckpointManager`.

    Construct it, and call `save`, on every process. Saves are asynchronous: `save` returns when its arguments have been
    copied or can no longer change, and an epoch exists (`all_steps`, `latest_step`, any reader) only when every node
    has written its part.

    A failed save never harms an earlier epoch and never stops training: it is logged, and raised by
    `wait_until_finished`, `check_for_errors` or `close`.

    In a job of several processes all must call `reload`, `restore`, `restore_newest` and the methods that change the
    directory. Methods that read, replace or delete an epoch raise EpochNotFoundError if it does not exist.

    Examples:
        >>> import jax.numpy as jnp
        >>> import orbax.checkpoint as ocp
        >>> import epochckpt as ec
        >>> state = {"params": {"w": jnp.arange(3.0)}, "step": 7}
        >>> with ec.CheckpointManager("run") as manager:
        ...     saved = manager.save(0, args=ocp.args.StandardSave(state))
        >>> with ec.CheckpointManager("run") as manager:
        ...     restored = manager.restore(None, args=ocp.args.StandardRestore(state))
        ...     print(manager.latest_step(), restored["params"]["w"], restored["step"])
        0 [0. 1. 2.] 7
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        checkpointers: Any = None,
        options: ocp.CheckpointManagerOptions | None = None,
        metadata: Mapping[str, Any] | None = None,
        item_names: Sequence[str] | None = None,
        item_handlers: Any = None,
        logger: Any = None,
        handler_registry: Any = None,
        *,
        storage: StorageOptions | None = None,
        node: str | Sequence[str] | None = None,
        metadata_handler: Any = None,
    ):
        """Opens a directory. In a job of several processes all must do so; the wait for them is bounded.

        Opening writes nothing but the directory itself where it is missing, and never stops a run that trains there.
        The first save, delete or rollback claims the directory, or `claim()`; from then on an older run that saves
        there gets FencedError.

        Args:
            directory: where the epochs live: a path (relative ones and `~` are fine) or a URL (`gs://`, …).
            checkpointers: Orbax's legacy form: a Checkpointer, or several by item name, for their handlers.
            options: Orbax's options; its policies decide what is saved and kept.
            metadata: JSON for the whole directory, see `metadata()`; written once, with the first write.
            item_names: names of the items, if several are saved together with `args.Composite`.
            item_handlers: a handler for the one unnamed item, or handlers by item name. Orbax's own, unmodified, only
                select what our engine does; others are run.
            logger: an Orbax logger, which is given an entry for every commit and every `restore`; without it Orbax's
                `StandardLogger`, which writes the entries to the log at INFO.
            handler_registry: an Orbax `CheckpointHandlerRegistry`, instead of item_handlers.
            storage: how bytes get to storage, and timeouts.
            node: this process's node name, `process_<index>` by default; in a job of one process also the names of
                several nodes, all of which it then hosts.
            metadata_handler: see `epochckpt.metadata`; the primary notifies it of the nodes and of every commit.

        Raises:
            NotACheckpointDirectoryError: a file is there.
            AccessError: this user may not read it, or not create it.
            FormatVersionError: a record of the directory itself needs a newer epochckpt.
            InvalidArgumentError: options that contradict each other, or unusable or repeated names of nodes or items.
            CoordinationTimeoutError: a process did not come to open it; the error names the process.
        """
        self.metadata_handler = None if metadata_handler is None else check_handler(metadata_handler)
        self._options = check_options(options or ocp.CheckpointManagerOptions())
        self._storage = storage_options(self._options, storage)
        self._handlers = Handlers(item_handlers, handler_registry, checkpointers, item_names)
        arguments = Arguments(self._handlers, tuple(item_names or ()))

        # The directory is opened by all processes of the job together.
        group = self._options.multiprocessing_options
        coordinator = coordination.connect(self._options.read_only, group.primary_host, group.active_processes)
        layout = layout_of(self._storage, self._options)
        self._mirror = layout.mirror
        opened = opening.open_directory(
            directory=directory,
            options=self._options,
            storage=self._storage,
            node=node,
            coordinator=coordinator,
            item_names=arguments.item_names,
            kind=layout.kind,
        )
        self._mirror.learn(opened.survey.copies)
        self._coordinator = coordinator
        self.root = opened.store.root  # the directory as text: a path or URL
        self.address = opened.store.address  # what opens it again: with the settings of a bucket as its query
        self._metadata: Any = None
        root_files: dict[tuple[str, str], bytes] = {}
        if metadata is not None and (self._options.read_only or self._options.save_root_metadata):
            self._metadata = checked_json(dict(metadata), "metadata")
            root_files[paths.ROOT_METADATA] = root_metadata(metadata)  # written with the claim; a reader never claims

        # The components share these.
        self._access = Access(self.root, self._options.read_only)
        self._notifier = HandlerNotifier(metadata_handler, coordinator.primary and not self._options.read_only)
        pool = _threads.Pool(max(self._storage.io_threads, opened.store.concurrency))
        ledger = layout.ledger_file(opened.epoch_directory)

        policy = policies.save_policy(self._options)
        asynchronous = self._options.enable_async_checkpointing and self._handlers.asynchronous
        self._step_log = step_log.StepLog(
            logger=logger,
            root=self.root,
            policy=policy,
            primary=coordinator.primary,
            asynchronous=asynchronous,
        )

        # Each component uses only components above it.
        readers = Readers(
            epoch_directory=opened.epoch_directory,
            pool=pool,
            verify=self._storage.verify,
            context=restore_items.RestoreContext(
                handlers=self._handlers,
                nodes=opened.nodes,
                memory_limit_bytes=self._storage.restore_memory_limit_bytes,
            ),
            mirror=self._mirror,
            is_partial=lambda: opened.job_directory.is_partial,
        )
        history = History(
            load=readers.summary,
            alone=coordinator.processes == 1,
            mirror=self._mirror,
            held=ledger.undecided,
        )
        history.reset(opened.survey)
        saves = Saves(
            directory=opened,
            readers=readers,
            history=history,
            arguments=arguments,
            access=self._access,
            settings=SaveSettings(
                options=self._options,
                storage=self._storage,
                asynchronous=asynchronous,
                threads=pool.threads,
                root_files=root_files,
            ),
            decisions=Decisions(
                policy=policy,
                in_progress=self.is_saving_in_progress,
                reached_preemption=self.reached_preemption,
            ),
            listener=Listener(
                epoch_directory=opened.epoch_directory,
                options=self._options,
                history=history,
                notifier=self._notifier,
                log=self._step_log,
                mirror=self._mirror,
            ),
            notifier=self._notifier,
            step_log=self._step_log,
            mirror=self._mirror,
            ledger=ledger,
        )
        calls = CollectiveCalls(coordinator, opened.prefix, saves.last_name)
        administration = Administration(
            directory=opened,
            history=history,
            saves=saves,
            access=self._access,
            options=self._options,
            storage=self._storage,
            mirror=self._mirror,
            ledger=ledger,
            calls=calls,
        )
        restores = Restores(
            directory=opened,
            readers=readers,
            history=history,
            saves=saves,
            administration=administration,
            access=self._access,
            storage=self._storage,
            step_log=self._step_log,
            calls=calls,
            shared=shared_reads(coordinator, calls, self._storage, self._options.single_host_load_and_broadcast),
        )
        self.components = Components(
            directory=opened,
            readers=readers,
            history=history,
            saves=saves,
            restores=restores,
            administration=administration,
            mirror=self._mirror,
        )
        self._preemption = coordination.Preemption()
        self._ended = False
        self._tell_nodes(opened.nodes)
        if not self._options.read_only:
            _threads.drain_at_exit(self, threads=6)  # `close`, its lanes, and the waits that it bounds

    @property
    def directory(self) -> epath.Path:
        """The directory, resolved."""
        return shown_path(self.root)

    @property
    def processes(self) -> tuple[int, ...] | None:
        """JAX process indices of the processes that save together, the primary first; None if it is read only."""
        return None if self._options.read_only else self._coordinator.ids

    @property
    def node_names(self) -> tuple[str, ...]:
        """Names of all nodes of the job, in order."""
        return self.components.saves.nodes.names

    def set_nodes(self, names: Sequence[str]) -> None:
        """Names all nodes of the job, in order, before the first save: node i is process i, or one process hosts all.

        Raises:
            InvalidArgumentError: their number is not that of the processes, or this manager was opened (`node=`), or
                has saved, with other names.
        """
        saves = self.components.saves
        nodes = saves.nodes.renamed(names)
        if nodes == saves.nodes:
            return
        if saves.last_name():
            raise InvalidArgumentError(
                f"{self.root}: nodes are named before the first save; this manager has saved as "
                f"{', '.join(self.node_names)}, asked for were {', '.join(nodes.names)}"
            )
        item_names.check_names(saves.arguments.item_names, nodes.folders, ())
        self.components.readers.take_nodes(nodes)
        saves.take_nodes(nodes)
        self._tell_nodes(nodes)

    def introduce_handler(self) -> None:
        """Calls the metadata handler's `set_params` now, not at the first commit; raises its InvalidArgumentError."""
        self._notifier.introduce()

    def _tell_nodes(self, nodes: Nodes) -> None:
        """Passes the names of the nodes to the coordinator, the mirror and the metadata handler."""
        self._coordinator.name_nodes(nodes.names if nodes.processes > 1 else ())
        self._mirror.take_nodes(nodes.hosted_names)
        self._notifier.nodes(self.address, nodes.names)

    def claim(self, *, take_over: bool = True) -> None:
        """Makes this manager the writer of the directory now, instead of at its first write.

        From then on an older run can save and delete nothing: the listed epochs stay the newest until this manager
        saves. `JobRunner` calls it before it trains.

        Args:
            take_over: whether an older run that has not closed the directory, and may be alive, is fenced off; one
                whose process is known to have ended always is.

        Raises:
            FencedError: a newer run has claimed the directory since this manager did.
            AccessError: this user may not write to the directory.
            InvalidArgumentError: this manager is read only; or a run may be alive, and `take_over` is False.
        """
        self.components.administration.claim(take_over)

    @property
    def fenced_off(self) -> str:
        """How this manager learned that a newer run has taken over the directory; empty if none has."""
        fenced = self.components.saves.claim.fenced
        return "" if fenced is None else fenced.reason

    # -- which epochs there are ----------------------------------------------------------------------------------------

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """The committed epochs, ascending; with `read` storage is looked at first (see `reload`)."""
        if read:
            self.reload()
        return [info.step for info in self.components.history.committed()]

    def latest_step(self) -> int | None:
        """The greatest committed epoch that is not known to be damaged, or None. Saves in flight are not in it.

        Its records have been read, its arrays have not: `restore` may find damage there, and from then on this is an
        older epoch.
        """
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """The epoch with the best metrics by `options.best_fn` (NaN counts as worst); without it the latest."""
        return policies.best(self._options, self.components.history.committed())

    def reload(self) -> None:
        """Waits for saves in flight, and looks at storage again; `status` and `verify` do so from one process alone.

        Raises:
            CoordinationTimeoutError: the primary's answer did not come in time.
            StorageError: storage does not answer; this manager keeps its earlier view.
        """
        self.components.saves.queue.drain()
        self.components.administration.look()

    def damaged_epochs(self) -> list[int]:
        """Epochs on storage that this manager has found to be damaged; they are not in `all_steps`.

        It learns that when it looks at the records (at construction and in `reload`), and from a restore that fails.
        """
        return sorted(self.components.history.damaged)

    def foreign_folders(self) -> dict[int, str]:
        """Folders that are only named like epochs, described, by number; as of the last look. They are left alone."""
        return dict(self.components.saves.foreign)

    # What subclasses and users of Orbax's manager read behind its interface, as far as we found; see docs/orbax.md.

    @property
    def _checkpoints(self) -> Any:
        """The committed epochs as Orbax's `CheckpointInfos`, ascending: a copy."""
        infos: Any = self.components.history.committed()  # with the attributes of Orbax's
        return checkpoint_manager.checkpoint_info.CheckpointInfos(infos)

    @property
    def _default_item(self) -> Any:
        """Whether this manager handles one unnamed item, in Orbax's `OptionalRef`: a copy; None if not yet known."""
        several = self.components.saves.arguments.several
        known = None if several is None else not several
        return checkpoint_manager.threading_lib.OptionalRef(known)

    def _root_metadata_file_path(self, legacy: bool = False) -> epath.Path:
        """The file of the directory's metadata, which the first write makes; `legacy`: that of an older Orbax."""
        known = (paths.ROOT_METADATA, paths.LEGACY_ROOT_METADATA)
        store = self.components.directory.store
        if not any(store.exists(paths.join(*path)) for path in known):
            raise InvalidArgumentError(
                f"{self.root} has no metadata: those that `metadata=` gives are written with the first save or delete "
                "(in Orbax's words: Root Metadata directory is not initialized)"
            )
        return self.directory.joinpath(*known[legacy])

    @property
    def _step_name_format(self) -> Any:
        """Orbax's NameFormat of the steps."""
        return self.components.directory.epoch_directory.names.name_format

    def _get_save_directory(self, step: int, directory: epath.Path) -> epath.Path:
        """The folder of an epoch in a directory."""
        return directory / self.components.directory.epoch_directory.names.build(epoch_number(step))

    # -- saving --------------------------------------------------------------------------------------------------------

    def reached_preemption(self, step: int) -> bool:
        """Whether JAX's preemption notice has reached every process, also at an earlier step.

        All processes must call it with the same steps.
        """
        return self._preemption.reached(step)

    def should_save(self, step: int, *, ignore_later: bool = False) -> bool:
        """Whether the options ask for this epoch to be saved, after those that were requested so far.

        It is False if this epoch or a later one was requested; with `ignore_later` those do not count. It is False, and
        that is logged, if a folder that is no epoch lies in its place (see `foreign_folders`). Such a folder does not
        keep epochs of other numbers from being saved.
        """
        return self.components.saves.should_save(step, ignore_later=ignore_later)

    def save(
        self,
        step: int,
        items: Any = None,
        save_kwargs: Any = None,
        metrics: Any = None,
        force: bool | None = False,
        args: Any = None,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Saves an epoch in the background; all processes must call it alike. If it raises, no save was begun.

        It holds training for the time of the copy, and while storage is behind with older saves, for at most
        `StorageOptions.max_blocked_secs`. A save that could not begin by then has failed, on all processes: with a
        StorageBehindError, which arrives as that of any other failed save. Before a save that must not be missed, such
        as the last one, call `wait_until_finished`.

        Args:
            step: the epoch's number.
            items: Orbax's legacy form of args, for managers that were given handlers.
            save_kwargs: goes with items.
            metrics: JSON, kept with the epoch, for `options.best_fn`. Without that, what is no JSON is left out, with a
                warning.
            force: save even if `should_save` says no. An existing epoch is still an error (see `allow_overwrite`), but
                one that this manager has saved since `wait_until_finished` or `reload` was last called: that is logged.
            args: what to save: `args.StandardSave(tree)` or `args.Composite(name=…)`.
            custom_metadata: JSON, kept with the epoch.

        Returns:
            Whether the epoch is to be saved. `wait_until_finished` and `latest_step` show whether it was committed.

        Raises:
            EpochExistsError: with force, the epoch exists, or a folder that is no epoch lies in its place.
            FencedError: an earlier save, or another write, found that a newer run has taken over the directory.
            AccessError: this user may not write to the directory.
            InvalidArgumentError: something in `args` cannot be saved; names it.
            SaveError: only if saves are not asynchronous: the save was begun, and not committed.
            Exception: what a handler that is not ours raises.
        """
        saves = self.components.saves
        call = saves.call(
            step,
            items=items,
            save_kwargs=save_kwargs,
            args=args,
            metrics=metrics,
            force=bool(force),
            custom_metadata=custom_metadata,
        )
        if self._options.read_only or not (force or self.should_save(call.epoch)):
            return False
        if saves.begin(call) is None:
            return False
        if not saves.asynchronous:
            try:
                self.wait_until_finished()
            except RemovalError as failure:  # of older epochs, not of this save, which is committed
                saves.queue.note_failure(errors.kept(failure))
        return True

    def allow_overwrite(self, epoch: int) -> None:
        """Lets the next save of a committed epoch's number replace it; all processes call it alike.

        At any moment, also after a crash, either the old or the new epoch is there. On a file system that cannot
        exchange two folders, such as NFS, a crash may hide both until the next write. If another process changes the
        epoch meanwhile, the save fails. A save that fails, or that raises, has used the permission up: call this again.

        Raises:
            FencedError: a newer run has taken over the directory.
            InvalidArgumentError: stock Orbax wrote the epoch, or this manager is read only, or closed.
            UnsupportedError: the processes have local disks.
        """
        self.components.saves.allow_overwrite(epoch)

    def is_saving_in_progress(self) -> bool:
        """Whether a save of this process has not ended yet."""
        return bool(self.components.saves.queue.pending())

    def wait_until_finished(self) -> None:
        """Waits until every save is committed or has failed, and the files of deleted epochs are removed.

        Raises:
            SaveError: a save failed; each failure is raised once, several in a SaveErrorGroup.
            RemovalError: what `delete` has deleted could not be removed; or (RetentionError) an epoch that the options
                no longer keep could not be deleted, which is raised once. After a failed save this is a note there.
        """
        self.components.saves.wait()
        self.check_for_errors()

    def check_for_errors(self) -> None:
        """Raises the failures of saves and removals that have ended, each once; does not wait."""
        self.components.saves.check_for_errors()

    def pop_save_results(self) -> list[status.SaveResult]:
        """Results of this process's saves that have ended since the last call, in order; does not wait.

        The newest thousand are kept. A save that `save` itself refused is not among them.
        """
        return self.components.saves.pop_results()

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Any:
        """Restores an epoch, on any number of processes and any sharding; every byte is verified first.

        In a job of several processes all call it alike, and either all of them get the epoch or all raise. A process
        that restores by itself opens the directory with `read_only=True`. An epoch that turns out to be damaged is then
        in `damaged_epochs()`, and `latest_step()` names an older one: a loop around `restore(latest_step())` ends.

        Args:
            step: its number, or None for the newest that every process can read (agreed by vote).
            items: Orbax's legacy form of args, for managers that were given handlers.
            restore_kwargs: goes with items.
            directory: restore from another directory.
            args: `args.StandardRestore(target)` or `args.Composite(name=…)`; None: all items as they were saved.

        Returns:
            The item, or a Composite of items.

        Raises:
            MismatchError: the target does not fit; lists every leaf.
            DamagedError: bytes differ from the saved ones; without a `step`, in every epoch.
            StorageError: storage does not answer, also when asked again. No older epoch is taken instead.
        """
        restores = self.components.restores
        return restores.run(step, restores.request(items, restore_kwargs, directory, args))

    def restore_async(
        self,
        step: int | None,
        items: Any = None,
        restore_kwargs: Any = None,
        directory: str | os.PathLike[str] | None = None,
        args: Any = None,
    ) -> Response[Any]:
        """Like `restore`, in the background: returns a response, whose `result()` gives or raises what `restore` does.

        In a job of several processes the epoch, or the newest one that this process knows, is read ahead, and all call
        `result()`, which votes. If processes share their reads, nothing is read ahead: `result()` does all the work.
        """
        restores = self.components.restores
        return restores.begin(step, restores.request(items, restore_kwargs, directory, args))

    def read_ahead(self, step: int | None = None) -> None:
        """Begins to read an epoch into the page cache of this host, so that a restore finds it there.

        To be called while the program still imports modules, or compiles its step. It waits for nothing, raises nothing
        that storage causes, and is no collective call. It reads what this process needs of an epoch that as many nodes
        have saved, on local disks, and at most a quarter of the machine's memory. `StorageOptions(page_cache=False)`
        and other stores leave it out. `JobRunner.train` does it by itself. Where the targets of the restore are known
        already, `restore_async` does more.

        Args:
            step: the epoch; None: the newest one.
        """
        epoch = self.latest_step() if step is None else epoch_number(step)
        if epoch is not None:
            self.components.readers.read_ahead(epoch, page_cache.cached_bytes(self._storage))

    def restore_newest(self, restore: Callable[[int], T], among: Sequence[int] | None = None) -> tuple[int, T]:
        """Like `restore(None)`, with the caller's own function; returns the epoch, and what `restore(epoch)` returned.

        `restore` raises DamagedError or FormatError if the epoch is damaged, and EpochNotFoundError if it is gone, as
        this manager's methods do; another error ends the search on every process. `among` are the epochs that may be
        taken, ascending; None: all.

        Raises:
            EpochNotFoundError: there is no epoch.
            DamagedError: none of the epochs can be read by every process.
        """
        return self.components.restores.newest(restore, among)

    def restore_leaves(self, epoch: int, patterns: str | Sequence[str], item: str | None = None) -> dict[str, Any]:
        """Single leaves of an epoch by name, as NumPy arrays and Python values; reads only their blocks.

        `patterns` are shell patterns of leaf names, such as `params/*/kernel`. `item` may be left out if the epoch has
        one item.

        Raises:
            UnknownNameError: one of the patterns matches no leaf; names the nearest ones.

        Examples:
            >>> state = {"params": {"w": 1.5, "b": -0.5}, "step": 7}
            >>> with ec.CheckpointManager("run") as manager:
            ...     saved = manager.save(0, args=ocp.args.StandardSave(state))
            ...     manager.wait_until_finished()
            ...     manager.restore_leaves(0, "params/*")
            {'params/b': -0.5, 'params/w': 1.5}
        """
        return self.components.readers.read(epoch_number(epoch), lambda reader: reader.restore_leaves(patterns, item))

    # -- looking -------------------------------------------------------------------------------------------------------

    def status(self, epoch: int) -> status.EpochStatus:
        """The status of an epoch, from storage and from the saves of this process."""
        epoch = epoch_number(epoch)
        queue = self.components.saves.queue
        for save in queue.saving():
            if save.epoch == epoch:
                return status.EpochStatus(epoch, "saving", save.describe())
        found = self.components.readers.status(epoch)
        failure = queue.failure(epoch)
        if found.state == "absent" and failure is not None:
            state, detail = failure
            return status.EpochStatus(epoch, state, detail)
        return found

    def verify(self, epoch: int) -> status.Verification:
        """Reads every byte of a committed epoch, of all nodes, and compares it with the checksums of the save.

        With `StorageOptions.local_disks` it reads only the part of the epoch on this process's disk.

        Damage of the Orbax view is listed apart: see `view_damage`, and `epochckpt.repair_view`. Stock Orbax keeps no
        checksums: its epochs are only checked to be whole and readable; see `note`.

        Examples:
            >>> with ec.CheckpointManager("run") as manager:
            ...     saved = manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(3)}))
            ...     manager.wait_until_finished()
            ...     manager.status(0).state, manager.status(1).state, manager.verify(0).ok
            ('committed', 'absent', True)
        """
        return self.components.readers.verify(epoch_number(epoch))

    def metrics(self, step: int) -> Any:
        """The metrics that an epoch was saved with and those attached to it (`attach_metrics`), or None.

        None also where there is no such epoch, as in Orbax.
        """
        try:
            return self.components.readers.open(epoch_number(step)).metrics()
        except EpochNotFoundError:
            return None

    def save_id(self, epoch: int) -> str:
        """The id of the save that committed an epoch; it changes when the epoch is replaced or saved anew."""
        return self.components.readers.summary(epoch_number(epoch)).save_id

    def item_metadata(self, step: int) -> Any:
        """Shapes, dtypes and shardings of an epoch's items, as Orbax's metadata classes; reads no arrays.

        As in Orbax, the items of an epoch that has several include `metrics` if it has metrics, with None: that is no
        item to restore.
        """
        return self.components.readers.open(epoch_number(step)).item_metadata()

    def item_kinds(self, epoch: int) -> dict[str, str]:
        """The kind of each item of an epoch, by item name.

        `arrays`: a pytree of arrays and values; `files`: what a handler wrote; `node`: a pytree of each node's own
        (`NodeSave`). Items of stock Orbax are `arrays` or `files`.
        """
        kinds = self.components.readers.open(epoch_number(epoch)).item_kinds()
        return {name: kind.value for name, kind in kinds.items()}

    def metadata(self, step: int | None = None) -> Any:
        """Orbax's StepMetadata of an epoch, or the directory's RootMetadata: as written there, else `metadata=`."""
        if step is not None:
            return self.components.readers.open(epoch_number(step)).step_metadata()
        return status.root_metadata(self.components.readers.epoch_directory.store, self._metadata)

    def nodes(self, epoch: int) -> list[str]:
        """Names of the nodes that wrote an epoch; none if stock Orbax wrote it."""
        return [n.name for n in self.components.readers.open(epoch_number(epoch)).record.nodes]

    def node_path(self, node: str, epoch: int) -> epath.Path:
        """The folder of one node's files, in an object store only of its record and handlers' files.

        Raises InvalidArgumentError if the epoch has no such node.
        """
        return self.components.readers.open(epoch_number(epoch)).node_path(node)

    def source(self, epoch: int) -> tuple[EpochReader | None, StepNames]:
        """What a copy of an epoch needs: its reader, unless stock Orbax wrote it, and the names of steps."""
        reader = self.components.readers.open(epoch_number(epoch))
        copied = None if reader.record.stock else reader.copyable()
        return copied, self.components.directory.epoch_directory.names

    # -- deleting and going back ---------------------------------------------------------------------------------------

    def delete(self, step: int) -> None:
        """Deletes an epoch, also the newest; its files are removed in the background, see `wait_until_finished`.

        Raises:
            UnfinishedError: it is not listed any more, but its files could not be moved or removed.
        """
        step = epoch_number(step)
        if self._options.read_only:
            logging.warning("%s is read only: checkpoint %d is not deleted", self.root, step)
            return
        self.components.administration.delete(step)

    def rollback_to(self, epoch: int) -> None:
        """Quarantines all later epochs, durably, so that the next save continues from this one.

        They are kept under `rolled-back-<id>/`, which nothing cleans up.

        Raises:
            UnfinishedError: they are not listed any more, but could not be moved, and cannot be saved anew so far.

        Examples:
            >>> with ec.CheckpointManager("run") as manager:
            ...     for epoch in range(3):
            ...         saved = manager.save(epoch, args=ocp.args.StandardSave({"loss": 0.5**epoch}))
            ...     manager.wait_until_finished()
            ...     manager.rollback_to(1)
            ...     print(manager.all_steps())
            [0, 1]
        """
        self.components.administration.roll_back_to(epoch_number(epoch))

    # -- closing -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Waits for saves, removals and the metadata handler, and lets go of the directory.

        Raises:
            SaveError, RemovalError: as `wait_until_finished`; what has been raised is not raised again.
        """
        self._access.close()
        if self._ended or self._access.forked:
            return
        self.components.restores.drain()
        self._step_log.waited(self.components.saves.queue.drain_removals)
        self._notifier.drain(self._storage.save_timeout_secs)
        self._mirror.close(self._storage.save_timeout_secs)
        self._ended = True  # not before: Ctrl-C may end the wait, and the next close() waits again
        self.components.saves.release()
        coordination.forget_opening(self._coordinator, self.components.directory.prefix)
        self._handlers.close()
        self.check_for_errors()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes the manager. An error of the block itself is what is raised; a failed save becomes a note on it.

        If that waits for saves the error is logged before: JAX may end this process meanwhile, as another one has died.
        """
        if error is None or (isinstance(error, SystemExit) and not error.code):  # sys.exit(0) claims success
            self.close()
            return
        if pending := self.components.saves.queue.pending():
            logging.error(
                "%s: %s left the block of this manager. Before it is raised, close() waits up to %.0f s for the save "
                "of checkpoint %s",
                self.root,
                type(error).__name__,
                self.components.saves.queue.longest_secs,
                ", ".join(str(save.epoch) for save in pending),
                exc_info=None if isinstance(error, SystemExit) else error,
            )
        try:
            self.close()
        except Exception as failure:
            logging.error("%s: closing it failed, too: %s", self.root, errors.say(failure))
            error.add_note(f"Closing the checkpoint manager of {self.root} failed, too: {errors.say(failure)}")

    def _drain_at_exit(self) -> Callable[[], None]:
        """Begins to close; the returned call waits for the end, as long as a save may take. See `_threads`."""
        queue = self.components.saves.queue
        pending = [save.epoch for save in queue.pending()]
        timeout_secs = queue.longest_secs + self._mirror.longest_close_secs(self._storage.save_timeout_secs)
        end = EndAtExit(
            root=self.root,
            timeout_secs=timeout_secs,
            closing=_threads.start(self.close),
            pending=pending,
            committed=self.all_steps,
        )
        return end.wait

    def _after_fork(self) -> None:
        """In a forked child: this process can only read; its parent goes on with the saves."""
        saves = self.components.saves
        self._access.after_fork()
        self._coordinator = coordination.Coordinator()
        self.components.directory.job_directory.after_fork(self._coordinator)
        calls = CollectiveCalls(self._coordinator, "", saves.last_name)
        self.components.administration.connect(calls)
        self.components.restores.connect(self._coordinator, calls)
        saves.queue.after_fork()
