"""The index of an OCDBT database whose values lie in other files (https://google.github.io/tensorstore/kvstore/ocdbt).

One manifest, one B-tree leaf node, no compression. A value is either bytes in the node or a piece of any file below the
database's folder, so that existing files become readable as a key-value store without being copied.
"""

import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import google_crc32c

MANIFEST = "manifest.ocdbt"
NODE = "index.0"
MAX_ENTRIES = 2**20  # of a B-tree node: TensorStore reads none with more

Piece = tuple[str, int, int]  # file relative to the database's folder, offset, length in bytes

_MANIFEST_MAGIC = 0x0CDB3A2A
_NODE_MAGIC = 0x0CDB20DE
_LEAF = b"\0"  # a node's height


class Index:
    """A database of at least one entry. Its keys and pieces are fixed; its values keep their lengths."""

    def __init__(self, entries: Mapping[bytes, bytes | Piece]):
        keys = sorted(entries)
        self._inline = {k: v for k in keys if not isinstance(v := entries[k], tuple)}
        self._indirect_bytes = sum(v[2] for v in entries.values() if isinstance(v, tuple))
        self._keys = len(keys)
        self._files = sorted({piece[0] for piece in entries.values() if isinstance(piece, tuple)})
        self._rest = _node_rest(keys, [entries[k] for k in keys], self._files)

    def files(
        self,
        values: Mapping[bytes, bytes],
        token: bytes,
        written_ns: int,
        moved: Callable[[str], str] = lambda path: path,
    ) -> dict[str, bytes]:
        """The two files, by name: a function of all that is given, so that they can be made again.

        `values` replace values of the same length; `token` are 16 bytes that no other database has; `moved` says where
        each of the other files is now.
        """
        inline = {**self._inline, **values}
        assert [*map(len, inline.values())] == [*map(len, self._inline.values())]
        table = _file_table([*map(moved, self._files)])
        node = _envelope(_NODE_MAGIC, b"".join([_LEAF, table, self._rest, *inline.values()]))
        return {NODE: node, MANIFEST: _manifest(len(node), self._keys, self._indirect_bytes, token, written_ns)}


def _node_rest(keys: Sequence[bytes], values: Sequence[bytes | Piece], files: Sequence[str]) -> bytes:
    """The node after the table of files, without the values that lie in it, which come last."""
    pieces = [v for v in values if isinstance(v, tuple)]
    number = {name: i for i, name in enumerate(files)}
    shared = [_shared(a, b) for a, b in itertools.pairwise(keys)]
    cut = [0, *shared]
    body = [
        _varint(len(keys)),
        _varints(shared),
        _varints(len(k) - c for k, c in zip(keys, cut, strict=True)),
        b"".join(k[c:] for k, c in zip(keys, cut, strict=True)),
        _varints(v[2] if isinstance(v, tuple) else len(v) for v in values),
        bytes(isinstance(v, tuple) for v in values),
        _varints(number[p[0]] for p in pieces),
        _varints(p[1] for p in pieces),
    ]
    return b"".join(body)


def _manifest(node_bytes: int, keys: int, indirect_bytes: int, token: bytes, written_ns: int) -> bytes:
    config = [
        token,
        b"\0",  # a single manifest file
        _varints((2**10, 2**30)),  # the most bytes of a value in the node, and of a node
        b"\4",  # arity of the tree, as a power of 2
        _varint(0),  # no compression
    ]
    version = [
        _varints((1, 1)),  # one version, whose generation number is 1
        b"\0",  # its root is a leaf
        _varints((0, 0, node_bytes)),  # in the first file, from its start
        _varints((keys, node_bytes, indirect_bytes)),
        struct.pack("<Q", written_ns),
        _varint(0),  # no older versions
    ]
    return _envelope(_MANIFEST_MAGIC, b"".join([*config, _file_table([NODE]), *version]))


def _envelope(magic: int, body: bytes) -> bytes:
    """Magic number, length of it all, version 0, compression 0, body, checksum."""
    head = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + b"\0\0"
    return head + body + struct.pack("<I", google_crc32c.value(head + body))


def _file_table(files: Sequence[str]) -> bytes:
    """Paths without prefix compression and without base paths."""
    names = [f.encode() for f in files]
    shared = bytes(max(0, len(names) - 1))
    return b"".join([_varint(len(names)), shared, _varints(map(len, names)), bytes(len(names)), *names])


def _shared(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _varints(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_varint, numbers))
