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
from typing import Any, TypeVar

from absl import logging

from epochckpt import _threads
from epochckpt.errors import AccessError, InvalidArgumentError, StorageError, UnsupportedError
from epochckpt.storage.store import check_path, too_large

T = TypeVar("T")

CHUNK_BYTES = 16 << 20
"""One part of a file that is streamed. A smaller file is one request."""

_CHUNKS = 4  # of one file under way at once
_CONNECT_SECS = 5
_SILENT_SECS = 15  # of a server, before a request counts as failed
_REQUEST_SECS = 120  # one request with its answer
_PAUSES_SECS = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0)  # before a request is repeated: half a minute in all
_QUIET_SECS = 3.0  # of repeating, before it is said
_GIVE_UP_SECS = 60.0  # no request is repeated after that
_URL = re.compile(r"(gs|s3|memory)://([^/?#]+)/*([^?#]*)")
_PREFIX = re.compile(r"(?:(?!\.{1,2}/)[^/\x00-\x1f\x7f]+/)*(?!\.{1,2}/?$)[^/\x00-\x1f\x7f]+/*")
_STATUS = re.compile(r"status code: (\d+)")
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
_NO_CREDENTIALS = re.compile(r"//169\.254\.|//metadata\.google|token request")


@functools.cache
def _memory() -> Any:
    """What `memory://` holds in this process."""
    from obstore.store import MemoryStore

    return MemoryStore()


def _span(secs: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=secs)


@functools.lru_cache(maxsize=16)
def _open(scheme: str, bucket: str, endpoint: str, profile: str, silent_secs: float, max_retries: int) -> Any:
    """The client of a bucket, whose connections all stores of this process share."""
    from obstore import store as stores

    shared: dict[str, Any] = {
        "client_options": {
            "connect_timeout": _span(_CONNECT_SECS),
            "read_timeout": _span(silent_secs),
            "timeout": _span(_REQUEST_SECS),
            "allow_http": endpoint.startswith("http://"),
        },
        "retry_config": {"max_retries": max_retries, "retry_timeout": _span(_REQUEST_SECS)},
    }
    if scheme == "gs":
        # An emulator knows no accounts.
        config: Any = {"google_base_url": endpoint.rstrip("/"), "google_bearer_token": "none"} if endpoint else None
        return stores.GCSStore(bucket, config=config, **shared)
    if profile:
        import boto3.session
        from obstore.auth.boto3 import Boto3CredentialProvider

        shared["credential_provider"] = Boto3CredentialProvider(boto3.session.Session(profile_name=profile))
    return stores.S3Store(bucket, **shared)


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
        self.root, (scheme, bucket, prefix) = root.rstrip("/"), found.groups()
        if prefix and not _PREFIX.fullmatch(prefix):
            raise InvalidArgumentError(
                f"{root!r}: an empty part, '.', '..' or a control character is in no object's name"
            )
        self._prefix = prefix.rstrip("/") + "/" if prefix else ""
        if scheme == "memory":
            self.kv = self._streams = _memory()
            self._prefix = f"{bucket}/{self._prefix}"
            return
        endpoint = os.environ.get("STORAGE_EMULATOR_HOST" if scheme == "gs" else "AWS_ENDPOINT_URL", "")
        profile = os.environ.get("AWS_PROFILE", "") if scheme == "s3" else ""
        try:
            self.kv = _open(scheme, bucket, endpoint, profile, _SILENT_SECS, 0)
            # It repeats parts itself. Several share one line, and no answer comes before a part is there.
            self._streams = _open(scheme, bucket, endpoint, profile, _REQUEST_SECS, len(_PAUSES_SECS))
        except ImportError as error:
            raise InvalidArgumentError(f"{root}: AWS_PROFILE={profile!r} needs boto3: pip install boto3") from error
        except Exception as error:
            raise InvalidArgumentError(f"{root!r} cannot be opened: {reason(error)}") from error

    def key(self, path: str) -> str:
        """The key of a file."""
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
            try:
                if self.get(path, len(data))[0] == data:
                    return
            except (FileNotFoundError, ValueError):
                pass
            raise _exists(self.name(path))

        write = functools.partial(obstore.put, self.kv, key, data, mode=mode, use_multipart=False)
        self.ask(path, "writing", write, confirm)

    def stream(self, path: str, pieces: Iterator[bytes]) -> None:
        """Writes an object from pieces in their order, in several requests; one that is there is replaced."""
        import obstore

        key, taken = self.key(path), False

        def take() -> Iterator[bytes]:
            nonlocal taken
            for piece in pieces:
                taken = True
                yield piece

        def write() -> None:
            try:
                obstore.put(self._streams, key, take(), chunk_size=CHUNK_BYTES, max_concurrency=_CHUNKS)
            except obstore.exceptions.BaseError as error:
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
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                if number and confirm is not None:
                    return confirm()
                raise _exists(name) from error
            except exceptions.BaseError as error:
                why = reason(error)
                answer = _STATUS.search(why)
                status = int(answer[1]) if answer else None
                if _NO_CREDENTIALS.search(why):
                    raise AccessError(f"{self.root}: found no credentials: {why}") from error
                if status in (401, 403):
                    raise PermissionError(errno.EACCES, f"{doing} is not permitted: {why}", name) from error
                if status == 404:
                    raise self._no_bucket() from error
                if "invalid path" in why:
                    raise UnsupportedError(
                        f"{self.root}: an object's name is no path; rename or remove it: {why}"
                    ) from error
                waited = time.monotonic() - began
                if pause is None or waited > _GIVE_UP_SECS or status not in (None, *_PASSING):
                    raise StorageError(name, OSError(errno.EAGAIN, f"{doing} failed: {why}")) from error
                if waited >= _QUIET_SECS and not said:
                    said = True
                    logging.warning("%s: %s has been failing for %.0f s: %s; trying on", name, doing, waited, why)
            threading.Event().wait(pause)
        raise AssertionError  # the last round returns or raises

    def _no_bucket(self) -> AccessError:
        return AccessError(f"{self.root}: there is no such bucket; create it, or correct the name")


def missing(name: str) -> FileNotFoundError:
    """The error for an object that is not there."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)


def _exists(name: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)


def reason(error: BaseException) -> str:
    """The first lines of a client's error, without the structure that it prints after them."""
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return text[:500] or type(error).__name__
