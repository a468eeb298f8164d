"""How leaves lay on devices, in the text that Orbax keeps in `_sharding`."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from epochckpt.grid import ArrayItem


def texts(arrays: ArrayItem, names: Mapping[int, str]) -> dict[str, str]:
    """Orbax's form of the recorded shardings, by parameter name in base64."""
    rows = [text(arrays, row) for row in arrays.shardings]
    out = {}
    for number, name in names.items():
        leaf = arrays.leaves[number]
        row = rows[leaf.sharding] if leaf.kind in ("jax", "prng") and leaf.sharding >= 0 else None
        if row is not None:
            out[base64.b64encode(name.encode()).decode()] = row
    return out


def text(arrays: ArrayItem, row: Any) -> str | None:
    """One recorded sharding; None where the device is not there, or the row is nonsense: nobody checked it before."""
    try:
        return _text(arrays, row)
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _text(arrays: ArrayItem, row: Any) -> str | None:
    if "device" in row:
        names = [str(d) for d in jax.devices() if (d.platform, d.id) == (row["platform"], row["device"])]
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": names[0]}) if names else None
    mesh = arrays.meshes[row["mesh"]]
    devices = np.array([{"id": d} for d in mesh["devices"]], dtype=object).reshape(mesh["shape"]).tolist()
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": mesh["shape"],
            "axis_names": mesh["axes"],
            "axis_types": [str(AxisType[t]) for t in mesh["axis_types"]],
            "partition_spec": row["spec"],
            "device_mesh": {"mesh": devices},
        }
    )
