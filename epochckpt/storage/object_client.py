"""Requests to a bucket (`gs://`, `s3://`, `memory://`), over the `obstore` package: each ends, and says what it met.

- A request that the store refuses for the moment (429, 5xx, no connection) is repeated with growing pauses; after a few
  seconds a warning says so, and at the end a StorageError.
- A conditional write whose answer was lost meets its own object when it is repeated: the content decides.
- A bucket that is missing or forbidden is an error of its own, never an empty folder.
"""

import datetime
import errno
import functools
import importlib
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from absl import logging

from epochckpt import _monitoring, _threads
from epochckpt.errors import (
    AccessError,
    EpochCheckpointError,
    InvalidArgumentError,
    StorageError,
    UnsupportedError,
)
from epochckpt.options import BucketSettings
from epochckpt.storage.store import check_path, too_large

T = TypeVar("T")

CHUNK_BYTES = 8 << 20
"""One part of a file that is streamed. A smaller file is one request."""

_MAX_CHUNKS = 9000  # of one file: S3 takes 10,000
_SMALL_BYTES = 1 << 20  # of a write whose answer is expected soon
_CONNECT_SECS = 5
_SILENT_SECS = 15  # of a server, before a small request counts as failed
_LARGE_SECS = 90  # one request with its answer
_PAUSES_SECS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0)  # before a request is repeated, if no setting says otherwise
_QUIET_SECS = 3.0  # of repeating, before it is said
_URL = re.compile(r"(gs|s3|memory)://([\w.~-]+)(?:/+([^?#]*))?(?:\?([^#]*))?")
_SETTINGS = {  # that say which server and who asks, by scheme; the others are everywhere
    "gs": {"endpoint", "requester_pays", "anonymous"},
    "s3": {"endpoint", "region", "profile", "requester_pays", "anonymous"},
    "memory": set[str](),
}
_PREFIX = re.compile(r"(?:(?!\.{1,2}/)[^/]+/)*(?!\.{1,2}/?$)[^/]+/*")
_UNNAMEABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_STATUS = re.compile(r"status code: (\d+)")
_BEYOND = re.compile(r"status code: 416|Invalid range")
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})
_REFUSED = frozenset({400, 401, 403, 404})  # by a server of credentials
_CREDENTIALS = re.compile(r"//169\.254\.|//metadata\.google|token request|credential provider")
_PROVIDER_AWAY = re.compile("Transport|Connect|Timeout|Retrieval")  # in the names of its errors
_FOREIGN = re.compile(r"unknown variant `(\w+)`")  # of Google's files of credentials
_PANIC = "PanicException"  # of the client's own code: no Exception, so that no handler of errors sees it
_GOOGLE_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
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
    scheme: str,
    bucket: str,
    settings: BucketSettings,
    endpoint: str,
    silent_secs: float,
    retries: tuple[float, ...],
    environment: tuple[Any, ...],
) -> tuple[Any, str]:
    """A client and its endpoint. All stores of this process share its connections, as long as the environment stays."""
    from obstore import store as stores

    shared, headers, anonymous = dict[str, Any](), dict[str, str](), settings.anonymous
    if scheme == "s3":
        profile = settings.profile or (None if anonymous else dict(environment).get("AWS_PROFILE"))
        if profile:
            shared["credential_provider"], found = _profile(profile)
            endpoint = endpoint or found
        config = {"conditional_put": "etag", "endpoint": endpoint, "region": settings.region}
        config |= {"request_payer": settings.requester_pays, "skip_signature": anonymous}
    else:
        config = {"base_url": endpoint, "skip_signature": anonymous}
        if anonymous or (endpoint and not settings.endpoint):  # an emulator knows no accounts
            config["google_bearer_token"] = "none"  # writes send it in any case
        if settings.requester_pays:
            headers["x-goog-user-project"] = str(settings.requester_pays)
    shared["config"] = {name: value for name, value in config.items() if value}
    shared["client_options"] = {
        "connect_timeout": _span(_CONNECT_SECS),
        "read_timeout": _span(silent_secs),
        "timeout": _span(_LARGE_SECS),
        "allow_http": endpoint.startswith("http://"),
        "default_headers": headers,
    }
    first, longest = _span(retries[0] if retries else 1), _span(retries[-1] if retries else 1)
    shared["retry_config"] = {
        "max_retries": len(retries),
        "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
        "retry_timeout": _span(sum(retries) + _LARGE_SECS),
    }
    if scheme == "s3":
        return stores.S3Store(bucket, **shared), endpoint
    try:
        return stores.GCSStore(bucket, **shared), endpoint
    except Exception as error:
        if (kind := _FOREIGN.search(str(error))) is None:
            raise
        return stores.GCSStore(bucket, credential_provider=_google(kind[1]), **shared), endpoint


def _google(kind: str) -> Any:
    """Credentials of a kind that google-auth knows and the client does not, such as another cloud's account."""
    try:
        auth = importlib.import_module("google.auth")
        transport = importlib.import_module("google.auth.transport.requests")
        from obstore.auth.google import GoogleCredentialProvider

        ask: Any = functools.partial(transport.Request(), timeout=_SILENT_SECS)
        return GoogleCredentialProvider(auth.default(scopes=[_GOOGLE_SCOPE], request=ask)[0], request=ask)
    except ImportError as error:
        raise InvalidArgumentError(
            f"Google's credentials are of the kind {kind!r}, which needs google-auth: pip install google-auth requests"
            "; without it the kinds 'service_account' and 'authorized_user', and the account of the machine, work"
        ) from error


def _profile(name: str) -> tuple[Any, str]:
    """The credentials of a profile of `~/.aws`, with its region, and its endpoint, if it has one."""
    import boto3.session
    import botocore.session
    from botocore.configprovider import ConfiguredEndpointProvider
    from obstore.auth.boto3 import Boto3CredentialProvider

    files = botocore.session.Session(profile=name)
    found = ConfiguredEndpointProvider(files.full_config, files.get_scoped_config(), "s3").provide()
    if files.get_credentials() is None:
        raise AccessError(f"the profile {name!r} in ~/.aws has no credentials")
    return Boto3CredentialProvider(boto3.session.Session(botocore_session=files)), (found or "").rstrip("/")


def _endpoint(scheme: str) -> str:
    """The server that the environment names; empty for the cloud's own."""
    names = (
        ("STORAGE_EMULATOR_HOST",) if scheme == "gs" else ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    )
    name, found = next(((n, os.environ[n]) for n in names if os.environ.get(n)), ("", ""))
    if found and scheme == "gs" and "://" not in found:
        found = f"http://{found}"
    if found and not re.match(r"https?://[^/@]+/?$", found):
        raise InvalidArgumentError(f"{name} is no URL of a server: expected http://host:port or https://host:port")
    return found.rstrip("/")


class Client:
    """Requests for the keys below one prefix, by paths relative to it.

    What the URL's query says comes before the `settings`, and these before the cloud's usual environment
    (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`, …), which alone gives credentials.

    Attributes:
        root: the URL without its query.
        settings: those of both places.
        endpoint: the server; empty for the cloud's own.
        sends: whether there is a server: what `memory://` is given, it keeps.

    Raises:
        InvalidArgumentError: no such scheme, no bucket, or settings that the client does not take.
    """

    def __init__(self, url: str, settings: Mapping[str, Any] | None = None):
        found = _URL.fullmatch(url)
        if found is None:
            raise InvalidArgumentError(
                f"{plain(url)!r} names no store: expected gs://bucket/run, s3://bucket/run, memory://name or "
                "file:///path, and perhaps a query such as ?endpoint=https://host:port"
            )
        self.root, self.endpoint, (scheme, bucket, prefix, query) = plain(url).rstrip("/"), "", found.groups(default="")
        if prefix and (not _PREFIX.fullmatch(prefix) or _UNNAMEABLE.search(prefix)):
            raise InvalidArgumentError(
                f"{self.root!r}: an empty part, '.', '..' or a control character is in no object's name"
            )
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        given = BucketSettings.of(settings, "settings")
        self.settings = BucketSettings.of({**given, **BucketSettings.of(query, self.root)}, self.root)
        self._check_settings(scheme)
        self.sends = scheme != "memory"
        if not self.sends:
            self.kv = self._large = self._streams = _memory()
            self._prefix = f"{bucket}/{self._prefix}"
            return
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "GOOGLE_"))))
        try:
            client = functools.partial(
                _open, scheme, bucket, self.settings, self.settings.endpoint or _endpoint(scheme)
            )
            self.kv, self.endpoint = client(_SILENT_SECS, (), environment)
            self._large, _ = client(_LARGE_SECS, (), environment)
            self._streams, _ = client(_LARGE_SECS, self._pauses(), environment)  # it repeats single parts itself
        except EpochCheckpointError:
            raise
        except ImportError as error:
            problem = "a profile of ~/.aws is asked for, which needs boto3: pip install boto3"
            raise InvalidArgumentError(f"{self.root}: {problem}") from error
        except Exception as error:
            raise InvalidArgumentError(f"{self.root!r} cannot be opened: {reason(error)}") from error

    def _check_settings(self, scheme: str) -> None:
        """Refuses settings that say nothing of such a bucket."""
        others = set().union(*_SETTINGS.values()) - _SETTINGS[scheme]
        if wrong := [name for name in self.settings if name in others]:
            raise InvalidArgumentError(f"{self.root}: {wrong[0]} is no setting of {scheme}://")
        payer = self.settings.requester_pays
        if isinstance(payer, str if scheme == "s3" else bool) and payer:
            expected = "true or false" if scheme == "s3" else "the project that pays"
            raise InvalidArgumentError(f"{self.root}: requester_pays is wrong; expected {expected}")

    def _pauses(self) -> tuple[float, ...]:
        """Before a request is repeated, once, twice, …; seconds."""
        asked = self.settings
        first, longest = asked.first_retry_secs, asked.longest_retry_secs
        if (asked.retries, first, longest) == (None, None, None):
            return _PAUSES_SECS
        first = first or min(_PAUSES_SECS[0], longest or _PAUSES_SECS[0])
        longest = longest or max(_PAUSES_SECS[-1], first)
        retries = len(_PAUSES_SECS) if asked.retries is None else asked.retries
        return tuple(min(first * 2**number, longest) for number in range(retries))

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

        def get() -> tuple[bytes, dict[str, str]]:
            found = obstore.get(self.kv, key)
            if found.meta["size"] > limit_bytes:
                raise too_large(self.name(path), found.meta["size"], limit_bytes)
            return bytes(found.bytes()), _version(found.meta)

        return self.ask(path, "reading", get)

    def get_range(self, path: str, start: int, length: int) -> tuple[memoryview, int]:
        """Some bytes of an object, as far as it has them, and its size; EOFError if it ends before them."""
        import obstore

        key = self.key(path)

        def get() -> tuple[memoryview, int]:
            try:
                found = obstore.get(self.kv, key, options={"range": (start, start + length)})
                return memoryview(found.bytes()), found.meta["size"]
            except obstore.exceptions.GenericError as error:
                if _BEYOND.search(str(error)):
                    raise EOFError(f"{self.name(path)} has no bytes from {start} on") from error
                raise

        return self.ask(path, "reading", get)

    def head(self, path: str) -> Any:
        """What the store says of an object (`obstore.ObjectMeta`); None if there is none."""
        import obstore

        key = self.key(path)
        try:
            return self.ask(path, "looking for", lambda: obstore.head(self.kv, key))
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
        """Writes an object if there is none, or none but this version; else FileExistsError. Returns its version.

        What a repeated request meets is looked at, unless `look` says no: it may be the work of the first one. Unless
        it is `patient`, no request is repeated. `cached` says whether readers may be given it from a cache, as Google
        Cloud Storage does for an hour with objects that are public.
        """
        import obstore

        key = self.key(path)
        mode: Any = version or "create"

        def write() -> dict[str, str]:
            attributes: Any = None if cached else {"Cache-Control": "no-store"}
            return _version(obstore.put(kv, key, data, attributes=attributes, mode=mode, use_multipart=False))

        def confirm() -> dict[str, str]:
            with suppress(FileNotFoundError, ValueError):  # gone again, or longer
                found, written = self.get(path, len(data)) if look else (b"", {})
                if found == data and written:
                    return written
            raise existing(self.name(path))

        kv = self.kv if len(data) <= _SMALL_BYTES else self._large
        return self.ask(path, "writing", write, confirm, patient=patient)

    def copy(self, path: str, to: str, *, replace: bool) -> None:
        """Copies an object at the server; one that is there is replaced, or FileExistsError."""
        import obstore

        key, other, name = self.key(path), self.key(to), self.name(to)

        def met() -> None:
            raise existing(name)

        self.ask(path, "copying", lambda: obstore.copy(self._large, key, other, overwrite=replace), met)

    def stream(self, path: str, chunks: Iterator[Any], size: int, concurrency: int) -> None:
        """Writes an object from chunks of `chunk_bytes` in their order, with a request for each, several at once.

        An object that is there is replaced. A chunk is memory that is sent without a copy, and then let go of.
        """
        import obstore

        key, taken = self.key(path), False

        def note(chunk: Any) -> Any:
            nonlocal taken
            taken = True
            return chunk

        def write() -> None:
            try:
                # A generator would hold a chunk until the next one is there.
                content: Any = map(note, chunks)
                obstore.put(self._streams, key, content, chunk_size=chunk_bytes(size), max_concurrency=concurrency)
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
        *,
        patient: bool = True,
    ) -> T:
        """Calls the store, and again while it refuses for the moment, if it is `patient`.

        `confirm` is called where a conditional write that is repeated meets what may be its own work. On the main
        thread a signal's handler, such as Ctrl-C's, need not wait for the answer.
        """
        from obstore import exceptions

        self._check_process()
        alone = threading.current_thread() is threading.main_thread()
        name, began, said, pauses = self.name(path), time.monotonic(), False, self._pauses() if patient else ()
        give_up_secs = sum(pauses) + 2 * _SILENT_SECS
        for number, pause in enumerate((*pauses, None)):
            try:
                return _threads.start(call).result() if alone else call()
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise self._no_bucket() from error
                raise missing(name) from error
            except exceptions.BaseError as error:
                why = reason(error)
                answer = _STATUS.search(why)
                status = int(answer[1]) if answer else None
                met = isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError)
                if met and confirm is not None and (status != 409 or pause is None):
                    if number:
                        return confirm()
                    raise existing(name) from error
                waited = time.monotonic() - began
                if (final := self._final(error, why, status)) is not None:
                    raise final from error
                if _CREDENTIALS.search(why):
                    refused = "credential provider" in why and not _PROVIDER_AWAY.search(why)
                    if refused or status in _REFUSED or pause is None or waited > give_up_secs:
                        raise AccessError(f"{self.root}: found no credentials: {why}") from error
                elif status in (401, 403):
                    raise AccessError(f"{name}: {doing} is not permitted: {why}") from error
                elif pause is None or waited > give_up_secs or status not in (None, *_PASSING):
                    number_of_error = errno.EBUSY if status == 429 else errno.EAGAIN
                    raise StorageError(name, OSError(number_of_error, f"{doing} failed: {why}")) from error
                if waited >= _QUIET_SECS and not said:
                    said = True
                    logging.warning("%s: %s has been failing for %.0f s: %s; trying on", name, doing, waited, why)
            except BaseException as error:
                if type(error).__name__ != _PANIC:
                    raise
                problem = OSError(errno.EIO, f"{doing} failed: the client has broken down: {reason(error)}")
                raise StorageError(name, problem) from error
            _monitoring.event("/epochckpt/storage/retry", doing=doing, status=str(status or ""))
            threading.Event().wait(pause * random.uniform(0.5, 1.0))  # thousands of nodes must not come back together
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


def chunk_bytes(size: int) -> int:
    """How much of a file of this size one request uploads."""
    return max(CHUNK_BYTES, -(-size // _MAX_CHUNKS))


def _version(answer: Any) -> dict[str, str]:
    """What names the version of an object that was read or written."""
    return {name: str(answer[name]) for name in ("e_tag", "version") if answer[name] is not None}


def missing(name: str) -> FileNotFoundError:
    """The error for an object that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def existing(name: str) -> FileExistsError:
    """The error for an object that is there already."""
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def reason(error: BaseException) -> str:
    """The first lines of a client's error, without the structure that it prints after them."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return text[:500] or type(error).__name__
