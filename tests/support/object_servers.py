"""Real servers of object stores for tests, behind a proxy that counts requests and breaks them on purpose."""

import dataclasses
import http.client
import logging
import re
import socket
import struct
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

from tests.support import azurite
from tests.support.gcs_server import Handler, Server, gcs_server

BUCKET = "bucket"
_PIECE = 1 << 20
_OWN_HEADERS = ("transfer-encoding", "expect", "content-length")  # a header that comes twice is refused by Node


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to one request in place of, or after, what the server would do.

    Attributes:
        delay_secs: the request waits first.
        status: it is refused with this status; the server never sees it.
        reset: the connection breaks before the server sees the request.
        lost: the server does what was asked, and the connection breaks in place of the answer.
        cut: so many bytes of the answer's body arrive, then the connection breaks.
        held: the request waits until this is set.
        heedless: the server does not hear of conditions.
        withheld: called when the server has done what was asked; its answer goes on when this returns.
        late: the connection breaks, and the server is asked when this returns: nobody hears its answer.
        slow_secs: the answer's body comes in two pieces, the second so much later.
        halved: the answer's body comes in two pieces, the second when this is set.
        rewrite: gives another answer for the server's, as a cache or another proxy would.
        flipped: one bit of the answer's body, at this byte, is another one; beyond its end, that of the last byte.
        short: the answer's body, and the length that it is said to have, are only so long.
        code: the error code in the body of a refusal.
    """

    delay_secs: float = 0.0
    status: int = 0
    reset: bool = False
    lost: bool = False
    cut: int | None = None
    held: threading.Event | None = None
    heedless: bool = False
    withheld: Callable[[], object] | None = None
    late: Callable[[], object] | None = None
    slow_secs: float = 0.0
    halved: threading.Event | None = None
    rewrite: Callable[["Answer"], "Answer"] | None = None
    flipped: int | None = None
    short: int | None = None
    code: str = "Injected"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the server answers to one request."""

    status: int
    headers: list[tuple[str, str]]
    content: bytes


@dataclasses.dataclass(frozen=True)
class Request:
    """One request that reached the proxy."""

    method: str
    target: str  # path and query
    headers: dict[str, str] = dataclasses.field(default_factory=dict)  # by names in small letters

    @property
    def kind(self) -> str:
        """GET, HEAD, PUT, POST, DELETE or LIST."""
        path, _, query = self.target.partition("?")
        listed = self.method == "GET" and any(word in query for word in ("list-type", "prefix=", "delimiter="))
        return "LIST" if listed or (self.method == "GET" and path.endswith("/o")) else self.method

    @property
    def writes(self) -> bool:
        """Whether it may change something."""
        return self.kind in ("PUT", "POST", "DELETE")


class Proxy:
    """An HTTP proxy in front of one server. `decide` chooses the fault of each request; None lets it through."""

    def __init__(self, upstream: int):
        self.upstream = upstream
        self.requests: list[Request] = []
        self.decide: Callable[[Request], Fault | None] = lambda request: None
        self.delay_secs = 0.0
        self.prefix = ""  # of the paths of all requests, which the server does not see
        self.host = ""  # if not empty: of virtual-hosted requests, which are all that is answered then
        self._under_way, self._changed = 0, threading.Condition()
        self._server = Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self.port: int = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @contextmanager
    def counted(self) -> Iterator[dict[str, int]]:
        """The requests during the block, by kind."""
        start = len(self.requests)
        counts: dict[str, int] = {}
        yield counts
        for request in self.requests[start:]:
            counts[request.kind] = counts.get(request.kind, 0) + 1

    @contextmanager
    def carrying_out(self) -> Iterator[None]:
        """A request is under way during the block."""
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def settle(self, timeout_secs: float) -> bool:
        """Waits until no request is under way, also none whose client has gone; False if one still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._under_way, timeout_secs)

    def close(self) -> None:
        """Ends the server; connections that are open break."""
        self._server.stop()
        self._thread.join()


class _Handler(Handler):
    proxy: Proxy
    _forward: http.client.HTTPConnection | None = None

    def do(self) -> None:
        """Forwards one request, with the fault that was decided."""
        with self.proxy.carrying_out():
            self._do()

    def _do(self) -> None:
        if self.proxy.host:  # clients send it whole URLs, as to any HTTP proxy
            found = re.fullmatch(rf"http://([^/.]+)\.{re.escape(self.proxy.host)}(/.*)", self.path)
            if found is None:
                self.read_body()
                return self.send_error(400, "the bucket is not in the name of the host")
            self.path = f"/{found[1]}{found[2]}"
            del self.headers["Host"]
        if not self.path.startswith(self.proxy.prefix):
            return self.send_error(404)
        self.path = self.path.removeprefix(self.proxy.prefix)
        request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
        self.proxy.requests.append(request)
        fault = self.proxy.decide(request) or Fault()
        body = self.read_body()
        if fault.held is not None:
            fault.held.wait(60)
        if wait := fault.delay_secs + self.proxy.delay_secs:
            threading.Event().wait(wait)
        if fault.reset:
            return self.break_off()
        if fault.status:
            self.send_response(fault.status)
            text = b"" if self.command == "HEAD" else f"<Error><Code>{fault.code}</Code></Error>".encode()
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return None
        if fault.late is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            fault.late()
        if self._forward is None:
            self._forward = http.client.HTTPConnection("127.0.0.1", self.proxy.upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _OWN_HEADERS}
        if fault.heedless:
            headers = {name: value for name, value in headers.items() if "if-" not in name.lower()}
        self._forward.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        answer = self._forward.getresponse()
        content = answer.read()
        if fault.flipped is not None and content:
            at = min(fault.flipped, len(content) - 1)
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        content = content if fault.short is None else content[: fault.short]
        if fault.late is not None:
            return self.break_off()
        if fault.withheld is not None:
            fault.withheld()
        if fault.lost:
            return self.break_off()
        given = Answer(answer.status, answer.getheaders(), content)
        if fault.rewrite is not None:
            given = fault.rewrite(given)
        content = given.content
        self.send_response_only(given.status)
        for name, value in given.headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        if length is not None and given.status not in (204, 304):
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault.slow_secs or fault.halved is not None:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            (fault.halved or threading.Event()).wait(fault.slow_secs or 60)
            content = content[len(content) // 2 :]
        self.wfile.write(content if fault.cut is None else content[: fault.cut])
        return self.break_off() if fault.cut is not None and fault.cut < len(content) else None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

    def break_off(self) -> None:
        """Resets the connection."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def finish(self) -> None:
        """The end of a connection."""
        if self._forward is not None:
            self._forward.close()
        try:
            super().finish()
        except (OSError, ValueError):  # broken off
            return


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket on a server, and the proxy in front of it."""

    scheme: str
    proxy: Proxy
    environment: dict[str, str]

    def new_url(self) -> str:
        """A directory that nothing has used."""
        return f"{self.scheme}://{BUCKET}/{uuid.uuid4().hex}"


@contextmanager
def s3_server(*names: str) -> Iterator[int]:
    """moto's S3 with these buckets, on a free port of this host until the block ends."""
    import boto3
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_object(self: S3Response) -> Any:
        """S3 checks a condition and writes in one step; moto does so in two, between which another thread may write."""
        with one_at_a_time:
            return put(self)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    S3Response.put_object = put_object
    try:
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
        for name in names:
            client.create_bucket(Bucket=name)
        yield port
    finally:
        server.stop()
        S3Response.put_object = put


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emulator:
    """What stands for the servers of a scheme in tests.

    Attributes:
        start: a server with a bucket of this name, on a port of this host until the block ends; a page of a listing
            has so many names where the server can do that.
        variable: the variable of the environment that names the server.
        path: the path in the URL of the server.
        environment: the other variables that a client needs.
        settings: the settings without which a client cannot be made.
        policy: how the server refuses to delete what a policy of the bucket keeps.
        slow: whether long tests of it are left to CI.
    """

    start: Callable[[str, int], AbstractContextManager[int]]
    variable: str
    path: str = ""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    policy: Fault
    slow: bool = False


@contextmanager
def _google(name: str, page: int) -> Iterator[int]:
    with gcs_server(name, page=page) as (port, _):
        yield port


EMULATORS = {
    "gs": Emulator(
        start=_google,
        variable="STORAGE_EMULATOR_HOST",
        policy=Fault(status=403, code="RetentionPolicyNotMet"),
    ),
    "s3": Emulator(
        start=lambda name, page: s3_server(name),
        variable="AWS_ENDPOINT_URL",
        environment={"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"},
        settings={"region": "x"},
        policy=Fault(status=403, code="AccessDenied</Code><Message>object protected by object lock</Message><Code>"),
    ),
    "az": Emulator(
        start=lambda name, page: azurite.azurite_server(name),
        variable="AZURE_STORAGE_ENDPOINT",
        path=f"/{azurite.ACCOUNT}",
        environment={"AZURE_STORAGE_ACCOUNT_NAME": azurite.ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": azurite.KEY},
        settings={"account": "a"},
        policy=Fault(status=409, code="BlobImmutableDueToPolicy"),
        slow=True,
    ),
}
"""The servers of tests, by scheme; every scheme that has a client has one."""

SCHEMES = [
    pytest.param(scheme, marks=pytest.mark.slow) if emulator.slow else scheme for scheme, emulator in EMULATORS.items()
]
"""The schemes, as parameters of tests that take long."""


@contextmanager
def bucket(scheme: str, page: int = 50) -> Iterator[Bucket]:
    """A bucket of this scheme, and the environment in which clients find it.

    A `page` of a listing has so many names on `gs`; the real services have 1000.
    """
    emulator = EMULATORS[scheme]
    with emulator.start(BUCKET, page) as port:
        proxy = Proxy(port)
        settings = {emulator.variable: proxy.url + emulator.path, **emulator.environment}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            try:
                yield Bucket(scheme, proxy, settings)
            finally:
                proxy.close()
