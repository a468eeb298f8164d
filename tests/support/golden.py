"""The golden directories: what there is, how it is made, and what two of them have in common.

Each is an archive in `tests/compat/data/epochckpt-1`. Two runs of one program differ in ids, times and what follows
from them; `masked` leaves these out, so that all else can be compared: the bytes of data files, the fields of records,
their order, and which files there are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import pathlib
import re
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from epochckpt.format import paths
from epochckpt.storage import open_store
from tests.support import golden_jobs
from tests.support.object_servers import bucket
from tests.support.processes import run_worker, start_processes

DATA = pathlib.Path(__file__).parent.parent / "compat" / "data" / "epochckpt-1"
SUMS = DATA / "SHA256SUMS"
_EPOCH_NS = 1_767_225_600  # of files in archives


@dataclasses.dataclass(frozen=True)
class Golden:
    """One golden archive.

    Attributes:
        job: the function of `golden_jobs` that saves it.
        processes: how many processes call it.
        devices: how many devices each has.
        in_bucket: it is given a bucket, of which the archive has the objects.
        status: how the processes end.
    """

    job: str
    processes: int = 1
    devices: int = 4
    in_bucket: bool = False
    status: int = 0

    def make(self, folder: pathlib.Path) -> None:
        """Makes the directory anew, in processes of its own."""
        if self.in_bucket:
            with bucket("gs") as server:
                url = server.new_url()
                self._run(url, server.environment)
                golden_jobs.dump(url, folder)
            return
        self._run(str(folder), {})

    def _run(self, directory: str, env: Mapping[str, str]) -> None:
        function, arguments = f"tests.support.golden_jobs:{self.job}", {"directory": directory}
        if not self.status:
            run_worker(function, arguments, self.processes, self.devices, env=env)
            return
        program = ["-m", "tests.support.worker", function, json.dumps(arguments)]
        with start_processes(program, self.processes, devices_per_process=self.devices, env=env) as job:
            outcomes = job.wait(timeout=120)
        assert [outcome.returncode for outcome in outcomes] == [self.status] * self.processes, outcomes


GOLDEN = {
    "history": Golden("history", processes=3, devices=2),
    "bucket": Golden("history", processes=3, devices=2, in_bucket=True),
    "in-memory": Golden("in_memory"),
    "hosts": Golden("hosts", processes=3, devices=2),
    "kinds": Golden("kinds"),
    "rolling-back": Golden("rolling_back", status=golden_jobs.KILLED),
    "mirrored": Golden("mirrored"),
    "steps": Golden("steps"),
    "single-nodes": Golden("of_single_nodes"),
}


# -- files -------------------------------------------------------------------------------------------------------------


def load(folder: pathlib.Path, url: str) -> None:
    """The inverse of `golden_jobs.dump`."""
    store = open_store(url)
    for path in _walk(folder):
        if (folder / path).is_file():
            store.create(path, (folder / path).read_bytes())


def pack(folder: pathlib.Path) -> bytes:
    """An archive of a folder; the same folder gives the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as tar:
        for path in _walk(folder):
            member = tar.gettarinfo(folder / path, path)
            member.mtime, member.uid, member.gid, member.uname, member.gname = _EPOCH_NS, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() else 0o644
            tar.addfile(member, io.BytesIO((folder / path).read_bytes()) if member.isfile() else None)
    return out.getvalue()


def unpack(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Puts a golden directory into a new folder, which it returns."""
    with tarfile.open(DATA / f"{name}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder


def sums(folder: pathlib.Path) -> dict[str, str]:
    """The sha256 of each file, by path."""
    return {
        path: hashlib.sha256((folder / path).read_bytes()).hexdigest()
        for path in _walk(folder)
        if (folder / path).is_file() and not (folder / path).is_symlink()
    }


def _walk(folder: pathlib.Path) -> Iterator[str]:
    """The paths of all files, links and folders, in order."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        yield entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from (f"{entry.name}/{below}" for below in _walk(pathlib.Path(entry.path)))


# -- what two directories have in common -------------------------------------------------------------------------------

_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_ROOT = re.compile(r"(?:file://)?/[^\"\s]*/(?=(?:mirror|run|disk-\d)\b)")
_VIEW = re.compile(r"(?:index\.\d+|manifest\.ocdbt)\Z")  # the latter has an id of its own, that of TensorStore
_TIMED = re.compile(r"(?:_ns|nsecs|secs|timings|_time)\Z")
_OF_A_PROCESS = frozenset({"owner", "change", "checksum"})
_OF_A_MACHINE = frozenset({"host", "inode"})  # by what a directory is told from a copy of it


def masked(folder: pathlib.Path) -> dict[str, str]:
    """What does not differ between two runs, by path: a link's target, a record without ids and times, a digest."""
    found: dict[str, str] = {}
    for path in _walk(folder):
        place, name = folder / path, _ID.sub("ID", path)
        if place.is_symlink():
            found[name] = f"-> {_ID.sub('ID', os.readlink(place))}"
        elif place.is_dir():
            found[name] = "folder"
        else:
            found[name] = _masked_file(path, place.read_bytes())
    return found


def _masked_file(path: str, data: bytes) -> str:
    if not data.startswith(b"{"):
        varies = path.endswith("manifest.ocdbt") or (_VIEW.search(path) and _ID.search(data.decode("latin-1")))
        return f"{len(data)} bytes" if varies else f"sha256 {hashlib.sha256(data).hexdigest()}"
    lines = [_masked_json(path, json.loads(line)) for line in data.decode().splitlines()]
    return _ROOT.sub("ROOT/", _ID.sub("ID", "\n".join(json.dumps(line, separators=(",", ":")) for line in lines)))


def _masked_json(path: str, record: dict[str, Any]) -> dict[str, Any]:
    if path.endswith(paths.OWNER_FILE):
        return dict.fromkeys(record, "")
    fields = {name: _without_times(name, value) for name, value in record.items()}
    if record.get("record") == "epoch":
        # name, process, size and digest of node.json, seconds, files
        fields["nodes"] = [[*row[:2], "size", "digest", "secs", *row[5:]] for row in record["nodes"]]
        if "runs" in record:
            times, secs = ["ns"] * 3, ["secs"] * 3
            fields["runs"] = [[row[0], *times, *row[4:6], *secs, *row[9:]] for row in record["runs"]]
        if record["orbax_view"] is not None:
            fields["orbax_view"] = dict.fromkeys(record["orbax_view"], "length and digest")
    return fields


def _without_times(name: str, value: Any) -> Any:
    """A value without what differs between runs; the names of fields stay."""
    if name in _OF_A_PROCESS | _OF_A_MACHINE or _TIMED.search(name):
        return dict.fromkeys(value, "") if isinstance(value, dict) else ""
    if isinstance(value, dict):
        return {field: _without_times(field, each) for field, each in value.items()}
    return [_without_times("", each) for each in value] if isinstance(value, list) else value


def differences(golden: pathlib.Path, fresh: pathlib.Path) -> list[str]:
    """What a directory has that a golden one has not, and the other way round: a line for each path."""
    old, new = masked(golden), masked(fresh)
    lines = [f"{path}: is not written any more" for path in old.keys() - new.keys()]
    lines += [f"{path}: is new" for path in new.keys() - old.keys()]
    lines += [f"{path}: {_change(old[path], new[path])}" for path in old.keys() & new.keys() if old[path] != new[path]]
    return sorted(lines)


def _change(old: str, new: str) -> str:
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    begin = max(0, start - 60)
    return f"…{old[begin : start + 60]}… was, …{new[begin : start + 60]}… is"


assert paths.VERSION == 1, "make directories of the new version beside the old ones, which are still to be read"
