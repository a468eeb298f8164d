"""Requests to a bucket, over the `obstore` package. Each request ends, with a result or a clear error.

For the kinds of buckets see `schemes`.

- A request that the store refuses for the moment (429, 5xx, no connection, silence, an answer that is cut) is repeated
  with growing pauses; after a few seconds a warning says so, and at the end a StorageError. A failed connection that no
  repetition mends (a certificate that is not trusted) is an error at once; each error names the cause.
- A read that is late is asked for a second time, and the first good answer counts. Few of all reads are, so that a
  store that is slow for all has hardly more to do. Writes are never sent so.
- A conditional write whose answer was lost meets its own object when it is repeated: the content decides.
- A bucket that is missing or forbidden is an error of its own, never an empty folder.
"""

import datetime
import errno
import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from absl import logging

from epochckpt import _monitoring, _patience, _text, _threads
from epochckpt._lazy import np
from epochckpt.errors import (
    AccessError,
    EpochCheckpointError,
    InvalidArgumentError,
    StorageError,
    UnsupportedError,
)
from epochckpt.options import BucketSettings
from epochckpt.storage import hedging, schemes
from epochckpt.storage.landing import Landing
from epochckpt.storage.pace import CHUNKS_BYTES, Pace
from epochckpt.storage.store import check_path, too_large

T = TypeVar("T")

_MAX_CHUNKS = 9000  # of one file: S3 takes 10,000
_SMALL_BYTES = 1 << 20  # of a write whose answer is expected soon
_PIECE_BYTES = 1 << 20  # of an answer, which is copied while the processor's cache has it
_CONNECT_SECS = 5
_URL = re.compile(rf"({'|'.join(schemes.SCHEMES)})://([\w.~-]+)(?:/+([^?#]*))?(?:\?([^#]*))?")
_PREFIX = re.compile(r"(?:(?!\.{1,2}/)[^/]+/)*(?!\.{1,2}/?$)[^/]+/*")
_UNNAMEABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_STATUS = re.compile(r"status code: (\d+)|\(code: (\w+)\)$")  # of a request, or of one key of a request for many
_CODES = {"AccessDenied": 403, "InternalError": 500, "SlowDown": 503, "ServiceUnavailable": 503}  # of one key
_BEYOND = re.compile(r"status code: 416|Invalid range")
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})
_POLICY = frozenset({400, 403, 409})  # the answers by which a bucket's policy keeps an object as it is
_REFUSED = frozenset({400, 401, 403, 404})  # by a server of credentials
_CREDENTIALS = re.compile(r"//169\.254\.|//metadata\.google|token request|credential provider")
_PROVIDER_AWAY = re.compile("Transport|Connect|Timeout|Retrieval")  # in the names of its errors
_STRUCTURE = "\n\nDebug source"  # begins what the client prints of an error after its message
_PANIC = "PanicException"  # of the client's own code: no Exception, so that no handler of errors sees it
_user: int | None = None  # the process that has used the client, whose threads are in no child of it


@functools.cache
def _memory() -> Any:
    """What `memory://` holds in this process."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _span(secs: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=secs)


def plain(url: str) -> str:
    """A URL as errors and records show it: without its query, and without a user's name and password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = re.split("[?#]", rest)[0].partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


@functools.lru_cache(maxsize=32)
def _open(
    scheme: schemes.Scheme,
    bucket: str,
    account: str,
    settings: BucketSettings,
    endpoint: str,
    large_secs: float,
    silent_secs: float,
    retries: tuple[float, ...],
    environment: tuple[tuple[str, str], ...],
) -> tuple[Any, str]:
    """A client and its endpoint. All stores of this process share its connections, as long as the environment stays."""
    first = _span(retries[0] if retries else 1)
    longest = _span(retries[-1] if retries else 1)
    times = {"connect_timeout": _span(_CONNECT_SECS), "read_timeout": _span(silent_secs), "timeout": _span(large_secs)}
    repeating = {
        "max_retries": len(retries),
        "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
        "retry_timeout": _span(sum(retries) + large_secs),
    }
    opening = schemes.Opening(
        bucket=bucket,
        account=account,
        settings=settings,
        endpoint=endpoint,
        environment=dict(environment),
        client_options=times,
        retry_config=repeating,
    )
    assert scheme.client is not None, "callers ask for a server"
    return scheme.client(opening)


@dataclass(frozen=True)
class _Cause:
    """Why no connection came about, as the client's error says in the structure that it prints after its message."""

    sign: re.Pattern[str]  # in that structure; its groups say more
    text: str
    remedy: str = ""
    repeats: int | None = None  # how often such a request is repeated; None: as often as any


_CAUSES = (
    _Cause(
        re.compile(r"InvalidCertificate\((.*?)\)\s*,\s*}", re.DOTALL),
        "the server's certificate is not trusted ({})",
        ". If it is signed by an authority of your own, name the file of its certificate in SSL_CERT_FILE",
        0,
    ),
    _Cause(
        re.compile(r"kind: InvalidData,\s*error: (\w+\(.*?\))\s*,\s*}", re.DOTALL),
        "TLS cannot be agreed on ({})",
        ". Is https:// right for this port?",
        0,
    ),
    _Cause(
        re.compile(r'"dns error".*?error: "([^"]*[Tt]emporary[^"]*)"', re.DOTALL),
        "the server's name cannot be looked up ({})",
    ),
    _Cause(
        re.compile(r'"dns error".*?error: "([^"]*)"', re.DOTALL),
        "the server's name cannot be looked up ({})",
        ". Is it spelt right?",
        3,  # a resolver that has just started says so, too
    ),
    _Cause(re.compile(r'kind: \w+,\s*message: "([^"]*)"'), "{}"),
    _Cause(re.compile(r"source: (TimedOut)\b|\b(timed ?out)\b", re.IGNORECASE), "no answer in time"),
)


def _cause(error: BaseException) -> tuple[_Cause, str] | None:
    """The cause of a failed connection, and what is to be said of it; None for an answer, or where none is known."""
    text = str(error)
    _, mark, structure = text.partition(_STRUCTURE)
    if not mark or _STATUS.search(text.partition(_STRUCTURE)[0]):
        return None
    for cause in _CAUSES:
        if match := cause.sign.search(structure):
            detail = " ".join("".join(part or "" for part in match.groups()).split())
            return cause, f"{cause.text.format(_text.shown(detail, limit=160))}{cause.remedy}"
    return None


def wait(secs: float) -> None:
    """Waits; a signal's handler runs meanwhile."""
    threading.Event().wait(secs)


class Client:
    """Requests for the keys below one prefix, by paths relative to it.

    What the URL's query says comes before the `settings`, and these before the cloud's usual environment
    (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`, …), which alone gives credentials.

    Args:
        url: with or without a query.
        settings: those that the query leaves open.
        chunk_bytes: how much of a file that is streamed goes with one request, unless the file is very large. None: as
            much as suits its size and the pace of the store, see `pace`.
        pace: learns how fast the store answers. None: a new one.
        pause: waits for so many seconds before a request is repeated.

    Attributes:
        scheme: the row of its scheme.
        root: the URL without its query.
        settings: those of both places.
        endpoint: the server; empty for the cloud's own.
        sends: whether there is a server: what `memory://` is given, it keeps.
        pace: how fast it has answered lately.
        fixed_chunks: whether all files have chunks of one size, whatever the pace.
        least_chunk_bytes: the smallest size of a chunk.

    Raises:
        InvalidArgumentError: no such scheme, no bucket, or settings that the client does not take.
    """

    def __init__(
        self,
        url: str,
        settings: Mapping[str, Any] | None = None,
        *,
        chunk_bytes: int | None = None,
        pace: Pace | None = None,
        pause: Callable[[float], object] = wait,
    ):
        self.fixed_chunks = chunk_bytes is not None
        self.least_chunk_bytes = CHUNKS_BYTES[0] if chunk_bytes is None else chunk_bytes
        self.pace = pace or Pace()
        self._pause = pause
        match = _URL.fullmatch(url)
        if match is None:
            raise InvalidArgumentError(
                f"{plain(url)!r} names no store: expected {schemes.EXAMPLES}, and perhaps a query such as "
                "?endpoint=https://host:port"
            )
        name, bucket, prefix, query = match.groups(default="")
        self.scheme = schemes.SCHEMES[name]
        self.root = plain(url).rstrip("/")
        self.endpoint = ""
        if prefix and (not _PREFIX.fullmatch(prefix) or _UNNAMEABLE.search(prefix)):
            raise InvalidArgumentError(
                f"{self.root!r}: an empty part, '.', '..' or a control character is in no object's name"
            )
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        given = BucketSettings.of(settings, "settings")
        self.settings = BucketSettings.of({**given, **BucketSettings.of(query, self.root)}, self.root)
        self.scheme.check(self.settings, self.root)
        self.sends = self.scheme.client is not None
        if not self.sends:
            self.kv = self._large = self._streams = _memory()
            self._prefix = f"{bucket}/{self._prefix}"
            return
        environment = self.scheme.environment()
        try:
            server = self.scheme.server(self.settings)
            account = self.scheme.account(self.settings)
            large_secs = _patience.now().large_request_secs
            client = functools.partial(_open, self.scheme, bucket, account, self.settings, server, large_secs)
            self.kv, self.endpoint = client(_patience.now().request_silent_secs, (), environment)
            self._large, _ = client(large_secs, (), environment)
            self._streams, _ = client(large_secs, self._pauses(), environment)  # it repeats single parts itself
        except EpochCheckpointError:
            raise
        except Exception as error:
            raise InvalidArgumentError(f"{self.root!r} cannot be opened: {reason(error)}") from error

    def _pauses(self) -> tuple[float, ...]:
        """Before a request is repeated, once, twice, …; seconds."""
        settings = self.settings
        usual = _patience.now().request_pauses_secs
        first = settings.first_retry_secs
        longest = settings.longest_retry_secs
        if (settings.retries, first, longest) == (None, None, None):
            return usual
        first = first or min(usual[0], longest or usual[0])
        longest = longest or max(usual[-1], first)
        retries = len(usual) if settings.retries is None else settings.retries
        return tuple(min(first * 2**number, longest) for number in range(retries))

    def chunk_size(self, size: int) -> int:
        """How much of a file of this size one request uploads. It changes with the pace: ask once for a file."""
        chunk = self.least_chunk_bytes if self.fixed_chunks else self.pace.upload_bytes(size)
        return max(chunk, -(-size // _MAX_CHUNKS))

    def key(self, path: str) -> str:
        """The key of a file."""
        if _UNNAMEABLE.search(path):
            raise ValueError(f"malformed path {path!r}: no object has control characters or surrogates in its name")
        return self._prefix + check_path(path, root_allowed=False)

    def below(self, path: str) -> str:
        """What the keys below a folder begin with."""
        return self._prefix + (f"{path}/" if check_path(path) else "")

    def name(self, path: str) -> str:
        """The URL of a path, for errors."""
        return f"{self.root}/{path}" if path else self.root

    def get(self, path: str, limit_bytes: int) -> tuple[bytes, dict[str, str]]:
        """An object's content, and what names this version of it; ValueError if it is larger."""
        import obstore

        key = self.key(path)

        def opened() -> Any:
            began = time.monotonic()
            answer = obstore.get(self.kv, key)
            self.pace.note_read(0, time.monotonic() - began)
            return answer

        def get() -> tuple[bytes, dict[str, str]]:
            answer = self._hedged(0, opened, opened)
            if answer.meta["size"] > limit_bytes:
                raise too_large(self.name(path), answer.meta["size"], limit_bytes)
            data = bytes(answer.bytes())
            _check_whole(len(data), answer.meta["size"])
            return data, _version(answer.meta)

        return self.ask(path, "reading", get)

    def read_range(self, path: str, start: int, parts: Sequence[memoryview]) -> int:
        """Fills buffers, one after the other, with the bytes of an object from `start` on; returns its size.

        EOFError: it ends before them. After any error the buffers may have changed, and do not change any more.
        """
        key = self.key(path)
        landing = Landing(parts)

        def read() -> int:
            return self._receive(key, path, start, landing)

        def read_again() -> int:
            memory = np.empty(landing.nbytes, np.uint8)
            size = self._receive(key, path, start, Landing([memory.data]))
            landing.replace(memory.data)
            return size

        def either() -> int:
            return self._hedged(landing.nbytes, read, read_again)

        try:
            return self.ask(path, "reading", either)
        finally:
            landing.close()

    def _receive(self, key: str, path: str, start: int, landing: Landing) -> int:
        """One ranged read; the size of the object. What comes goes on to the landing in pieces that the cache holds."""
        import obstore

        length = landing.nbytes
        began = time.monotonic()
        try:
            answer = obstore.get(self.kv, key, options={"range": (start, start + length)})
            size: int = answer.meta["size"]
            received = 0
            for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                if received + len(piece) > length or not landing.put(received, piece):
                    break
                received += len(piece)
        except obstore.exceptions.GenericError as error:
            if _BEYOND.search(str(error)):
                raise EOFError(f"{self.name(path)} has no bytes from {start} on") from error
            raise
        if size < start + length:
            raise EOFError(f"{self.name(path)}: has {size} bytes, not the {length} from {start} on")
        _check_whole(received, length)
        self.pace.note_read(length, time.monotonic() - began)
        return size

    def _hedged(self, nbytes: int, first: Callable[[], T], second: Callable[[], T]) -> T:
        """A read of so many bytes. If it is late, it is asked for a second time, as long as few of all reads are."""
        if not self.sends or self.settings.hedged_reads is False:
            return first()
        self.pace.count_read()

        def may_repeat(looks: int) -> bool:
            may = self.pace.may_repeat(looks)
            if may:
                _monitoring.event("/epochckpt/storage/hedge")
            return may

        return hedging.first_answer(first, second, self.pace.late_secs(nbytes), may_repeat)

    def head(self, path: str) -> Any:
        """What the store says of an object (`obstore.ObjectMeta`); None if there is none."""
        import obstore

        key = self.key(path)

        def look() -> Any:
            began = time.monotonic()
            try:
                return obstore.head(self.kv, key)
            finally:  # also when it raises: most uploads look for an object that does not exist
                self.pace.note_read(0, time.monotonic() - began)

        try:
            return self.ask(path, "looking for", look)
        except FileNotFoundError:
            return None

    def put(
        self,
        path: str,
        data: bytes | memoryview,
        version: dict[str, str] | None = None,
        *,
        look: bool = True,
        patient: bool = True,
        cached: bool = True,
    ) -> dict[str, str]:
        """Creates an object, or replaces this `version` of it; else FileExistsError. Returns the new version.

        If a repeated request finds an object, `look` compares its content: the first request may have written it.
        Requests are repeated only if `patient`. `cached` says whether readers may be given it from a cache, as Google
        Cloud Storage does for an hour with objects that are public.
        """
        import obstore

        key = self.key(path)
        mode: Any = version or "create"

        def write() -> dict[str, str]:
            attributes: Any = None if cached else {"Cache-Control": "no-store"}
            began = time.monotonic()
            answer = obstore.put(kv, key, data, attributes=attributes, mode=mode, use_multipart=False)
            self.pace.note_upload(len(data), time.monotonic() - began)
            return _version(answer)

        def confirm() -> dict[str, str]:
            with suppress(FileNotFoundError, ValueError):  # gone again, or longer
                stored, written = self.get(path, len(data)) if look else (b"", {})
                if stored == data and written:
                    return written
            raise existing(self.name(path))

        if len(data) <= _SMALL_BYTES:
            kv = self.kv
            silent_secs = _patience.now().request_silent_secs
        else:
            kv = self._large
            silent_secs = _patience.now().large_request_secs
        return self.ask(path, "writing", write, confirm, silent_secs, patient=patient)

    def copy(self, path: str, to: str, *, replace: bool) -> None:
        """Copies an object at the server. An existing target is replaced, or raises FileExistsError."""
        import obstore

        key = self.key(path)
        other = self.key(to)
        name = self.name(to)

        def met() -> None:
            raise existing(name)

        copy = functools.partial(obstore.copy, self._large, key, other, overwrite=replace)
        self.ask(path, "copying", copy, met, _patience.now().large_request_secs)

    def stream(self, path: str, chunks: Iterator[Any], chunk_bytes: int, concurrency: int) -> None:
        """Writes an object from chunks of one size in their order, with a request for each, several at once.

        An object that is there is replaced. A chunk is memory that is sent without a copy, and then let go of.
        """
        import obstore

        key = self.key(path)
        taken = False

        def note(chunk: Any) -> Any:
            nonlocal taken
            taken = True
            return chunk

        def write() -> None:
            try:
                # A generator would hold a chunk until the next one is there.
                content: Any = map(note, chunks)
                obstore.put(self._streams, key, content, chunk_size=chunk_bytes, max_concurrency=concurrency)
            except (obstore.exceptions.BaseError, FileNotFoundError) as error:
                if not taken:
                    raise
                raise StorageError(
                    self.name(path), OSError(errno.EAGAIN, f"writing failed: {reason(error)}")
                ) from error

        self.ask(path, "writing", write)

    def ask(
        self,
        path: str,
        doing: str,
        call: Callable[[], T],
        confirm: Callable[[], T] | None = None,
        silent_secs: float | None = None,
        *,
        patient: bool = True,
    ) -> T:
        """Calls the store, and again while it refuses for the moment, if it is `patient`.

        `confirm` is called where a conditional write that is repeated meets what may be its own work. `silent_secs` is
        how long one request may take, if that is long: it is repeated all the same. On the main thread a signal's
        handler, such as Ctrl-C's, need not wait for the answer.
        """
        from obstore import exceptions

        self._check_process()
        alone = threading.current_thread() is threading.main_thread()
        name = self.name(path)
        began = time.monotonic()
        said = False
        pauses = self._pauses() if patient else ()
        give_up_secs = sum(pauses) + 2 * (silent_secs or _patience.now().request_silent_secs)
        for number, pause in enumerate((*pauses, None)):
            try:
                return _threads.start(call).result() if alone else call()
            except FileNotFoundError as error:
                if self.scheme.no_bucket.search(str(error)):
                    raise self._no_bucket() from error
                raise missing(name) from error
            except exceptions.BaseError as error:
                why = reason(error)
                cause = _cause(error)
                status = _status(why)
                if self.scheme.policy.search(why) and status in _POLICY:
                    raise AccessError(
                        f"{name}: a policy of the bucket (retention, hold or lock) forbids {doing}: {why}"
                    ) from error
                met = isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError)
                busy = status == 409 and not self.scheme.exists.search(why)
                if met and confirm is not None and (not busy or pause is None):
                    if number:
                        return confirm()
                    raise existing(name) from error
                waited = time.monotonic() - began
                hopeless = cause is not None and cause[0].repeats is not None and number >= cause[0].repeats
                over = pause is None or waited > give_up_secs or hopeless
                if (final := self._final(error, why, status)) is not None:
                    raise final from error
                if _CREDENTIALS.search(why):
                    refused = "credential provider" in why and not _PROVIDER_AWAY.search(why)
                    if refused or status in _REFUSED or over:
                        raise AccessError(f"{self.root}: found no credentials: {why}") from error
                elif status in (401, 403):
                    raise AccessError(f"{name}: {doing} is not permitted: {why}") from error
                elif over or status not in (None, *_PASSING):
                    number_of_error = errno.EBUSY if status == 429 else errno.EAGAIN
                    raise StorageError(name, OSError(number_of_error, f"{doing} failed: {why}")) from error
                if waited >= _patience.now().request_quiet_secs and not said:
                    said = True
                    logging.warning("%s: %s has been failing for %.0f s: %s; trying on", name, doing, waited, why)
            except BaseException as error:
                if type(error).__name__ != _PANIC:
                    raise
                problem = OSError(errno.EIO, f"{doing} failed: the client has broken down: {reason(error)}")
                raise StorageError(name, problem) from error
            _monitoring.event("/epochckpt/storage/retry", doing=doing, status=str(status or ""))
            assert pause is not None, "the last round has returned or raised"
            self._pause(pause * random.uniform(0.5, 1.0))  # thousands of nodes must not come back together
        raise AssertionError  # the last round returns or raises

    def _check_process(self) -> None:
        """Refuses a forked child, where the client would wait forever for threads that only the parent has."""
        global _user
        if _user is None:
            _user = os.getpid()
        if _user != os.getpid() and self.kv is not _memory():
            raise UnsupportedError(
                f"{self.root}: this process (pid {os.getpid()}) was forked off one that had used a bucket (pid "
                f"{_user}), and cannot use one itself; start it with spawn, as multiprocessing.get_context('spawn') "
                "does, or use buckets in one of the two only"
            )

    def _final(self, error: Exception, why: str, status: int | None) -> Exception | None:
        """The error for an answer that no repetition changes, whatever was asked."""
        if "object with invalid path" in why:
            return UnsupportedError(f"{self.root}: an object's name is no path; rename or remove it: {why}")
        if "Received redirect" in why or status in (301, 307):
            return AccessError(f"{self.root}: set AWS_REGION, or ?region=, to the region of the bucket: {why}")
        if "UserProjectMissing" in why or "no user project provided" in why:
            return AccessError(f"{self.root}: who reads this bucket pays; say ?requester_pays=<your project>: {why}")
        if "builder error" in why or "NotSupported" in type(error).__name__:
            return InvalidArgumentError(f"{self.root}: {why}")
        return self._no_bucket() if status == 404 and not _CREDENTIALS.search(why) else None

    def _no_bucket(self) -> AccessError:
        return AccessError(f"{self.root}: there is no such bucket; create it, or correct the name")


def _status(why: str) -> int | None:
    """The HTTP status by which a server refused, or the one that its code stands for; None where there is none."""
    match = _STATUS.search(why)
    if match is None:
        return None
    text = match[1] or match[2]
    return int(text) if text.isdecimal() else _CODES.get(text)


def _version(answer: Any) -> dict[str, str]:
    """What names the version of an object that was read or written."""
    return {name: str(answer[name]) for name in ("e_tag", "version") if answer[name] is not None}


def _check_whole(received: int, expected: int) -> None:
    """Raises the client's error for an answer that was cut on its way, so that the request is repeated."""
    if received != expected:
        from obstore.exceptions import GenericError

        raise GenericError(f"the answer has {received} of {expected} bytes")


def missing(name: str) -> FileNotFoundError:
    """The error for an object that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def existing(name: str) -> FileExistsError:
    """The error for an object that is there already."""
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def reason(error: BaseException) -> str:
    """The first lines of a client's error, and the cause of a failed connection, which stands after them."""
    text = " ".join(str(error).partition(_STRUCTURE)[0].split())[:500] or type(error).__name__
    cause = _cause(error)
    return f"{text}: {cause[1]}" if cause else text
