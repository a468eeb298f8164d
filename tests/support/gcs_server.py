"""A Google Cloud Storage of this process: the parts of its JSON and XML interfaces that clients of objects use.

Preconditions, generations, ranges, pages of listings and multipart uploads are those of the real service; accounts,
versions that are kept and classes of storage are missing. Buckets exist from the start, or not at all.
"""

import dataclasses
import datetime
import email.parser
import email.policy
import hashlib
import itertools
import json
import socket
import threading
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from xml.sax.saxutils import escape


@dataclasses.dataclass(frozen=True)
class Blob:
    """One generation of an object."""

    data: bytes
    generation: int
    created: datetime.datetime

    @property
    def etag(self) -> str:
        return f'"{self.generation}"'


class Refused(Exception):
    """An answer that is no success: an HTTP status and a reason."""

    def __init__(self, status: int, reason: str, code: str = "NoSuchKey"):
        super().__init__(reason)
        self.status, self.reason, self.code = status, reason, code


class Buckets:
    """The objects of all buckets, by name. Every method may be called by any thread."""

    def __init__(self, names: tuple[str, ...], page: int):
        self.page = page  # most names in one answer to a list request
        self.objects: dict[str, dict[str, Blob]] = {name: {} for name in names}
        self.uploads: dict[str, dict[int, bytes]] = {}  # multipart and resumable ones under way
        self._lock = threading.Lock()
        self._generations = itertools.count(1_700_000_000_000_001)

    def bucket(self, name: str) -> dict[str, Blob]:
        """Refuses with 404 where there is none."""
        if name not in self.objects:
            raise Refused(404, "The specified bucket does not exist.", "NoSuchBucket")
        return self.objects[name]

    def get(self, bucket: str, name: str) -> Blob:
        found = self.bucket(bucket).get(name)
        if found is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        return found

    def put(self, bucket: str, name: str, data: bytes, expected: str | None) -> Blob:
        """Stores a new generation; `expected` is the one that must be there, "0" for none."""
        objects = self.bucket(bucket)
        with self._lock:
            self._check(objects.get(name), expected)
            objects[name] = Blob(data, next(self._generations), datetime.datetime.now(datetime.UTC))
            return objects[name]

    def delete(self, bucket: str, name: str, expected: str | None) -> None:
        objects = self.bucket(bucket)
        with self._lock:
            found = objects.get(name)
            self._check(found, expected)
            if found is None:
                raise Refused(404, f"No such object: {bucket}/{name}")
            del objects[name]

    def _check(self, found: Blob | None, expected: str | None) -> None:
        if expected is not None and int(expected) != (found.generation if found else 0):
            raise Refused(412, "At least one of the pre-conditions you specified did not hold.", "PreconditionFailed")

    def list(self, bucket: str, query: dict[str, str], page_key: str) -> tuple[dict[str, Blob], list[str], str]:
        """One page of names: the objects, the prefixes that a delimiter makes, and where the next page begins."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        start, after, end = query.get("startOffset", ""), query.get("start-after", ""), query.get("endOffset")
        start = max(start, urllib.parse.unquote(query.get(page_key, "")))
        page = min(int(query.get("maxResults", query.get("max-keys", self.page))), self.page)
        found: dict[str, Blob] = {}
        prefixes: list[str] = []
        below = {name: blob for name, blob in self.bucket(bucket).copy().items() if name.startswith(prefix)}
        for name, blob in sorted(below.items()):
            if name < start or (after and name <= after) or (end and name >= end):
                continue
            if len(found) + len(prefixes) == page:
                return found, prefixes, name
            head, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if not cut:
                found[name] = blob
            elif prefix + head + cut not in prefixes:
                prefixes.append(prefix + head + cut)
        return found, prefixes, ""


class Handler(BaseHTTPRequestHandler):
    """Requests over connections that stay open, in silence."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        return

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)


class _Handler(Handler):
    buckets: Buckets  # of the subclass that the server makes
    delay_secs: Callable[[Handler], float]

    def do(self) -> None:
        """Any request: reads its body, finds what answers it, and sends that or a refusal."""
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        self.body = self.read_body()
        if delay_secs := self.delay_secs():
            threading.Event().wait(delay_secs)
        parts = [urllib.parse.unquote(part) for part in url.path.lstrip("/").split("/")]
        self.is_json = "storage" in parts[:2] and "v1" in parts[:3]
        try:
            if self.is_json:
                self.answer_json(parts)
            else:
                self.answer_xml(parts[0], "/".join(parts[1:]))
        except Refused as refused:
            text = {"error": {"code": refused.status, "message": refused.reason}}
            xml = f"<Error><Code>{refused.code}</Code><Message>{escape(refused.reason)}</Message></Error>"
            self.send(refused.status, json.dumps(text).encode() if self.is_json else xml.encode())

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_blob(self, blob: Blob) -> None:
        """The content of an object, or the range that was asked for."""
        headers = {
            "ETag": blob.etag,
            "x_goog_generation": str(blob.generation),
            "x_goog_metageneration": "1",
            "x_goog_stored_content_length": str(len(blob.data)),
            "Last_Modified": blob.created.strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "Content_Type": "application/octet-stream",
        }
        wanted = self.headers.get("Range")
        if wanted is None:
            return self.send(200, blob.data, **headers)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        size = len(blob.data)
        start = int(first) if first else max(size - int(last), 0)
        stop = min(int(last) + 1, size) if first and last else size
        if start >= size or start >= stop:
            return self.send(416, b"", Content_Range=f"bytes */{size}")
        return self.send(206, blob.data[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{size}", **headers)

    # The JSON interface: /storage/v1/b/<bucket>/o/<object>, and the same below /upload.

    def answer_json(self, parts: list[str]) -> None:
        if parts[0] == "download":
            parts.pop(0)
        upload = parts[0] == "upload"
        bucket, _, name = parts[4 if upload else 3], parts.pop(0) if upload else "", "/".join(parts[5:])
        expected = self.query.get("ifGenerationMatch")
        if upload:
            return self.answer_upload(bucket, expected)
        if len(parts) == 4:  # the bucket itself
            self.buckets.bucket(bucket)
            return self.send_json({"kind": "storage#bucket", "name": bucket})
        if not name and self.command == "GET":
            found, prefixes, token = self.buckets.list(bucket, self.query, "pageToken")
            out: dict[str, Any] = {"kind": "storage#objects", "prefixes": prefixes}
            out["items"] = [self.describe(bucket, name, blob) for name, blob in found.items()]
            return self.send_json(out | ({"nextPageToken": urllib.parse.quote(token)} if token else {}))
        if self.command == "DELETE":
            self.buckets.delete(bucket, name, expected)
            return self.send(204)
        blob = self.buckets.get(bucket, name)
        if self.query.get("ifGenerationNotMatch") == str(blob.generation):
            return self.send(304)
        if expected not in (None, str(blob.generation)):
            raise Refused(412, "conditionNotMet")
        if self.query.get("alt") == "media":
            return self.send_blob(blob)
        return self.send_json(self.describe(bucket, name, blob))

    def answer_upload(self, bucket: str, expected: str | None) -> None:
        kind, name = self.query.get("uploadType"), self.query.get("name", "")
        if kind == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            meta, media = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + self.body).iter_parts()
            name = name or json.loads(meta.get_payload(decode=True))["name"]
            self.body = media.get_payload(decode=True)
        elif kind == "resumable":
            return self.answer_resumable(bucket, expected)
        self.send_json(self.describe(bucket, name, self.buckets.put(bucket, name, self.body, expected)))

    def answer_resumable(self, bucket: str, expected: str | None) -> None:
        """Begins an upload, or takes its next piece."""
        name, upload = self.query.get("name"), self.query.get("upload_id")
        if upload is None:
            name = name or json.loads(self.body)["name"]
            upload = f"{bucket}/{name}/{len(self.buckets.uploads)}"
            self.buckets.uploads[upload] = {}
            query = urllib.parse.urlencode({"uploadType": "resumable", "name": name, "upload_id": upload})
            host = self.headers["Host"]
            return self.send(200, Location=f"http://{host}/upload/storage/v1/b/{bucket}/o?{query}")
        if upload not in self.buckets.uploads or name is None:
            raise Refused(404, "NoSuchUpload")
        pieces = self.buckets.uploads[upload]
        pieces[len(pieces)] = self.body
        data = b"".join(pieces.values())
        total = self.headers.get("Content-Range", "/*").rpartition("/")[2]
        if total == "*":
            return self.send(308, Range=f"bytes=0-{len(data) - 1}")
        del self.buckets.uploads[upload]
        self.send_json(self.describe(bucket, name, self.buckets.put(bucket, name, data, expected)))

    def describe(self, bucket: str, name: str, blob: Blob) -> dict[str, str]:
        when = blob.created.isoformat().replace("+00:00", "Z")
        numbers = {"generation": str(blob.generation), "metageneration": "1", "size": str(len(blob.data))}
        times = {"timeCreated": when, "updated": when}
        return {"kind": "storage#object", "name": name, "bucket": bucket, "etag": blob.etag, **numbers, **times}

    def send_json(self, content: Any) -> None:
        self.send(200, json.dumps(content).encode(), Content_Type="application/json")

    # The XML interface: /<bucket>/<object>.

    def answer_xml(self, bucket: str, name: str) -> None:
        expected = self.headers.get("x-goog-if-generation-match")
        upload = self.query.get("uploadId")
        if not name:
            found, prefixes, token = self.buckets.list(bucket, self.query, "continuation-token")
            return self.send_xml("ListBucketResult", self.listing(bucket, found, prefixes, token))
        if self.command == "POST" and "uploads" in self.query:
            upload = hashlib.md5(f"{bucket}/{name}/{len(self.buckets.uploads)}".encode()).hexdigest()
            self.buckets.bucket(bucket)
            self.buckets.uploads[upload] = {}
            ids = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><UploadId>{upload}</UploadId>"
            return self.send_xml("InitiateMultipartUploadResult", ids)
        if upload is not None:
            return self.answer_part(bucket, name, upload, expected)
        if self.command == "PUT":
            if source := urllib.parse.unquote(self.headers.get("x-goog-copy-source", "")):
                self.body = self.buckets.get(*source.lstrip("/").split("/", 1)).data
            blob = self.buckets.put(bucket, name, self.body, expected)
            return self.send(200, ETag=blob.etag, x_goog_generation=str(blob.generation))
        if self.command == "DELETE":
            self.buckets.delete(bucket, name, expected)
            return self.send(204)
        blob = self.buckets.get(bucket, name)
        if self.headers.get("If-None-Match") == blob.etag:
            return self.send(304)
        if expected not in (None, str(blob.generation)) or self.headers.get("If-Match", blob.etag) != blob.etag:
            raise Refused(412, "PreconditionFailed")
        return self.send_blob(blob)

    def answer_part(self, bucket: str, name: str, upload: str, expected: str | None) -> None:
        parts = self.buckets.uploads.get(upload)
        if parts is None:
            raise Refused(404, "NoSuchUpload")
        if self.command == "PUT":
            number = int(self.query["partNumber"])
            parts[number] = self.body
            return self.send(200, ETag=f'"{upload}-{number}"')
        if self.command == "DELETE":
            del self.buckets.uploads[upload]
            return self.send(204)
        numbers = [int(each.text or 0) for each in ET.fromstring(self.body).iter() if each.tag.endswith("PartNumber")]
        blob = self.buckets.put(bucket, name, b"".join(parts[number] for number in numbers), expected)
        del self.buckets.uploads[upload]
        text = f"<Bucket>{bucket}</Bucket><Key>{escape(name)}</Key><ETag>{escape(blob.etag)}</ETag>"
        self.send_xml("CompleteMultipartUploadResult", text, x_goog_generation=str(blob.generation))

    def listing(self, bucket: str, found: dict[str, Blob], prefixes: list[str], token: str) -> str:
        out = [f"<Name>{bucket}</Name><IsTruncated>{'true' if token else 'false'}</IsTruncated>"]
        if token:
            out.append(f"<NextContinuationToken>{escape(urllib.parse.quote(token))}</NextContinuationToken>")
        for name, blob in found.items():
            when = blob.created.isoformat().replace("+00:00", "Z")
            out.append(
                f"<Contents><Key>{escape(name)}</Key><Generation>{blob.generation}</Generation><Size>{len(blob.data)}"
                f"</Size><LastModified>{when}</LastModified><ETag>{escape(blob.etag)}</ETag></Contents>"
            )
        out += [f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes]
        return "".join(out)

    def send_xml(self, tag: str, content: str, **headers: str) -> None:
        body = f'<?xml version="1.0" encoding="UTF-8"?><{tag}>{content}</{tag}>'
        self.send(200, body.encode(), Content_Type="application/xml", **headers)


class Server(ThreadingHTTPServer):
    """A server whose open connections break when it ends."""

    request_queue_size = 256
    daemon_threads = True

    def __init__(self, *args: Any):
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Notes the connection."""
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forgets the connection."""
        self._open.discard(request)
        super().shutdown_request(request)

    def stop(self) -> None:
        """Ends `serve_forever` and everything that is connected."""
        self.shutdown()
        self.server_close()
        for each in self._open.copy():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


@contextmanager
def gcs_server(
    *names: str, page: int = 1000, delay_secs: Callable[[Handler], float] = lambda handler: 0.0
) -> Iterator[tuple[int, Buckets]]:
    """A server with these buckets on a free port of this host, until the block ends: its port and its content.

    `delay_secs` says how long each request waits once it has arrived.
    """
    buckets = Buckets(names, page)
    handler = type("Handler", (_Handler,), {"buckets": buckets, "delay_secs": delay_secs})
    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], buckets
    finally:
        server.stop()
        thread.join()
