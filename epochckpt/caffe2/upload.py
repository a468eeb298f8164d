"""How `CopyUpload` copies the epochs of Caffe2's managers: each node's by itself."""

from collections.abc import Callable

from epochckpt import _progress
from epochckpt.caffe2.epochs import NodeEpochs
from epochckpt.caffe2.managers import Manager
from epochckpt.directory import node_directory_of
from epochckpt.errors import UnsupportedError
from epochckpt.jobs import CopyUpload, Workspace
from epochckpt.jobs.upload import uploading
from epochckpt.storage import open_store
from epochckpt.tiers import EpochCopy, check_place


def node_upload(manager: Manager, epoch: int, requested: CopyUpload) -> Callable[[Workspace], None]:
    """A task that copies an epoch, for each node of its workspace."""
    source = open_store(manager.db_prefix)
    target = open_store(requested.address)
    if not (source.atomic_folder_rename and target.atomic_folder_rename):
        problem = "epochs of single nodes can be copied from a file system only to a directory of one"
        raise UnsupportedError(f"{source.root}: {problem}; the destination is {target.root}")
    check_place(source, target)

    @uploading(epoch, target.root)
    def upload(workspace: Workspace) -> None:
        for node in (each.node_name for each in manager.managers([workspace.node]).values()):
            reader = NodeEpochs(manager.db_prefix, node).reader(epoch).copyable()
            target.make_root()
            with _progress.work(f"uploading checkpoint {epoch}") as work:
                copy = EpochCopy(reader, node_directory_of(target, node), progress=work.advance)
                commit = copy.begin(requested.replace)
                if commit is not None:
                    with commit.giving_up():
                        commit.publish()
                        commit.leave()

    return upload
