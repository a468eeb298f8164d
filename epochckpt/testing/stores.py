"""What every store promises, as tests in a class to inherit from."""

import contextlib
import io
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from epochckpt.storage import Entry, Store

_MALFORMED = ["/a", "a/", "a//b", ".", "a/./b", "..", "a/../b", "a\0b"]


def in_parallel(calls: Sequence[Callable[[], object]]) -> list[object]:
    """Runs all calls at the same time, each in a thread of its own; returns their results or exceptions, in order."""
    start = threading.Barrier(max(1, len(calls)))

    def run(call: Callable[[], object]) -> object:
        start.wait(30)
        try:
            return call()
        except Exception as error:
            return error

    pool = ThreadPoolExecutor(start.parties)
    try:
        return list(pool.map(run, calls, timeout=60))
    finally:
        pool.shutdown(wait=False)


def write_file(store: Store, path: str, data: bytes) -> None:
    """Creates a file with a `Writer`, in one piece; durable on return."""
    writer = store.open_writer(path, len(data))
    writer.write(0, data)
    writer.finish()


class StoreContract:
    """What every store promises. A subclass defines two fixtures, and pytest runs these tests on its store.

    Fixtures:
        store: a new, empty store, a different one for each test.
        reopened: a second `Store` object on the same directory as `store`.

    The tests call every abstract method of `Store`. Where stores may differ, the tests ask the store's attributes, such
    as `Store.atomic_folder_rename`. What a crash or a full disk leaves behind is not tested here.
    """

    def test_created_content_is_read_back(self, store: Store) -> None:
        """`create` stores any bytes, also none at all and NULs."""
        for name, data in (("full", b"a\0b\xff" * 100), ("empty", b"")):
            store.create(name, data)
            assert store.read(name, limit_bytes=1000) == data
            assert store.size(name) == len(data)
            assert store.exists(name)

    def test_create_never_replaces(self, store: Store) -> None:
        """Of eight threads that create one name, one succeeds, and its content stays; a later one is refused, too."""
        for name in ("claim0", "claim1", "claim2", "claim3", "claim4"):
            results = in_parallel([lambda i=i, n=name: store.create(n, b"%d" % i) for i in range(8)])
            winners = [i for i, result in enumerate(results) if result is None]
            assert len(winners) == 1, results
            assert all(isinstance(r, FileExistsError) for r in results if r is not None), results
            with pytest.raises(FileExistsError, match=name):
                store.create(name, b"late")
            assert store.read(name, limit_bytes=100) == b"%d" % winners[0]

    def test_put_creates_and_replaces_only_where_asked(self, store: Store) -> None:
        """`put` leaves the content and no draft; an existing file stays unless `replace` is given."""
        store.make_folder("a")
        store.put("a/record", b"first", draft="draft1")
        with pytest.raises(FileExistsError, match="record"):
            store.put("a/record", b"second", draft="draft2")
        assert store.read("a/record", limit_bytes=100) == b"first"
        store.put("a/record", b"third", draft="draft3", replace=True)
        store.put("a/other", b"new", draft="draft4", replace=True)
        assert store.read("a/record", limit_bytes=100) == b"third"
        assert store.list("a") == [Entry("other", False), Entry("record", False)]
        assert store.list("") == [Entry("a", True)]

    def test_concurrent_puts_leave_one_whole_content(self, store: Store) -> None:
        """Of eight threads that replace one file, none fails, and one content is there in full."""
        contents = [b"%d" % i * (1000 + i) for i in range(8)]
        calls = [lambda i=i, c=c: store.put("f", c, draft=f"d{i}", replace=True) for i, c in enumerate(contents)]
        assert in_parallel(calls) == [None] * 8
        assert store.read("f", limit_bytes=10_000) in contents

    def test_a_missing_file_is_file_not_found(self, store: Store) -> None:
        """The errors of `read`, `size` and `open_reader` name the missing file."""
        assert not store.exists("gone")
        for call in (lambda name: store.read(name, limit_bytes=10), store.size, store.open_reader):
            with pytest.raises(FileNotFoundError, match="gone"):
                call("gone")

    def test_a_read_over_the_limit_is_refused(self, store: Store) -> None:
        """The error names path, size and limit. A file of exactly the limit is read."""
        store.create("record", b"x" * 11)
        assert len(store.read("record", limit_bytes=11)) == 11
        with pytest.raises(ValueError, match=r"record has 11 bytes; expected at most 10\b"):
            store.read("record", limit_bytes=10)

    def test_files_are_found_by_the_beginning_of_their_names(self, store: Store) -> None:
        """`find` looks in one folder, or in each folder of the root; never deeper, and it finds files only."""
        for folder in ("a", "b", "b/_m-deep"):
            store.make_folder(folder)
        for path in ("a/_m-1.json", "a/_m-2.json", "a/other", "b/_m-1.json", "b/_m", "b/_m-deep/_m-x", "_m-root"):
            store.create(path, b"{}")
        assert store.find("_m-", "a") == ["a/_m-1.json", "a/_m-2.json"]
        assert store.find("_m-", "b") == ["b/_m-1.json"]
        assert store.find("_m-", "gone") == []
        assert store.find("_m-") == ["a/_m-1.json", "a/_m-2.json", "b/_m-1.json"]
        assert store.find("_m-", "") == ["_m-root"]

    def test_parallel_pieces_make_the_right_file(self, store: Store) -> None:
        """Four threads that write interleaved pieces by position give the same file as one."""
        data = bytes(range(256)) * (5 << 12)  # 5 MiB
        piece = 300_001
        store.make_folder("node")
        writer = store.open_writer("node/data", len(data))
        view = memoryview(data)

        def write(thread: int) -> None:
            for start in range(thread * piece, len(data), 4 * piece):
                writer.write(start, view[start : start + piece])

        assert in_parallel([lambda t=t: write(t) for t in range(4)]) == [None] * 4
        writer.finish()
        assert store.size("node/data") == len(data)
        assert store.read("node/data", limit_bytes=len(data)) == data

    def test_parallel_ranges_are_read_by_position(self, store: Store) -> None:
        """Threads share a reader, and each fills its part of a buffer, whatever the format of the buffer."""
        data = bytes(range(256)) * 4096  # 1 MiB
        write_file(store, "data", data)
        buffer = bytearray(len(data))
        quarter = len(data) // 4
        with store.open_reader("data") as reader:
            assert reader.size == len(data)
            parts = [memoryview(buffer)[i * quarter : (i + 1) * quarter].cast("I") for i in range(4)]
            calls = [lambda i=i: reader.read_into(i * quarter, parts[i]) for i in range(4)]
            assert in_parallel(calls) == [None] * 4
            reader.read_into(len(data) + 1, memoryview(b"").cast("B"))  # nothing, beyond the end
            assert b"".join(reader.pieces()) == data
        assert buffer == data

    def test_a_read_beyond_the_end_raises(self, store: Store) -> None:
        """A read fills the whole buffer or raises EOFError."""
        store.create("data", b"0123456789")
        with store.open_reader("data") as reader:
            for offset, length in ((5, 6), (10, 1), (1 << 40, 1)):
                with pytest.raises(EOFError, match="data"):
                    reader.read_into(offset, memoryview(bytearray(length)))
            with pytest.raises(ValueError, match="offset -1"):
                reader.read_into(-1, memoryview(bytearray(1)))

    def test_a_size_that_the_caller_knows_is_believed_until_a_read(self, store: Store) -> None:
        """A file that is missing, or has another size, is an error at the latest then."""
        store.create("data", b"0123456789")
        with store.open_reader("data", 10) as reader:
            assert reader.size == 10
            assert reader.read(3, 4) == b"3456"
        for size in (9, 11):
            with store.open_reader("data", size) as reader:
                if reader.size == size:
                    with pytest.raises(EOFError, match="data"):
                        reader.read(3, 4)
        with pytest.raises(FileNotFoundError), store.open_reader("none", 10) as reader:
            reader.read(3, 4)

    @pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, (1 << 20) + 1])
    def test_size_is_exact(self, store: Store, size: int) -> None:
        """The size of a file is the number of bytes written, also around powers of two."""
        write_file(store, "data", bytes(size))
        assert store.size("data") == size

    def test_a_writer_never_replaces(self, store: Store) -> None:
        """`open_writer`, or at the latest `finish`, refuses an existing file, which keeps its content."""
        write_file(store, "data", b"first")
        with pytest.raises(FileExistsError, match="data"):
            write_file(store, "data", b"second")
        assert store.read("data", limit_bytes=100) == b"first"

    def test_an_unfinished_file_is_not_finished(self, store: Store) -> None:
        """`finish` refuses a file with missing bytes; `write` refuses a piece outside of the declared size."""
        writer = store.open_writer("data", 10)
        writer.write(0, b"12345")
        for offset, data in ((8, b"123"), (-1, b"1"), (11, b"")):
            with pytest.raises(ValueError, match="outside of its 10 bytes"):
                writer.write(offset, data)
        with pytest.raises(ValueError, match="5 of 10 bytes written"):
            writer.finish()

    def test_a_closed_writer_refuses(self, store: Store) -> None:
        """After `abort` or `finish`, `write` and `finish` raise; `abort` never does."""
        aborted = store.open_writer("aborted", 1)
        finished = store.open_writer("finished", 0)
        aborted.abort()
        finished.finish()
        for writer in (aborted, finished):
            writer.abort()
            with pytest.raises(ValueError, match="closed"):
                writer.finish()
        with pytest.raises(ValueError, match="closed"):
            aborted.write(0, b"x")

    def test_a_folder_is_listed_one_level_deep_and_sorted(self, store: Store) -> None:
        """`list` names each file and folder of one folder once, and nothing from a folder with a similar name."""
        for folder in ("12", "12/process_0", "12.old", "120"):
            store.make_folder(folder)
        for path in ("12/epoch.json", "12/process_0/a", "12/process_0/b", "12.old/x", "120/y", "z"):
            store.create(path, b"")
        assert store.list("12") == [Entry("epoch.json", False), Entry("process_0", True)]
        top = [Entry("12", True), Entry("12.old", True), Entry("120", True), Entry("z", False)]
        assert store.list("") == top
        assert store.exists("12")
        assert store.exists("12/process_0")
        assert not store.exists("1")

    def test_remove_takes_one_file_and_forgives_a_missing_one(self, store: Store) -> None:
        """`remove` leaves files with similar names alone; the name can be created again."""
        store.create("a", b"first")
        store.create("ab", b"")
        store.remove("a")
        store.remove("a")
        assert store.list("") == [Entry("ab", False)]
        store.create("a", b"second")
        assert store.read("a", limit_bytes=100) == b"second"

    def test_remove_all_takes_the_files_that_are_there(self, store: Store) -> None:
        """`remove_all` forgives those that are missing, wherever in the list they stand."""
        for name in ("a", "c", "e", "f"):
            store.create(name, b"x")
        store.remove_all(["a", "b", "c", "d", "e"])
        store.remove_all([])
        assert [entry.name for entry in store.list("")] == ["f"]

    def test_remove_tree_takes_everything_below_and_nothing_beside(self, store: Store) -> None:
        """Folders with similar names stay. A missing folder is no error, and neither is a file."""
        for folder in ("12", "12/process_0", "12/empty", "120"):
            store.make_folder(folder)
        for path in ("12/epoch.json", "12/process_0/data", "120/epoch.json", "12.json", "file"):
            store.create(path, b"x")
        for path in ("12", "12", "file"):
            store.remove_tree(path)
        assert not store.exists("12")
        assert not store.exists("12/epoch.json")
        assert store.list("") == [Entry("12.json", False), Entry("120", True)]
        assert store.read("120/epoch.json", limit_bytes=1) == b"x"

    def test_remove_tree_survives_files_that_appear_meanwhile(self, store: Store) -> None:
        """Two threads remove a folder while a third adds files to it; none of them fails."""
        store.make_folder("12")
        for i in range(50):
            store.create(f"12/{i}", b"")

        def add() -> None:
            for i in range(50, 70):
                with contextlib.suppress(FileNotFoundError):
                    store.create(f"12/{i}", b"")

        results = in_parallel([add, lambda: store.remove_tree("12"), lambda: store.remove_tree("12")])
        assert results == [None] * 3
        store.remove_tree("12")
        assert not store.exists("12")

    @pytest.mark.parametrize("path", _MALFORMED)
    def test_a_malformed_path_is_refused(self, store: Store, path: str) -> None:
        """Every method that takes a path raises ValueError for a malformed one."""
        reads: list[Callable[[str], object]] = [store.exists, store.size, store.open_reader, store.list]
        for call in (*reads, lambda p: store.read(p, limit_bytes=1), store.make_folder, store.sync_folder):
            with pytest.raises(ValueError, match="malformed path"):
                call(path)
        self._refuses_to_change(store, path, "malformed path")

    def test_the_root_cannot_be_removed_or_replaced(self, store: Store) -> None:
        """Methods that change or remove names refuse the root itself."""
        self._refuses_to_change(store, "", "root itself")

    def _refuses_to_change(self, store: Store, path: str, problem: str) -> None:
        calls: list[Callable[[str], object]] = [store.remove, store.remove_tree]
        calls += [lambda p: store.create(p, b""), lambda p: store.open_writer(p, 1)]
        for call in (*calls, lambda p: store.rename(p, "b"), lambda p: store.rename("b", p)):
            with pytest.raises(ValueError, match=problem):
                call(path)

    def test_rename_moves_a_folder_or_says_that_it_cannot(self, store: Store) -> None:
        """A store renames whole folders if `Store.atomic_folder_rename` says so, and else refuses."""
        store.make_folder("staging")
        store.create("staging/epoch.json", b"{}")
        if not store.atomic_folder_rename:
            with pytest.raises(io.UnsupportedOperation, match="no atomic rename"):
                store.rename("staging", "12")
            return
        store.rename("staging", "12")
        assert store.list("") == [Entry("12", True)]
        assert store.read("12/epoch.json", limit_bytes=10) == b"{}"

    def test_a_link_leads_to_its_target_or_the_store_says_that_it_has_none(self, store: Store) -> None:
        """A store makes symlinks if `Store.symlinks` says so, and else refuses."""
        store.make_folder("view")
        store.create("view/data", b"bytes")
        if not store.symlinks:
            with pytest.raises(io.UnsupportedOperation, match="no symlinks"):
                store.link("view/link", "data")
            return
        store.link("view/link", "data")
        assert store.read("view/link", limit_bytes=10) == b"bytes"
        with pytest.raises(FileExistsError):
            store.link("view/link", "data")

    def test_replace_changes_a_file_only_if_it_has_the_old_content(self, store: Store) -> None:
        """A store without `Store.atomic_folder_rename` has such conditional writes; another one may refuse."""
        store.create("head", b"first")
        if store.atomic_folder_rename:
            with contextlib.suppress(io.UnsupportedOperation):
                store.replace("head", b"other", b"second")
            assert store.read("head", limit_bytes=10) == b"first"
            return
        store.replace("head", b"first", b"second")
        with pytest.raises(FileExistsError):
            store.replace("head", b"first", b"third")
        assert store.read("head", limit_bytes=10) == b"second"

    def test_a_local_path_leads_other_programs_to_the_same_files(self, store: Store) -> None:
        """What is written below `Store.local_path` is in the store; a store without one lies in no other."""
        store.create("ours", b"1")
        assert store.check_root()
        assert store.is_reachable()
        if store.local_path is None:
            assert not store.lies_in(store)
            assert not store.has_beside(["ours"])
            return
        path = pathlib.Path(store.local_path)
        assert store.has_beside(["not-there", path.name])
        assert not store.has_beside([])
        assert path.joinpath("ours").read_bytes() == b"1"
        path.joinpath("theirs").write_bytes(b"2")
        assert store.read("theirs", limit_bytes=1) == b"2"
        assert store.lies_in(store)

    def test_another_store_on_the_same_directory_sees_the_same(self, store: Store, reopened: Store) -> None:
        """A store keeps no state in memory: a second object on the same directory sees what the first wrote."""
        store.create("claim", b"x")
        assert reopened.root == store.root
        assert reopened.read("claim", limit_bytes=10) == b"x"
        with pytest.raises(FileExistsError):
            reopened.create("claim", b"y")
