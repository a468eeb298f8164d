"""Requests to a bucket (`gs://`, `s3://`, `memory://`), over the `obstore` package: each ends, and says what it met.

- A request that the store refuses for the moment (429, 5xx, no connection) is repeated with growing pauses; after a few
  seconds a warning says so, and at the end a StorageError.
- A conditional write whose answer was lost meets its own object when it is repeated: the content decides.
- A bucket that is missing or forbidden is an error of its own, never an empty folder.
"""

import datetime
import errno
import functools
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from absl import logging

from epochckpt import _threads
from epochckpt.errors import AccessError, InvalidArgumentError, StorageError, UnsupportedError
from epochckpt.storage.store import check_path, too_large

T = TypeVar("T")

CHUNK_BYTES = 8 << 20
"""One part of a file that is streamed. A smaller file is one request."""

_CHUNKS = 4  # of one file under way at once
_MAX_CHUNKS = 9000  # of one file: S3 takes 10,000
_SMALL_BYTES = 1 << 20  # of a write whose answer is expected soon
_CONNECT_SECS = 5
_SILENT_SECS = 15  # of a server, before a small request counts as failed
_LARGE_SECS = 90  # one request with its answer
_PAUSES_SECS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0)  # before a request is repeated: half a minute in all
_QUIET_SECS = 3.0  # of repeating, before it is said
_GIVE_UP_SECS = 60.0  # no request is repeated after that
_URL = re.compile(r"(gs|s3|memory)://([\w.~-]+)(?:/+([^?#]*))?")
_PREFIX = re.compile(r"(?:(?!\.{1,2}/)[^/]+/)*(?!\.{1,2}/?$)[^/]+/*")
_UNNAMEABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_STATUS = re.compile(r"status code: (\d+)")
_PASSING = frozenset({408, 409, 429, 500, 502, 503, 504})
_REFUSED = frozenset({400, 401, 403, 404})  # by a server of credentials
_CREDENTIALS = re.compile(r"//169\.254\.|//metadata\.google|token request")


@functools.cache
def _memory() -> Any:
    """What `memory://` holds in this process."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _span(secs: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=secs)


@functools.lru_cache(maxsize=32)
def _open(
    scheme: str, bucket: str, endpoint: str, silent_secs: float, max_retries: int, environment: tuple[Any, ...]
) -> Any:
    """The client of a bucket, whose connections all stores of this process share under one environment."""
    from obstore import store as stores

    shared: dict[str, Any] = {
        "client_options": {
            "connect_timeout": _span(_CONNECT_SECS),
            "read_timeout": _span(silent_secs),
            "timeout": _span(_LARGE_SECS),
            "allow_http": endpoint.startswith("http://"),
        },
        "retry_config": {
            "max_retries": max_retries,
            "backoff": {"init_backoff": _span(0.5), "max_backoff": _span(8), "base": 2},
            "retry_timeout": _span(2 * _LARGE_SECS),
        },
    }
    if scheme == "gs":
        # An emulator knows no accounts.
        config: Any = {"google_base_url": endpoint, "google_bearer_token": "none"} if endpoint else None
        return stores.GCSStore(bucket, config=config, **shared)
    if profile := dict(environment).get("AWS_PROFILE"):
        import boto3.session
        from obstore.auth.boto3 import Boto3CredentialProvider

        shared["credential_provider"] = Boto3CredentialProvider(boto3.session.Session(profile_name=profile))
    config = {"conditional_put": "etag", **({"endpoint": endpoint} if endpoint else {})}
    return stores.S3Store(bucket, config=config, **shared)


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

    The cloud's usual environment gives credentials, region and endpoint (`AWS_ENDPOINT_URL`, `STORAGE_EMULATOR_HOST`).

    Raises:
        InvalidArgumentError: no such scheme, no bucket, or settings that the client does not take.
    """

    def __init__(self, root: str):
        found = _URL.fullmatch(root)
        if found is None:
            raise InvalidArgumentError(
                f"{root!r} names no store: expected gs://bucket/run, s3://bucket/run, memory://name or file:///path"
            )
        self.root, (scheme, bucket, prefix) = root.rstrip("/"), found.groups(default="")
        if prefix and (not _PREFIX.fullmatch(prefix) or _UNNAMEABLE.search(prefix)):
            raise InvalidArgumentError(
                f"{root!r}: an empty part, '.', '..' or a control character is in no object's name"
            )
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        if scheme == "memory":
            self.kv = self._large = self._streams = _memory()
            self._prefix = f"{bucket}/{self._prefix}"
            return
        environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "GOOGLE_"))))
        try:
            client = functools.partial(_open, scheme, bucket, _endpoint(scheme))
            self.kv = client(_SILENT_SECS, 0, environment)
            self._large = client(_LARGE_SECS, 0, environment)
            self._streams = client(_LARGE_SECS, len(_PAUSES_SECS), environment)  # it repeats single parts itself
        except InvalidArgumentError:
            raise
        except ImportError as error:
            raise InvalidArgumentError(f"{root}: AWS_PROFILE is set, which needs boto3: pip install boto3") from error
        except Exception as error:
            raise InvalidArgumentError(f"{root!r} cannot be opened: {reason(error)}") from error

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
            version = {name: str(found.meta[name]) for name in ("e_tag", "version") if found.meta[name] is not None}
            return bytes(found.bytes()), version

        return self.ask(path, "reading", get)

    def head(self, path: str) -> Any:
        """What the store says of an object (`obstore.ObjectMeta`); None if there is none."""
        import obstore

        key = self.key(path)
        try:
            return self.ask(path, "looking for", lambda: obstore.head(self.kv, key))
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes, version: dict[str, str] | None = None) -> None:
        """Writes an object if there is none, or none but this version; else FileExistsError."""
        import obstore

        key = self.key(path)
        mode: Any = version or "create"

        def confirm() -> None:
            with suppress(FileNotFoundError, ValueError):  # gone again, or longer
                if self.get(path, len(data))[0] == data:
                    return
            raise existing(self.name(path))

        kv = self.kv if len(data) <= _SMALL_BYTES else self._large
        write = functools.partial(obstore.put, kv, key, data, mode=mode, use_multipart=False)
        self.ask(path, "writing", write, confirm)

    def stream(self, path: str, pieces: Iterator[bytes], size: int) -> None:
        """Writes an object from pieces in their order, in several requests; one that is there is replaced."""
        import obstore

        key, chunk, taken = self.key(path), max(CHUNK_BYTES, -(-size // _MAX_CHUNKS)), False

        def take() -> Iterator[bytes]:
            nonlocal taken
            for piece in pieces:
                taken = True
                yield piece

        def write() -> None:
            try:
                obstore.put(self._streams, key, take(), chunk_size=chunk, max_concurrency=_CHUNKS)
            except (obstore.exceptions.BaseError, FileNotFoundError) as error:
                if not taken:
                    raise
                raise StorageError(
                    self.name(path), OSError(errno.EAGAIN, f"writing failed: {reason(error)}")
                ) from error

        self.ask(path, "writing", write)

    def ask(self, path: str, doing: str, call: Callable[[], T], confirm: Callable[[], T] | None = None) -> T:
        """Calls the store, and again while it refuses for the moment.

        `confirm` is called where a conditional write that is repeated meets what may be its own work. On the main
        thread a signal's handler, such as Ctrl-C's, need not wait for the answer.
        """
        from obstore import exceptions

        alone = threading.current_thread() is threading.main_thread()
        name, began, said = self.name(path), time.monotonic(), False
        for number, pause in enumerate((*_PAUSES_SECS, None)):
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
                    if status in _REFUSED or pause is None or waited > _GIVE_UP_SECS:
                        raise AccessError(f"{self.root}: found no credentials: {why}") from error
                elif status in (401, 403):
                    raise PermissionError(errno.EACCES, f"{doing} is not permitted: {why}", name) from error
                elif pause is None or waited > _GIVE_UP_SECS or status not in (None, *_PASSING):
                    raise StorageError(name, OSError(errno.EAGAIN, f"{doing} failed: {why}")) from error
                if waited >= _QUIET_SECS and not said:
                    said = True
                    logging.warning("%s: %s has been failing for %.0f s: %s; trying on", name, doing, waited, why)
            threading.Event().wait(pause)
        raise AssertionError  # the last round returns or raises

    def _final(self, error: Exception, why: str, status: int | None) -> Exception | None:
        """The error for an answer that no repetition changes, whatever was asked."""
        if "object with invalid path" in why:
            return UnsupportedError(f"{self.root}: an object's name is no path; rename or remove it: {why}")
        if "Received redirect" in why or status in (301, 307):
            return AccessError(f"{self.root}: set AWS_REGION to the region of the bucket: {why}")
        if "builder error" in why or "NotSupported" in type(error).__name__:
            return InvalidArgumentError(f"{self.root}: {why}")
        return self._no_bucket() if status == 404 and not _CREDENTIALS.search(why) else None

    def _no_bucket(self) -> AccessError:
        return AccessError(f"{self.root}: there is no such bucket; create it, or correct the name")


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
