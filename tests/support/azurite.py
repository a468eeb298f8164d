"""Azurite, Microsoft's emulator of Azure Blob Storage (https://github.com/Azure/Azurite), a program of Node."""

import base64
import datetime
import fcntl
import hashlib
import hmac
import os
import pathlib
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # well known
VERSION = "3.35.0"
_PROGRAM = "EPOCHCKPT_AZURITE"  # names the program `azurite-blob`, or says "none"
_API = "2021-08-06"


def program() -> str:
    """The program; it is installed with npm into the user's cache, once. Skips the test where there is no npm."""
    found = os.environ.get(_PROGRAM) or shutil.which("azurite-blob")
    if found == "none":
        pytest.skip(f"{_PROGRAM} says that Azurite could not be installed")
    if found:
        return found
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"Azurite needs npm, or {_PROGRAM} to name its azurite-blob")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = pathlib.Path(cache, "epochckpt-tests", f"azurite-{VERSION}")
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "node_modules" / ".bin" / "azurite-blob"
    with open(folder / "lock", "w") as lock:  # other processes of the test run wait here
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            words = [npm, "install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder)]
            ended = subprocess.run([*words, f"azurite@{VERSION}"], capture_output=True, text=True, timeout=300)
            if ended.returncode:
                pytest.skip(f"npm cannot install Azurite: {(ended.stderr or ended.stdout)[-300:]}")
            (folder / "complete").touch()
    return str(made)


@contextmanager
def azurite_server(*names: str) -> Iterator[int]:
    """Azurite with these containers, on a free port of this host until the block ends; it keeps them in memory."""
    words = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    server = subprocess.Popen([program(), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    try:
        said = []
        for line in server.stdout:
            said.append(line)
            if found := re.search(r"listens on http://[\d.]+:(\d+)", line):
                break
        else:
            pytest.fail(f"Azurite does not start: {''.join(said)}")
        port = int(found[1])
        for name in names:
            _create(port, name)
        yield port
    finally:
        server.terminate()
        server.wait(30)
        server.stdout.close()


def _create(port: int, name: str) -> None:
    """Makes a container."""
    date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = f"x-ms-date:{date}\nx-ms-version:{_API}\n"
    text = f"PUT{12 * chr(10)}{headers}/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": _API,
            "Authorization": f"SharedKey {ACCOUNT}:{signed}",
            "Content-Length": "0",
        },
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 201
