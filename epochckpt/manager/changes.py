"""Changes to a directory in which no run trains: epochs are deleted, rolled back, or copied there from another one.

Guarantees:
- a run that has not closed the directory, and may be alive, is fenced off only if the caller says so;
- a change is claimed and committed as a run's own changes are: a run that begins meanwhile fences it off;
- a directory's mirror follows, as it follows a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Generator, Sequence

import orbax.checkpoint as ocp

from epochckpt import _threads
from epochckpt.directory import EpochDirectory, attached_metrics, attaching, directory_of, owners
from epochckpt.directory.epoch_directory import Writer
from epochckpt.errors import (
    DamagedError,
    EpochNotFoundError,
    FormatError,
    FormatVersionError,
    InvalidArgumentError,
    UnsupportedError,
    say,
)
from epochckpt.format import paths
from epochckpt.manager.manager import CheckpointManager
from epochckpt.manager.reader import CheckpointReader, ignore
from epochckpt.manager.readers import Readers
from epochckpt.options import StorageOptions
from epochckpt.orbax import StepNames
from epochckpt.storage import open_store
from epochckpt.tiers import EpochCopy, check_place, named_mirror, read_host_record

_THREADS = 4
_NEVER = 2**62  # of epochs after which one is mirrored


def check_changeable(epoch_directory: EpochDirectory, take_over: bool = False) -> None:
    """Raises what keeps this process from changing a directory, without a change.

    Raises:
        InvalidArgumentError: a run may be alive there, unless `take_over` allows to fence it off; or it is on a disk of
            one host, and has that host's parts of epochs only.
        AccessError: this user may not write there.
    """
    _check_whole(epoch_directory, "change")
    if (refusal := epoch_directory.write_refusal()) is not None:
        raise refusal
    if not take_over:
        owners.check_idle(epoch_directory)


def check_both_changeable(epoch_directory: EpochDirectory, mirror: str | None, take_over: bool = False) -> None:
    """The same, also for the mirror that a caller names."""
    check_changeable(epoch_directory, take_over)
    if mirror is not None:
        with contextlib.suppress(FileNotFoundError):  # it is not there yet
            check_changeable(directory_of(open_store(mirror), epoch_directory.names), take_over)


def _check_whole(epoch_directory: EpochDirectory, verb: str) -> None:
    host = read_host_record(epoch_directory.store) if epoch_directory.is_of_host() else None
    if host is not None:
        raise InvalidArgumentError(
            f"{epoch_directory.store.root} is on a disk of one host (of node {host.node}), and has only that host's "
            f"parts of epochs. To {verb} them, have all processes of the job open it with "
            "StorageOptions(local_disks=True, mirror=…), and use their manager; the mirror, "
            f"{host.mirror}, has whole epochs, which can be copied"
        )


@contextlib.contextmanager
def changing(
    directory: str | os.PathLike[str],
    options: ocp.CheckpointManagerOptions,
    mirror: str | None = None,
    *,
    take_over: bool = False,
) -> Generator[CheckpointManager]:
    """A manager that has claimed an existing directory, to delete epochs of it or to roll back; see `check_changeable`.

    The `mirror` that the caller names is changed alike; without one the directory notes what its mirror has yet to
    follow. No policy of `options` deletes anything: nothing is saved.
    """
    check_both_changeable(directory_of(open_store(directory), StepNames.of(options)), mirror, take_over)
    storage = StorageOptions()
    if mirror is not None:
        storage = StorageOptions(mirror=mirror, mirror_every=_NEVER)  # of the rest, only what close() owes it
    asked = dataclasses.replace(options, read_only=False, create=False)
    with CheckpointManager(directory, options=asked, storage=storage) as manager:
        manager.claim(take_over=take_over)
        yield manager


class DirectoryCopy:
    """Copies epochs of one directory to another, and makes the other directory if it is missing.

    Every byte is compared with its checksum on the way, as in an upload. What was attached to an epoch is copied, too.

    Attributes:
        problems: why epochs were not copied.
        present: epochs that the destination has, whole.
    """

    def __init__(
        self,
        source: EpochDirectory,
        destination: str | os.PathLike[str],
        epochs: Sequence[int],
        options: ocp.CheckpointManagerOptions,
        *,
        whole: bool = False,
        take_over: bool = False,
        mirror: str | None = None,
    ):
        """Looks whether the epochs can be copied; changes nothing. `options` have the step name format of both.

        With `whole`, what the source says of the directory as such is copied, too. Epochs that are not in the source,
        or are damaged there, are read from its `mirror`, a URL.

        Raises:
            EpochExistsError: the destination has another epoch of one of the numbers.
            InvalidArgumentError: the destination lies in the source; or see `check_changeable`.
        """
        self._source = source
        self._target = directory_of(open_store(destination), StepNames.of(options))
        self._whole = whole
        self._take_over = take_over
        _check_whole(source, "copy")
        check_place(source.store, self._target.store)
        self.problems = dict[int, str]()
        self.present = list[int]()
        self._readers = Readers(source, _threads.Pool(_THREADS), mirror=named_mirror(mirror, source))
        self.destination = self._target.store.root
        self.exists = self._target.exists()
        if self.exists:
            check_changeable(self._target, take_over)
        self._epochs = list[int]()
        for epoch in epochs:
            with self._noting(epoch):
                there = self.exists and self._copy(self._open(epoch)).is_there(False)
                (self.present if there else self._epochs).append(epoch)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs that are to be copied."""
        return tuple(self._epochs)

    def folder(self, epoch: int) -> str:
        """The name of the folder of an epoch's copy."""
        return self._target.names.build(epoch)

    def run(self, progress: Callable[[int], None] = ignore) -> None:
        """Copies them, oldest first; `progress` is called with the bytes of each piece, from any thread.

        Raises:
            UploadError, SaveError: the destination refused, or a run has begun to write there meanwhile.
            EpochExistsError: another epoch of one of the numbers came there meanwhile.
        """
        target = self._target
        if not self.exists:
            target.store.make_root()
        writer = target.claim(check=functools.partial(check_changeable, target, self._take_over))
        try:
            for epoch in sorted([*self._epochs, *self.present]):
                with self._noting(epoch):
                    reader = self._open(epoch)
                    if epoch in self._epochs:
                        self._copy(reader, progress).copy_once(writer)
                    for source, metrics in attached_metrics.of_epoch(reader.epoch_directory, reader.record).items():
                        attaching.attach(target, epoch, metrics, source)
            if self._whole:
                self._copy_metadata(writer)
                self._copy_deleted(writer)
        finally:
            _threads.logged(f"{self.destination}: the staging of a copy", writer.release)

    def _copy_metadata(self, writer: Writer) -> None:
        path = paths.join(*paths.ROOT_METADATA)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            data = self._source.store.read(path, limit_bytes=2**24)
            writer.write_once(paths.ROOT_METADATA, data)

    def _copy_deleted(self, writer: Writer) -> None:
        """The metrics of epochs that were deleted in the source, if the destination says nothing of their numbers."""
        known = {*self._target.deleted(), *self._target.scan()[0]}
        lines = [dataclasses.replace(line, number=0) for line in self._source.deleted().values()]
        if new := [line for line in lines if line.epoch not in known]:
            writer.keep_deleted(new)

    def _open(self, epoch: int) -> CheckpointReader:
        reader = self._readers.open(epoch)
        reader.copyable()  # raises if it is not
        return reader

    def _copy(self, reader: CheckpointReader, progress: Callable[[int], None] = ignore) -> EpochCopy:
        return EpochCopy(reader.copyable(), self._target, progress=progress)

    @contextlib.contextmanager
    def _noting(self, epoch: int) -> Generator[None]:
        """Notes what is wrong with an epoch of the source: the others are copied."""
        try:
            yield
        except (DamagedError, EpochNotFoundError, FormatError, FormatVersionError, UnsupportedError) as error:
            self.problems[epoch] = say(error)
