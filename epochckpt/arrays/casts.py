"""Casts of arrays to other dtypes: what they keep of the values."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from epochckpt.format import tree as tree_lib


def keeps_kind(before: Any, after: Any, kinds: Sequence[type]) -> bool:
    """Whether two dtypes are of the same one of these kinds of numbers."""
    return any(tree_lib.issubdtype(before, kind) and tree_lib.issubdtype(after, kind) for kind in kinds)


def converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A cast; complex to real keeps the real part without NumPy's warning, because `survives` compares the rest."""
    if tree_lib.issubdtype(array.dtype, np.complexfloating) and not tree_lib.issubdtype(dtype, np.complexfloating):
        array = np.real(array)
    return array.astype(dtype)


def survives(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether a cast kept every value exactly."""
    back = converted(after, before.dtype)
    same = (back == before) | ((back != back) & (before != before))
    wide = [a.astype(np.float64) if a.dtype.itemsize < 4 else a for a in (before, after)]
    equal = (wide[0] == wide[1]) | ((wide[0] != wide[0]) & (wide[1] != wide[1]))
    return bool(np.all(same & equal))
