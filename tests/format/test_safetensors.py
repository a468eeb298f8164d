"""The header of data files, and the notes that an export leaves in it: what does not fit is refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from epochckpt.errors import FormatError
from epochckpt.format import safetensors
from epochckpt.format.safetensors import Notes
from epochckpt.format.tree import dtype_name

NOTES: dict[str, Any] = {
    "version": 1,
    "separator": ".",
    "tensors": {"a.w": [["a", "w"], "jax"], "k": [["k"], "prng", "threefry2x32"]},
    "values": [[["n"], "int", "0x3"], [["none"], "none", None]],
}


def test_notes_come_back() -> None:
    notes = safetensors.parse_notes("f", json.dumps(NOTES))
    assert notes.separator == "."
    assert {name: (kind, impl) for name, (_, kind, impl) in notes.tensors.items()} == {
        "a.w": ("jax", None),
        "k": ("prng", "threefry2x32"),
    }
    assert [(kind, value) for _, kind, value in notes.values] == [("int", "0x3"), ("none", None)]
    assert json.loads(notes.to_text()) == NOTES


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("version", [None, 2, "1"]),
        ("separator", [None, "", 1]),
        ("tensors", [None, [], {"a": "jax"}, {"a": [["a"]]}, {"a": [["a"], "jax", "impl", 1]}]),
        ("tensors", [{"a": [["a"], "jax", "threefry2x32"]}, {"a": [["a"], "prng"]}, {"a": [["a"], "prng", 1]}]),
        ("tensors", [{"a": [["a"], "tpu"]}, {"a": [["a"], "int"]}, {"a": [["a"], 1]}, {"a": ["a", "jax"]}]),
        ("values", [None, {}, [1], [[["n"], "int"]], [[["n"], "int", "0x3", 1]], [[["n"], "jax", 1]], [[1, "int", 1]]]),
    ],
)
def test_notes_of_another_form_are_refused(key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(FormatError, match=r"^f\b"):
            safetensors.parse_notes("f", json.dumps({**NOTES, key: value}))


def test_notes_that_are_no_json_are_refused() -> None:
    for text in ("", "[]", "{", "[" * 100_000):
        with pytest.raises(FormatError):
            safetensors.parse_notes("f", text)
    assert safetensors.parse_notes("f", Notes(".").to_text()) == Notes(".")


@pytest.mark.parametrize("shape", [(), (3,), (2**40, 1), (1,) * 30])
def test_a_tensor_adds_no_more_to_a_header_than_the_bound_says(shape: tuple[int, ...]) -> None:
    """The bound decides how many tensors a file may have, before their header is made."""
    many = [(f"name{number:06}", np.dtype("V3"), shape, 3) for number in range(500)]
    text = safetensors.header(many)
    assert len(text) <= 4096 + sum(safetensors.header_bytes_bound(len(name), len(shape)) for name, *_ in many)


def test_the_length_of_a_header_fits_the_file() -> None:
    head = struct.pack("<Q", 40) + b"x"
    assert safetensors.header_length("f", head, 48) == 40
    for size in (47, 9):
        with pytest.raises(FormatError, match=f"a header of 40 bytes in a file of {size}"):
            safetensors.header_length("f", head, size)
    with pytest.raises(FormatError):
        safetensors.header_length("f", b"1234567", 7)
    with pytest.raises(FormatError):
        safetensors.header_length("f", struct.pack("<Q", safetensors.MAX_READ_BYTES + 1), 2**40)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.dtype(">f4"), "float32"),
        (np.dtype("<i8"), "int64"),
        (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
        (np.dtype(">M8[ns]"), "<M8[ns]"),
    ],
)
def test_a_dtype_has_one_name_in_either_order_of_bytes(dtype: np.dtype[Any], name: str) -> None:
    assert dtype_name(dtype, "w") == name
