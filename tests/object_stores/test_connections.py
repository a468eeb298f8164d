"""Connections that fail say why, and are not tried for a minute where that cannot help."""

import pathlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator

import obstore
import pytest

from epochckpt.errors import AccessError, StorageError
from epochckpt.storage import Store
from epochckpt.storage.object_client import Client
from epochckpt.storage.object_store import ObjectStore
from epochckpt.testing import write_file
from tests.support.gcs_server import Handler, Server
from tests.support.object_servers import EMULATORS, Bucket


def at(scheme: str, server: str, pauses: list[float]) -> Store:
    """A bucket of a server for which no credentials are needed.

    The pauses before requests are repeated are added to the list; none is made.
    """
    url = f"{scheme}://bucket/run?endpoint={server}&anonymous=true"
    return ObjectStore(url, EMULATORS[scheme].settings, pause=pauses.append)


@pytest.mark.parametrize("scheme", EMULATORS)
def test_nobody_listens(scheme: str) -> None:
    """A server may be starting: the request is repeated, and the error says that the connection is refused."""
    pauses = list[float]()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = at(scheme, f"http://127.0.0.1:{unused.getsockname()[1]}", pauses)
        said = rf"{scheme}://bucket/run: storage did not answer.*listing failed.*Connection refused"
        with pytest.raises(StorageError, match=said):
            store.list("")
    assert len(pauses) == 8


@pytest.mark.parametrize("scheme", EMULATORS)
def test_a_server_whose_name_is_unknown_is_asked_a_few_times(scheme: str) -> None:
    """Few, unless the resolver says itself that the failure is temporary (as it does where there is no network)."""
    pauses = list[float]()
    with pytest.raises(StorageError, match="name cannot be looked up") as caught:
        at(scheme, "http://nowhere.invalid", pauses).read("a", limit_bytes=1)
    assert len(pauses) == (8 if "emporary" in str(caught.value) else 3)


class TlsServer:
    """A server of TLS, whose certificate nobody has signed."""

    def __init__(self, folder: pathlib.Path):
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        words += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        words += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        self._server = Server(("127.0.0.1", 0), Refusing)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.stop()


class Refusing(Handler):
    """Never reached: nobody trusts the server."""

    def do_GET(self) -> None:
        self.send_error(500)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    if shutil.which("openssl") is None:
        pytest.skip("a certificate is made with openssl")
    server = TlsServer(tmp_path_factory.mktemp("tls"))
    yield server
    server.close()


@pytest.mark.parametrize("scheme", EMULATORS)
def test_a_certificate_that_is_not_trusted_is_said_at_once(scheme: str, tls: TlsServer) -> None:
    """No repetition mends it. The error says what does."""
    pauses = list[float]()
    for call in (
        lambda store: store.read("a", limit_bytes=1),
        lambda store: store.create("a", b"1"),
        lambda store: write_file(store, "large", bytes(9 << 20)),
    ):
        with pytest.raises(StorageError, match=r"certificate is not trusted.*SSL_CERT_FILE") as caught:
            call(at(scheme, f"https://localhost:{tls.port}", pauses))
        assert len(str(caught.value)) < 1000
    assert not pauses


@pytest.mark.parametrize("server", ["gs"], indirect=True)
@pytest.mark.parametrize("scheme", EMULATORS)
def test_a_server_without_tls_is_said_at_once(scheme: str, cloud: Bucket) -> None:
    pauses = list[float]()
    with pytest.raises(StorageError, match=r"TLS cannot be agreed on.*https://"):
        at(scheme, cloud.proxy.url.replace("http:", "https:"), pauses).read("a", limit_bytes=1)
    assert not pauses


def refusing(text: str) -> Callable[[], object]:
    """A request that is always refused, as the client says it."""

    def call() -> object:
        raise obstore.exceptions.GenericError(text)

    return call


PARTS = {
    "s3": "DeleteObjects request failed for key a: {} (code: AccessDenied)",
    "az": "Bulk delete request failed for key a: {} (code: 409)",
}


@pytest.mark.parametrize(
    ("scheme", "text", "said"),
    [
        ("s3", "Access Denied", "deleting is not permitted"),
        ("s3", "Access Denied because object protected by object lock.", "a policy of the bucket .* forbids deleting"),
        ("az", "This operation is not permitted as the blob is immutable due to a policy.", "a policy .* forbids"),
    ],
)
def test_a_key_that_may_not_be_deleted_among_many_is_an_answer(scheme: str, text: str, said: str) -> None:
    """The request itself has succeeded: what became of a key stands in the answer, and no repetition changes it."""
    pauses = list[float]()
    settings = EMULATORS[scheme].settings
    client = Client(f"{scheme}://bucket/run?anonymous=true", settings, pause=pauses.append)
    with pytest.raises(AccessError, match=said):
        client.ask("a", "deleting", refusing(PARTS[scheme].format(text)))
    assert not pauses
