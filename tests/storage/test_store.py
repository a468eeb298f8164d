"""The store contract on POSIX and `memory://`, and what only POSIX promises."""

import contextlib
import errno
import mmap
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import epochckpt as ec
from epochckpt.errors import InvalidArgumentError
from epochckpt.storage import Entry, PosixStore, Store, open_store
from epochckpt.storage.mounts import file_system_of
from epochckpt.storage.posix import Handle, PosixWriter
from epochckpt.storage.store import Writer, writing
from epochckpt.testing import Faults, StoreContract, in_parallel, write_file
from tests.support import own_memory
from tests.support.files import resident_pages

OUT_OF_ROOT = "out of the root"
MIB = 2**20


def test_epochckpt_does_not_import_its_tests() -> None:
    """Nor pytest, which is no dependency."""
    code = "import sys, epochckpt; sys.exit(sorted({'pytest', 'epochckpt.testing'} & set(sys.modules)) or None)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class TestPosix(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: pathlib.Path) -> Store:
        return open_store(tmp_path)

    @pytest.fixture
    def reopened(self, tmp_path: pathlib.Path) -> Store:
        return open_store(str(tmp_path))


def test_a_file_leaves_the_page_cache_and_is_read_back(tmp_path: pathlib.Path) -> None:
    """`uncache` changes where the bytes are read from, nothing else."""
    store, data = open_store(tmp_path), os.urandom(1 << 20)
    write_file(store, "file", data)
    assert resident_pages(tmp_path / "file") == (1 << 20) // mmap.PAGESIZE
    store.uncache("file")
    if tmpfs(tmp_path):  # /var/tmp, too, may lie in memory
        pytest.skip("a tmpfs is its page cache")
    assert resident_pages(tmp_path / "file") == 0
    assert store.read("file", limit_bytes=1 << 20) == data
    with pytest.raises(FileNotFoundError):
        store.uncache("gone")


@pytest.mark.parametrize("cached", [False, True])
def test_at_most_the_newest_epoch_is_in_the_page_cache(tmp_path: pathlib.Path, cached: bool) -> None:
    """The bytes of the epoch before it leave memory, and every epoch still restores."""
    state = {"w": jnp.arange(1 << 18, dtype=jnp.float32)}
    with ec.CheckpointManager(tmp_path, storage=ec.StorageOptions(page_cache=cached)) as manager:
        for epoch in range(3):
            manager.save(epoch, args=ocp.args.StandardSave(jax.tree.map(lambda x, e=epoch: x + e, state)))
            manager.wait_until_finished()
        files = [tmp_path / str(e) / "process_0" / "default.safetensors" for e in range(3)]
        if tmpfs(tmp_path):
            pytest.skip("a tmpfs is its page cache")
        whole = (1 << 20) // mmap.PAGESIZE
        pages = [resident_pages(f) for f in files]
        assert pages[:2] == [0, 0]
        assert pages[2] >= whole if cached else pages[2] <= 1
        for epoch in range(3):
            restored = manager.restore(epoch, args=ocp.args.StandardRestore(state))
            np.testing.assert_array_equal(restored["w"], state["w"] + epoch)


def test_an_epoch_gives_way_in_the_page_cache_while_the_next_one_is_written(
    tmp_path: pathlib.Path, faults: Faults
) -> None:
    """Piece by piece, also the epoch of an earlier run. One whose successor fails before it is written stays."""
    if tmpfs(tmp_path):
        pytest.skip("a tmpfs is its page cache")
    state = {"w": jnp.arange(6 << 20, dtype=jnp.float32)}
    whole = (24 << 20) // mmap.PAGESIZE
    first = tmp_path / "0" / "process_0" / "default.safetensors"
    seen = list[int]()
    with ec.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        with faults.fail(Store.open_writer, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))):
            manager.save(1, args=ocp.args.StandardSave(state))
            with pytest.raises(ec.errors.SaveError):
                manager.wait_until_finished()
        assert resident_pages(first) >= whole
        faults.before(Writer.finish, lambda call: seen.append(resident_pages(first)))
        manager.save(2, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    assert len(seen) > 0
    assert seen[0] < whole / 8  # but for large pages across the borders of pieces
    second = tmp_path / "2" / "process_0" / "default.safetensors"
    assert [resident_pages(first), resident_pages(second) >= whole] == [0, True]
    with ec.CheckpointManager(tmp_path) as manager:  # a restart
        manager.save(3, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    assert resident_pages(second) == 0


def tmpfs(path: pathlib.Path) -> bool:
    """Whether the folder lies in memory."""
    command = ["stat", "--file-system", "--format=%T", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() in ("tmpfs", "ramfs")


class TestMemory(StoreContract):
    @pytest.fixture
    def url(self) -> str:
        return f"memory://{uuid.uuid4().hex}"

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)

    @pytest.fixture
    def reopened(self, url: str) -> Store:
        return open_store(url)


@pytest.fixture
def posix(tmp_path: pathlib.Path) -> Store:
    root = tmp_path / "root"
    root.mkdir()
    return open_store(root)


def test_a_directory_is_opened_by_its_form(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """URLs are object stores, anything else becomes an absolute POSIX path; nothing is created."""
    monkeypatch.chdir(tmp_path)
    here = open_store("runs/one")
    assert (here.root, here.local_path, here.atomic_folder_rename) == (str(tmp_path / "runs/one"), here.root, True)
    assert (here.symlinks, here.sequential_writes, here.preferred_part_bytes) == (True, False, None)
    monkeypatch.chdir("/")
    assert not here.exists("")
    assert open_store(f"file://{tmp_path}/a%20b%FF/").root == str(tmp_path / "a b\udcff")
    there = open_store("memory://name/")
    assert (there.root, there.local_path, there.atomic_folder_rename) == ("memory://name", None, False)
    assert (there.symlinks, there.sequential_writes, there.preferred_part_bytes) == (False, True, 64 << 20)
    assert not (tmp_path / "runs").exists()


def test_a_url_that_cannot_be_opened_is_refused() -> None:
    """An unknown scheme, a URL whose slash pathlib has removed, and `file://` with a host or a NUL."""
    with pytest.raises(InvalidArgumentError, match="bogus"):
        open_store("bogus://bucket/run")
    with pytest.raises(InvalidArgumentError, match="removed a slash"):
        open_store(pathlib.Path("s3://bucket/run"))
    for url in ("file://localhost/x", "file://x"):
        with pytest.raises(InvalidArgumentError, match=r"expected .* or file:///path"):
            open_store(url)
    with pytest.raises(InvalidArgumentError, match="must be a path or URL"):
        open_store("file:///a%00b")


def test_no_calls_in_parallel_have_no_results() -> None:
    """As `StoreContract`'s users may compute the calls."""
    assert in_parallel([]) == []


def test_a_file_in_memory_is_invisible_until_finished() -> None:
    """On an object store a writer shows nothing before `finish`, and the first to finish wins."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    first, second = store.open_writer("data", 1), store.open_writer("data", 1)
    first.write(0, b"1")
    second.write(0, b"2")
    assert not store.exists("data")
    second.finish()
    with pytest.raises(FileExistsError):
        first.finish()
    assert store.read("data", limit_bytes=1) == b"2"


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the size of this process")
def test_a_small_file_takes_little_memory() -> None:
    """`memory://` keeps what it is given: that is as large as the file, and not as large as a chunk of an upload."""
    store = open_store(f"memory://{uuid.uuid4().hex}")
    before = own_memory.nbytes("VmSize")
    for number in range(100):
        write_file(store, f"file{number}", b"small")
    assert own_memory.nbytes("VmSize") - before < 100 * MIB


def test_a_symlink_out_of_the_root_is_refused(posix: Store, tmp_path: pathlib.Path) -> None:
    """Through a linked file, a linked folder, or a chain: neither read nor written, nor listed."""
    outside = tmp_path / "root-outside"  # shares the root's name as a prefix
    outside.mkdir()
    (outside / "secret").write_bytes(b"x")
    root = pathlib.Path(posix.root)
    (root / "file").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "chain").symlink_to("folder")
    for path in ("file", "folder/secret", "chain/secret"):
        for call in (posix.open_reader, posix.exists, posix.size):
            with pytest.raises(PermissionError, match=OUT_OF_ROOT):
                call(path)
    with pytest.raises(PermissionError, match=OUT_OF_ROOT):
        posix.list("folder")
    for write in (posix.make_folder, posix.remove, posix.remove_tree, lambda p: posix.create(p, b"")):
        with pytest.raises(PermissionError, match=OUT_OF_ROOT):
            write("folder/new")
    assert os.listdir(outside) == ["secret"]


def test_a_symlink_inside_the_root_is_read(tmp_path: pathlib.Path) -> None:
    """As the Orbax view has them; a root that is itself reached through a symlink is fine."""
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to("real")
    store = open_store(tmp_path / "root")
    store.make_folder("node")
    store.create("node/data", b"x")
    (tmp_path / "real" / "link").symlink_to("node/data")
    (tmp_path / "real" / "folder").symlink_to("node")
    assert store.read("link", limit_bytes=1) == store.read("folder/data", limit_bytes=1) == b"x"
    listed = [Entry("folder", False), Entry("link", False), Entry("node", True)]
    assert store.list("") == listed


@pytest.mark.parametrize("kind", ["posix", "memory"])
def test_many_names_are_looked_for_at_once(tmp_path: pathlib.Path, kind: str) -> None:
    """Files, folders and what links lead to exist, one that leads nowhere does not; in no directory nothing does."""
    store = open_store(tmp_path / "root" if kind == "posix" else f"memory://{uuid.uuid4().hex}/")
    assert store.existing(["a", "folder/b"]) == set()
    store.make_root()
    store.make_folder("folder")
    for name in ("a", "folder/b"):
        store.create(name, b"x")
    found = {"a", "folder", "folder/b"}
    if kind == "posix":
        (tmp_path / "root" / "good").symlink_to("folder/b")
        (tmp_path / "root" / "bad").symlink_to("nowhere")
        (tmp_path / "root" / "round").symlink_to("round")
        found |= {"good", "round"}
    asked = {*found, "bad", "a/b", "folder/c", "other/b"}
    assert store.existing(asked) == found == {name for name in asked if store.exists(name)}
    with pytest.raises(ValueError, match="malformed path"):
        store.existing(["a", "../a"])


def test_a_write_does_not_go_through_a_symlink(posix: Store) -> None:
    """A dangling link takes a name like any file does."""
    (pathlib.Path(posix.root) / "link").symlink_to("elsewhere")
    with pytest.raises(FileExistsError):
        posix.create("link", b"x")
    assert not posix.exists("elsewhere")


def test_only_regular_files_are_opened(posix: Store) -> None:
    """A pipe does not make the reader wait, a folder is no file."""
    os.mkfifo(os.path.join(posix.root, "pipe"))
    posix.make_folder("folder")
    with pytest.raises(OSError, match=r"not a regular file.*pipe"):
        posix.open_reader("pipe")
    with pytest.raises(IsADirectoryError, match="folder"):
        posix.size("folder")


def test_remove_tree_does_not_follow_symlinks(posix: Store, tmp_path: pathlib.Path) -> None:
    """Links are removed, what they point at stays; so for a link in place of the tree."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    root = pathlib.Path(posix.root)
    posix.make_folder("12")
    (root / "12" / "folder").symlink_to(outside)
    (root / "12" / "file").symlink_to(outside / "kept")
    (root / "13").symlink_to(outside)
    posix.remove_tree("12")
    posix.remove_tree("13")
    assert os.listdir(root) == []
    assert os.listdir(outside) == ["kept"]


def test_remove_tree_leaves_what_gets_the_name_afterwards(posix: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run may commit an epoch of that name at once; and each folder below may get a late file."""
    root, rmdir, late = pathlib.Path(posix.root), os.rmdir, set[str]()
    for node in range(20):
        (root / "7" / f"node{node}").mkdir(parents=True)

    def disturbed(path: str, *, dir_fd: int | None = None) -> None:
        if str(path).startswith("node") and path not in late:
            late.add(path)
            os.close(os.open(f"{path}/late", os.O_CREAT | os.O_WRONLY, dir_fd=dir_fd))
        rmdir(path, dir_fd=dir_fd)
        if path == "7":
            (root / "7").mkdir()
            (root / "7" / "epoch.json").write_bytes(b"{}")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", disturbed)
        posix.remove_tree("7")
    assert len(late) == 20
    assert os.listdir(root / "7") == ["epoch.json"]


def test_a_rename_onto_an_existing_name_is_refused(posix: Store) -> None:
    """Full folder, empty folder, file: both sides stay as they were. `replace` is for files only."""
    for folder in ("staging", "full", "empty"):
        posix.make_folder(folder)
    for path in ("staging/new", "full/old", "file", "other"):
        posix.create(path, path.encode())
    for src, dst in (("staging", "full"), ("staging", "empty"), ("staging", "file"), ("other", "file")):
        with pytest.raises(FileExistsError) as caught:
            posix.rename(src, dst)
        assert caught.value.filename == os.path.join(posix.root, src)
        assert caught.value.filename2 == os.path.join(posix.root, dst)
    with pytest.raises(FileExistsError):
        posix.rename("staging", "full", replace=True)
    assert posix.read("full/old", limit_bytes=99) == b"full/old"
    assert posix.read("staging/new", limit_bytes=99) == b"staging/new"
    posix.rename("other", "file", replace=True)
    assert posix.read("file", limit_bytes=99) == b"other"
    assert not posix.exists("other")


def test_a_rename_is_refused_where_the_system_has_no_flag_for_it(posix: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same promises without renameat2, as on NFS and outside of Linux."""
    monkeypatch.setattr("epochckpt.storage.posix._renameat2", None)
    test_a_rename_onto_an_existing_name_is_refused(posix)
    posix.rename("staging", "moved")
    posix.rename("file", "moved/file")
    assert [entry.name for entry in posix.list("moved")] == ["file", "new"]


def test_one_of_many_concurrent_renames_wins(posix: Store) -> None:
    """Eight staging folders renamed onto one epoch: it is created once, the losers keep their folders."""
    for i in range(8):
        posix.make_folder(f"staging{i}")
        posix.create(f"staging{i}/epoch.json", b"%d" % i)
    results = in_parallel([lambda i=i: posix.rename(f"staging{i}", "12") for i in range(8)])
    winners = [i for i, result in enumerate(results) if result is None]
    assert len(winners) == 1
    assert all(isinstance(result, FileExistsError) for result in results if result is not None)
    assert posix.read("12/epoch.json", limit_bytes=1) == b"%d" % winners[0]
    assert len(posix.list("")) == 8


def test_nothing_is_made_below_a_folder_that_is_gone(posix: Store) -> None:
    """Fencing: after a newer run has moved the staging folder away, an older one can resurrect nothing."""
    posix.make_folder("incarnation")
    posix.make_folder("incarnation/12")
    posix.rename("incarnation", "swept")
    calls = [
        lambda: posix.make_folder("incarnation/12/process_0"),
        lambda: posix.make_folder("incarnation/13"),
        lambda: posix.create("incarnation/12/node.json", b""),
        lambda: posix.open_writer("incarnation/12/data", 1),
        lambda: posix.rename("incarnation/12", "12"),
        lambda: posix.sync_folder("incarnation/12"),
        lambda: posix.list("incarnation"),
    ]
    for call in calls:
        with pytest.raises(FileNotFoundError, match="incarnation"):
            call()
    assert posix.list("") == [Entry("swept", True)]


def test_make_folder_is_exclusive(posix: Store) -> None:
    """Of eight threads that make one folder, one succeeds."""
    results = in_parallel([lambda: posix.make_folder("incarnation")] * 8)
    assert sorted(isinstance(result, FileExistsError) for result in results) == [False] + [True] * 7


def test_the_root_is_made_with_its_parents(tmp_path: pathlib.Path) -> None:
    """Once or many times; the mode is the root's and that of folders in it; a file in the way is refused."""
    store = open_store(tmp_path / "a" / "b" / "root", folder_mode=0o2770)
    with pytest.raises(FileNotFoundError):
        store.list("")
    assert in_parallel([lambda: store.make_root()] * 4) == [None] * 4
    assert store.list("") == []
    store.make_folder("below")
    assert os.stat(f"{store.root}/below").st_mode & 0o7777 == 0o2770
    assert os.stat(store.root).st_mode & 0o7777 == 0o2770
    assert os.stat(os.path.dirname(store.root)).st_mode & 0o7777 != 0o2770
    open_store(store.root, folder_mode=0o700).make_root()
    assert os.stat(store.root).st_mode & 0o7777 == 0o2770
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        open_store(tmp_path / "file" / "root").make_root()


def test_closing_waits_for_the_last_use() -> None:
    """A descriptor that is closed under a running write could mean another file by the next one."""
    read_end, write_end = os.pipe()
    handle = Handle(write_end, "pipe")
    with handle.use() as fd:
        handle.close()
        os.write(fd, b"x")  # still open
        with pytest.raises(ValueError, match="closed"), handle.use():
            pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_end)
    handle.close()
    assert os.read(read_end, 2) == b"x"
    os.close(read_end)


def test_finish_refuses_while_a_write_runs(posix: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush beside a running write would promise bytes that are not there yet."""
    writer, pwrite, tried = posix.open_writer("data", 1), os.pwrite, []

    def finishing(fd: int, data: bytes, offset: int) -> int:
        done = pwrite(fd, data, offset)
        with pytest.raises(ValueError, match="0 of 1 bytes written; not finished"):
            writer.finish()
        tried.append(done)
        return done

    monkeypatch.setattr(os, "pwrite", finishing)
    writer.write(0, b"x")
    assert tried == [1]
    with pytest.raises(ValueError, match="closed"):
        writer.finish()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the kernel's call fail")
@pytest.mark.parametrize(("code", "fails"), [("EIO", True), ("ENOSPC", True), ("ENOSYS", False)])
def test_a_failed_early_write_back_fails_the_write(posix: Store, code: str, fails: bool) -> None:
    """The kernel's answer is not thrown away, unless it only says that it has no such call."""
    program = (
        "import errno, sys\n"
        "from epochckpt.storage.posix import WRITE_BACK_BYTES\n"
        "from epochckpt.storage import open_store\n"
        "writer = open_store(sys.argv[1]).open_writer('data', WRITE_BACK_BYTES)\n"
        "try:\n"
        "    writer.write(0, bytes(WRITE_BACK_BYTES))\n"
        "except OSError as error:\n"
        "    assert error.filename.endswith('/data')\n"
        "    print(errno.errorcode[error.errno])\n"
    )
    inject = f"sync_file_range:error={code}"
    command = [
        "strace",
        "-f",
        "-qq",
        "--seccomp-bpf",
        "-o",
        os.devnull,
        "-e",
        "trace=sync_file_range",
        "-e",
        f"inject={inject}",
    ]
    command += [sys.executable, "-c", program, posix.root]
    done = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == ([code] if fails else [])


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace makes the kernel's call fail")
@pytest.mark.parametrize("refused", [False, True])
def test_what_cannot_go_past_the_page_cache_goes_through_it(posix: Store, refused: bool) -> None:
    """Aligned pages go to the disk, the rest of a piece and of the file goes the usual way, and so does all of it
    where the file system refuses direct I/O only when it is asked to write."""
    program = (
        "import mmap, os, sys\n"
        "from epochckpt.storage import open_store\n"
        "memory = mmap.mmap(-1, 3 << 20)\n"
        "memory[:] = data = os.urandom(len(memory))\n"
        "store, cut = open_store(sys.argv[1]), (1 << 20) + 4096\n"
        "writer, view = store.open_writer('data', (3 << 20) - 5), memoryview(memory)\n"
        "writer.write(cut, view[cut:-5])\n"
        "writer.write(0, view[:cut])\n"
        "writer.finish()\n"
        "assert store.read('data', limit_bytes=len(data)) == data[:-5]\n"
    )
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", "trace=pwrite64", "-e", "signal=none"]
    command += ["-e", "inject=pwrite64:error=EINVAL:when=1"] if refused else []
    command += [sys.executable, "-c", program, posix.root]
    done = subprocess.run(command, check=True, timeout=60, stderr=subprocess.PIPE, text=True)
    sizes = [int(call.rpartition("= ")[2].split()[0]) for call in done.stderr.splitlines() if "pwrite64(" in call]
    cut, size = (1 << 20) + 4096, (3 << 20) - 5
    end = size // 4096 * 4096
    assert sizes == ([-1, size - cut, cut] if refused else [end - cut, size - end, cut])


@pytest.mark.skipif(not os.path.exists("/proc/self/oom_score_adj"), reason="a file that refuses writes with EINVAL")
def test_one_thread_finds_that_direct_writes_are_refused_while_another_begins_one(posix: Store) -> None:
    """Both write through the page cache then: neither finds a closed descriptor."""
    other = threading.Thread(target=lambda: writer.write(1 << 20, memoryview(memory)))
    reached, go = threading.Event(), threading.Event()

    class Refusing(Handle):
        def use(self) -> contextlib.AbstractContextManager[int]:
            if threading.current_thread() is other:
                reached.set()
                assert go.wait(60)
            return super().use()

    memory = mmap.mmap(-1, 1 << 20)
    memory[:] = b"x" * len(memory)  # no number
    writer = PosixWriter(os.open(f"{posix.root}/data", os.O_WRONLY | os.O_CREAT), "data", 2 << 20, direct=False)
    writer._direct = Refusing(os.open("/proc/self/oom_score_adj", os.O_WRONLY), "data")
    other.start()
    assert reached.wait(60)
    writer.write(0, memoryview(memory))
    go.set()
    other.join()
    writer.finish()
    assert posix.read("data", limit_bytes=2 << 20) == 2 * memory[:]


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[int]:
    """A full disk after 1 MiB below a folder: a small tmpfs where we may mount, else a file size limit.

    Yields:
        The errno to expect.
    """
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], stderr=subprocess.DEVNULL, check=False
    )
    if not mounted.returncode:
        try:
            yield errno.ENOSPC
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    with file_size_limit(1 << 20):
        yield errno.EFBIG


def test_a_full_disk_is_an_os_error(posix: Store) -> None:
    """The error has its errno and path, from a writer and from `create`, which leaves no half file."""
    data = bytes(2 << 20)
    with small_disk(pathlib.Path(posix.root)) as expected:
        with pytest.raises(OSError, match="data") as caught, writing(posix, "data", len(data)) as writer:
            writer.write(0, data)
        assert caught.value.errno == expected
        assert caught.value.filename == os.path.join(posix.root, "data")
        posix.remove("data")
        with pytest.raises(OSError, match="record") as caught:
            posix.create("record", data)
        assert caught.value.errno == expected
        assert posix.list("") == []
        posix.create("small", b"x")  # the disk has room again


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_large_file_finds_its_room_before_the_first_write(tmp_path: pathlib.Path) -> None:
    """On file systems that reserve it quickly; where there is none, no file is left."""
    if not file_system_of(str(tmp_path)).reserves_quickly:
        pytest.skip("this file system reserves no room")
    store = open_store(tmp_path)
    writer = store.open_writer("data", 2 << 20)
    assert (tmp_path / "data").stat().st_blocks * 512 >= 2 << 20
    writer.abort()
    with file_size_limit(1 << 20), pytest.raises(OSError, match="large") as caught:
        store.open_writer("large", 2 << 20)
    assert caught.value.errno == errno.EFBIG
    assert caught.value.filename == str(tmp_path / "large")
    assert [entry.name for entry in store.list("")] == ["data"]


def test_a_failed_flush_is_raised_and_ends_the_writer() -> None:
    """After a failed fsync (a pipe has none) nothing is left to retry: a second one might succeed."""
    read_end, write_end = os.pipe()
    writer = PosixWriter(write_end, "the pipe", 0)
    with pytest.raises(OSError, match="the pipe") as caught:
        writer.finish()
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_end)
    with pytest.raises(ValueError, match="closed"):
        writer.finish()
    os.close(read_end)


def test_a_large_transfer_goes_in_several_calls(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None moves more than it may; short writes and reads are continued where they stopped."""
    pwrite, preadv, sizes = os.pwrite, os.preadv, list[int]()

    def written(fd: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(fd, data[:700], offset)

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return preadv(fd, [buffers[0][:700]], offset)

    monkeypatch.setattr(os, "pwrite", written)
    monkeypatch.setattr(os, "preadv", read)
    store = PosixStore(tmp_path, call_bytes=1000)
    data = bytes(range(256)) * 50
    write_file(store, "data", data)
    assert store.read("data", limit_bytes=len(data)) == data
    assert max(sizes) == 1000
    assert len(sizes) >= 2 * len(data) // 700
    with store.open_reader("data") as reader:
        parts = [memoryview(bytearray(nbytes)) for nbytes in (1500, 0, 1, 250, 749, 3000)]
        reader.read_parts(100, parts)
        assert b"".join(parts) == data[100:5600]
        with pytest.raises(EOFError, match=f"the file ends at {len(data)}"):
            reader.read_parts(len(data) - 400, parts)
    assert max(sizes) == 1000


def test_more_parts_than_one_call_takes_are_read(tmp_path: pathlib.Path) -> None:
    """The system refuses more than 1,024 buffers."""
    store = PosixStore(tmp_path)
    data = bytes(range(256)) * 50
    write_file(store, "data", data)
    with store.open_reader("data") as reader:
        parts = [memoryview(bytearray(5)) for _ in range(2500)]
        reader.read_parts(7, parts)
    assert b"".join(parts) == data[7 : 7 + 12500]
