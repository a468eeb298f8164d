"""The local folder that an export makes: it appears whole, or not at all.

It is written under another name beside its own, made durable, and renamed.
"""

import contextlib
import os
import pathlib
import stat
from collections.abc import Generator, Sequence

from epochckpt import _threads
from epochckpt.errors import InvalidArgumentError
from epochckpt.format import paths
from epochckpt.storage import Store, expanded, open_store, path_text, plain


def checked(destination: str | os.PathLike[str], store: Store) -> str:
    """The destination, resolved; InvalidArgumentError unless it is missing or an empty folder outside of the store."""
    path = path_text(destination, "destination")
    if "://" in path:
        raise InvalidArgumentError(f"destination {plain(path)!r} is a URL; export to a local folder, and upload that")
    path = os.path.realpath(expanded(path))
    if open_store(path).lies_in(store):
        root = os.path.realpath(store.root)
        raise InvalidArgumentError(
            f"destination {path} lies in the checkpoint directory {root}, where only epochs belong; "
            "choose a folder outside"
        )
    if os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):  # the current directory is gone
            if os.path.samefile(path, os.curdir):
                raise InvalidArgumentError(
                    f"destination {path} is the current working directory, which an export would replace; "
                    "name a folder in it, or go elsewhere"
                )
        if os.listdir(path) or os.path.ismount(path):
            raise InvalidArgumentError(f"destination {path} is not empty; choose another folder")
    elif os.path.lexists(path):
        raise InvalidArgumentError(f"destination {path} is a file; expected a folder that is missing or empty")
    return path


@contextlib.contextmanager
def staged(place: str) -> Generator[str]:
    """A folder beside `place`, under a temporary name; the block fills it durably, and then it becomes `place`.

    After an error nothing is left, neither this folder nor the parents that were made for it.
    """
    parent, name = os.path.split(place)
    above = open_store(parent)
    staging = f"{paths.EXPORT_PREFIX}{paths.new_id()}{paths.TMP_SUFFIX}"
    folder = os.path.join(parent, staging)
    missing = [str(p) for p in pathlib.Path(place).parents if not os.path.lexists(p)]  # innermost first
    with contextlib.ExitStack() as undo:
        undo.callback(_remove_empty, missing)
        above.make_root()
        undo.callback(_threads.logged, f"{folder} stays", lambda: above.remove_tree(staging))
        above.make_folder(staging)
        if os.path.isdir(place):  # the new folder is, from the beginning, as open to others as the one it replaces
            status = os.stat(place)
            with contextlib.suppress(PermissionError):
                os.chown(folder, -1, status.st_gid)
            os.chmod(folder, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        yield folder
        try:
            above.rename(staging, name, replace=True)  # of folders only an empty one
        except (FileExistsError, NotADirectoryError) as error:
            problem = f"destination {place} was filled by another program meanwhile: {error}"
            raise InvalidArgumentError(problem) from error
        above.sync_folder("")
        undo.pop_all()


def _remove_empty(folders: Sequence[str]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # it was never made, or another program uses it already
            os.rmdir(folder)
