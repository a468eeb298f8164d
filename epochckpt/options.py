"""`StorageOptions`: how bytes get to storage, how long anything may wait, and how buckets are reached."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal

from epochckpt import _text, _units
from epochckpt._durations import Duration
from epochckpt._kinds import NONE, Kind, boolean, choice, integer, matching, nbytes, option, options_of, secs
from epochckpt.errors import InvalidArgumentError

SECRET = re.compile("key|secret|token|passw|credential|signature|auth", re.IGNORECASE)
"""In the name of what looks like a secret, which is neither taken as a setting nor shown."""

_MAX_SECS = 3600.0


def _endpoint(value: Any) -> str:
    # An epath.Path has removed a slash.
    scheme, host = matching(r"https?://?[^/@?#\s]+(?:/[^@?#\s]*)?")(value).rstrip("/").split(":", 1)
    return f"{scheme}://{host.lstrip('/')}"


def _true_or_false(value: Any) -> bool:
    return {"true": True, "false": False}[str(value).lower()]


def _payer(value: Any) -> bool | str:
    text = str(value) if isinstance(value, bool) else matching(r"[\w.:-]+")(value)
    return {"true": True, "false": False}.get(text.lower(), text)


def _pause(value: Any) -> float:
    pause = _units.parse_secs(value) if isinstance(value, str) else value
    if isinstance(pause, bool) or not isinstance(pause, int | float) or not 0 < pause <= _MAX_SECS:
        raise ValueError
    return float(pause)


_ENDPOINT = Kind(
    "http://host:port or https://host:port, perhaps with a path, without a password",
    _endpoint,
    ("http://localhost:9000", "https://[::1]"),
)
_PAUSE = Kind("seconds, such as 0.5 or 2s, of at most an hour", _pause, (0.5, 2.0))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BucketSettings(Mapping[str, Any]):
    """How a bucket is reached: a mapping of the settings that are given. Secrets are none of them.

    A setting that concerns servers or identities is for the schemes whose rows name it, see `storage.schemes`.
    """

    endpoint: str | None = field(
        default=None,
        metadata=option(
            _ENDPOINT,
            "The server: `https://host:port`, or `https://host/path` where a gateway serves the store below a path; on "
            "`gs` with credentials, unless `anonymous`. Without it the cloud's own.",
        ),
    )
    account: str | None = field(
        default=None,
        metadata=option(
            Kind("the name of a storage account", matching(r"[\w-]+"), ("account-1",)),
            "The storage account that the container belongs to.",
        ),
    )
    region: str | None = field(
        default=None,
        metadata=option(Kind("the name of a region", matching(r"[\w-]+"), ("eu-west-1",)), "The bucket's region."),
    )
    profile: str | None = field(
        default=None,
        metadata=option(
            Kind("the name of a profile in ~/.aws", matching(r"[^\x00-\x1f\x7f]+"), ("a profile",)),
            "A profile of `~/.aws`: its credentials, and its region and endpoint where they are not given; needs "
            "boto3.",
        ),
    )
    addressing: Literal["path", "virtual"] | None = field(
        default=None,
        metadata=option(
            choice("path", "virtual"),
            "Where a URL has the name of the bucket: `path` (`https://host/bucket/…`, the default) or `virtual` "
            "(`https://bucket.host/…`), which some servers ask for.",
        ),
    )
    requester_pays: bool | str | None = field(
        default=None,
        metadata=option(
            Kind("true or false; on gs:// the project that pays", _payer, (True, "project-1")),
            "Who reads pays: `true` on S3; on Google Cloud Storage the project that pays.",
        ),
    )
    anonymous: bool | None = field(
        default=None,
        metadata=option(
            Kind("true or false", _true_or_false, (False,)),
            "`true`: credentials are neither looked for nor sent. For public buckets.",
        ),
    )
    retries: int | None = field(
        default=None,
        metadata=option(integer(0, 100), "How often a request is repeated that the store refuses for the moment (8)."),
    )
    first_retry_secs: float | None = field(
        default=None,
        metadata=option(_PAUSE, "The pause before a request is repeated (0.2 s); each further one is twice as long."),
    )
    longest_retry_secs: float | None = field(
        default=None, metadata=option(_PAUSE, "The longest of these pauses (8 s).")
    )
    concurrency: int | None = field(
        default=None,
        metadata=option(
            integer(1, 1000),
            "Requests under way at once, where there are many (16): uploads of chunks and reads of ranges, 8 to 64 MiB "
            "each, and small ones. Beside the state, a save holds up to this many chunks in memory.",
        ),
    )

    hedged_reads: bool | None = field(
        default=None,
        metadata=option(
            Kind("true or false", _true_or_false, (False,)),
            "`false`: a read that takes much longer than most is not asked for a second time. Else up to 5 % of all "
            "reads are (true).",
        ),
    )

    @classmethod
    def of(cls, values: Any, where: str) -> BucketSettings:
        """The settings in a mapping, or in a text such as `endpoint=http://host:9000&region=eu-west-1`.

        A value may be given as it is or as a text; None stands for none, of a setting and of all. `where` begins the
        errors, which do not tell values.

        Raises:
            InvalidArgumentError: an unknown name (with near ones), a wrong value, a contradiction, or a secret.
        """
        if isinstance(values, cls):
            return values
        if isinstance(values, str | None):
            values = _of_query(values or "", where)
        if not callable(getattr(values, "items", None)):
            raise InvalidArgumentError(f"{where}: expected settings by name, got {type(values).__name__}")
        settings = {}
        for name, value in values.items():
            if name not in BUCKET_SETTINGS:
                raise InvalidArgumentError(f"{where}: {_unknown(str(name))}")
            kind = BUCKET_SETTINGS[name].kind
            try:
                settings[name] = None if value is None else kind.read(value)
            except (ValueError, TypeError, KeyError, OverflowError):
                raise InvalidArgumentError(f"{where}: {name} is wrong; expected {kind.expected}") from None
        made = cls(**settings)
        if made.anonymous and (made.profile or made.requester_pays):
            other = "profile" if made.profile else "requester_pays"
            raise InvalidArgumentError(f"{where}: anonymous contradicts {other}, which stands for somebody")
        first = made.first_retry_secs
        longest = made.longest_retry_secs
        if first and longest and first > longest:
            raise InvalidArgumentError(f"{where}: first_retry_secs={first:g} is above longest_retry_secs={longest:g}")
        return made

    def query(self) -> str:
        """The settings as a text that `of` reads: the query of a URL."""
        texts = {name: str(value).lower() if isinstance(value, bool) else value for name, value in self.items()}
        return urllib.parse.urlencode(texts, safe=":/")

    def __getitem__(self, name: str) -> Any:
        if name in BUCKET_SETTINGS and (value := getattr(self, name)) is not None:
            return value
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in BUCKET_SETTINGS if getattr(self, name) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(dict(self))


BUCKET_SETTINGS = options_of(BucketSettings)
"""All settings of buckets, by name."""


def _of_query(text: str, where: str) -> dict[str, str]:
    try:
        pairs = urllib.parse.parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=100)
    except ValueError:
        pairs = [("", "")]
    if len(dict(pairs)) < len(pairs) or "" in dict(pairs):
        raise InvalidArgumentError(f"{where}: expected each setting once, as name=value, with & between them")
    return dict(pairs)


def _unknown(name: str) -> str:
    shown = repr(_text.shown(name, limit=40))
    if SECRET.search(name):
        return (
            f"{shown} is a secret and no setting: URLs and settings stand in logs and in lists of processes. Give it "
            "in the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, or "
            "AZURE_STORAGE_ACCOUNT_KEY), or name a profile of ~/.aws"
        )
    return f"there is no setting {shown}; {_text.near(name, BUCKET_SETTINGS)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """How bytes get to storage, and how long anything may wait.

    `orbax.checkpoint.CheckpointManagerOptions` decide when an epoch is saved, and how long it is kept. Options that end
    in `_secs` are numbers of seconds, or texts: `"90s"`, `"10min"`, `"1.5h"`. They are read as seconds.

    Examples:
        >>> storage = ec.StorageOptions(io_threads=4, save_timeout_secs="30min")
        >>> with ec.CheckpointManager("run", storage=storage) as manager:
        ...     manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        True

    Attributes:
        io_threads: threads that write or read one node's files; in a bucket there are as many as its `concurrency`,
            if that is more.
        block_bytes: unit of writing, hashing and verified reading; a checksum is kept per block.
        part_bytes: a node's data file is continued in another one past this size; None: the store's own preference
            (no limit on POSIX, 64 MiB on object stores). On object stores larger arrays and shards are cut by rows, so
            that it must be the same in all processes.
        replica_split_bytes: replicated arrays larger than this are written in pieces by several of their holders.
        host_memory_limit_bytes: bound on host memory that snapshots hold until it is written (copies only, views of
            CPU arrays cost nothing). `save()` waits for older writes to stay under it, and refuses a single snapshot
            that is larger. None: half of the machine's memory (of the container's, if that is less); a single snapshot
            that is larger waits until no other is held.
        snapshot: where arrays on accelerators are copied to before `save()` returns. "device": to free memory of their
            device, from where they move through host memory in pieces (at most `host_memory_limit_bytes` at a time)
            while training goes on; where a device has too little, as with "pinned_host". "pinned_host": to pinned host
            memory. `save()` waits for that only where the backend does not promise that a step which donates the arrays
            waits; on GPUs it does. "host": as "pinned_host", and `save()` always waits. "auto": as "device", and only
            if the device says how much memory is free. CPU arrays are viewed or copied in every case.
        max_blocked_secs: how long `save()` may hold training because storage is behind: it waits for older saves to be
            written, and for the memory that they hold. A save that could not begin by then has failed
            (StorageBehindError). Copying what is saved does not count. None: until the older saves have ended.
        save_timeout_secs: how long the nodes have to report, from the start of a save; then the save fails and names
            the late nodes. A node that reported an older save late gets as much more time as it was late: nodes that
            do not compute in step stay behind after a pause.
        open_timeout_secs: how long construction, `reload`, `delete` and `rollback_to` wait for the other processes.
        restore_timeout_secs: how long a restore waits for the votes of the other processes.
        restore_memory_limit_bytes: about how much host memory a restore of arrays on devices may need beyond its
            result. It reads as many leaves at a time as that allows, and lets their memory go when they are on their
            devices. A single leaf may need more: what the devices of this process hold of it. None: all leaves at once,
            which is faster. On a CPU the memory that is read into is the result, unless it is cast.
        page_cache: whether a save to a local file system leaves the newest epoch in the page cache of its host, in
            place of the epoch before: a process that is started again there restores it from memory. False: large files
            are written past the page cache, which takes less processor time and leaves the cache to training. On
            network file systems that is always so. See docs/speed.md.
        broadcast_restore: whether the processes of a job share reads. If several processes need the same bytes, such as
            replicated arrays, each of them reads and verifies a part, and a collective spreads the parts. So every byte
            is read once. All processes must then restore with the same targets. None: if
            `CheckpointManagerOptions.single_host_load_and_broadcast` asks for it. With `local_disks` never.
        orbax_view: also write the small files that let stock Orbax read the epoch without epochckpt, on file
            systems and, after the commit, in buckets of Google Cloud Storage.
        verify: check the checksum of every block of an array before its bytes reach the caller, which costs little.
            The files of handlers, JSON among them, are always checked.
        mirror: another directory, as a rule a bucket (`gs://…`), that committed epochs of a directory on a file system
            are copied to in the background; epochs that only the mirror has are listed and restored like others. See
            docs/buckets.md.
        mirror_every: copies every n-th committed epoch, by count, and the newest at `close()`.
        mirror_keep: how many epochs the mirror keeps, the newest ones; None: all. What the directory itself keeps is
            decided by Orbax's options.
        mirror_backlog: how many epochs may wait for the mirror. They are not deleted meanwhile; if there are more, the
            oldest is not mirrored, and a warning says so.
        local_disks: each process of the job has a disk of its own, and the directory is another one on each. It needs a
            `mirror`. A process keeps on its disk what its devices hold, and reads the rest from the mirror. An epoch is
            committed on all disks or on none, and stock Orbax reads it in the mirror only. See docs/buckets.md.
        store: how buckets are reached, by the names of settings that docs/buckets.md lists. What the query of a URL
            says comes first, the environment last. It is ignored on file systems.
    """

    io_threads: int = field(default=2, metadata=option(integer(1), "Threads per process that read or write files."))
    block_bytes: int = field(
        default=4 * 2**20,
        metadata=option(nbytes(4096, 256 * 2**20), "Unit of writing, checksums and verified reading."),
    )
    part_bytes: int | None = field(
        default=None,
        metadata=option(
            nbytes(none=NONE),
            "Continue a data file in another one past this size; on object stores also cut larger arrays by rows. "
            "None: never on file systems, 64MiB on object stores.",
        ),
    )
    replica_split_bytes: int = field(
        default=16 * 2**20,
        metadata=option(nbytes(), "Replicated arrays above this size are written by several processes."),
    )
    host_memory_limit_bytes: int | None = field(
        default=None,
        metadata=option(
            nbytes(none=NONE),
            "Host memory per process for copies of arrays during saves; save() waits for room. None: half the "
            "machine's.",
        ),
    )
    snapshot: Literal["auto", "device", "pinned_host", "host"] = field(
        default="auto",
        metadata=option(
            choice("auto", "device", "pinned_host", "host"),
            "Where arrays on GPUs and TPUs are copied to before save() returns: device, pinned_host or host. auto: "
            "device where its memory allows, else pinned_host.",
        ),
    )
    max_blocked_secs: Duration[float | None] = field(
        default=Duration(10.0, none=True),
        metadata=option(
            secs(none=NONE),
            "How long save() may hold training while storage is behind; then the new save fails. None: until older "
            "saves have ended.",
        ),
    )
    save_timeout_secs: Duration[float] = field(
        default=Duration(600.0),
        metadata=option(secs(), "A save fails if a node has not reported after so many seconds."),
    )
    open_timeout_secs: Duration[float] = field(
        default=Duration(300.0),
        metadata=option(secs(), "How long opening, deleting and rolling back wait for other processes."),
    )
    restore_timeout_secs: Duration[float] = field(
        default=Duration(600.0),
        metadata=option(secs(), "How long restoring the latest epoch waits for other processes."),
    )
    restore_memory_limit_bytes: int | None = field(
        default=None,
        metadata=option(
            nbytes(none=NONE),
            "Host memory that a restore may need beyond its result: it then reads so much at a time. None: all at "
            "once.",
        ),
    )
    page_cache: bool = field(
        default=True,
        metadata=option(
            boolean(),
            "A save to a local disk leaves the newest epoch in the page cache of its host, from which a restart "
            "restores it.",
        ),
    )
    broadcast_restore: bool | None = field(
        default=None,
        metadata=option(
            boolean(none=NONE),
            "The processes of a job read once, together, what several of them need. None: if Orbax's "
            "single_host_load_and_broadcast asks for it.",
        ),
    )
    orbax_view: bool = field(
        default=True,
        metadata=option(
            boolean(), "Also write the index through which stock Orbax reads epochs; file systems and gs://."
        ),
    )
    verify: bool = field(
        default=True,
        metadata=option(
            boolean(), "Check the blocks of arrays that are read against their checksums; other files always are."
        ),
    )
    mirror: str | None = field(
        default=None,
        metadata=option(
            Kind("a path or URL", matching(".+"), ("gs://bucket/run",), none=""),
            "Another directory, as a rule a bucket, that committed epochs are copied to in the background.",
        ),
    )
    mirror_every: int = field(
        default=1, metadata=option(integer(1), "Copy every n-th committed epoch, and the newest at the end.")
    )
    mirror_keep: int | None = field(
        default=None,
        metadata=option(integer(1, none=NONE), "Keep so many epochs in the mirror, the newest ones. None: all."),
    )
    mirror_backlog: int = field(
        default=4,
        metadata=option(
            integer(1), "So many epochs may wait for the mirror; if there are more, the oldest is not mirrored."
        ),
    )
    local_disks: bool = field(
        default=False, metadata=option(boolean(), "The directory is on a disk of each process's own; needs a mirror.")
    )
    store: Mapping[str, Any] = field(
        default=BucketSettings(),
        metadata=option(
            Kind(
                "settings of a bucket, such as endpoint=http://host:9000&region=eu-west-1",
                lambda value: BucketSettings.of(value, "settings") or None,
                ({"endpoint": "http://localhost:9000", "anonymous": True, "retries": 3},),
                write=lambda value: BucketSettings.of(value, "settings").query(),
                none="",
                private=True,  # somebody may have put a secret there
            ),
            "How a bucket is reached: name=value with & between them, as in a URL's query, which comes first. Names: "
            f"{', '.join(BUCKET_SETTINGS)}.",
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "store", BucketSettings.of(self.store, "StorageOptions.store"))
        for each in dataclasses.fields(self):
            if each.name == "store" or isinstance(each.default, Duration):  # checked as it was set
                continue
            STORAGE_OPTIONS[each.name].kind.check(f"StorageOptions.{each.name}", getattr(self, each.name))
        if self.local_disks and self.mirror is None:
            raise InvalidArgumentError(
                "StorageOptions.local_disks needs a mirror: no disk has the whole of an epoch, so that a host which is "
                "replaced could not go on. Name a bucket that all hosts reach"
            )


STORAGE_OPTIONS = options_of(StorageOptions)
"""All storage options, by name."""
