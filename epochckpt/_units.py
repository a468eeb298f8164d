"""Numbers as people read and write them: sizes, durations, times, figures."""

from __future__ import annotations

import datetime
import math
import re

_SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_SECS: dict[str, float] = {"s": 1, "ms": 0.001, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES: dict[str, float] = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_BYTES |= {f"{prefix}iB": 1024.0**power for power, prefix in enumerate("KMGT", start=1)}
_QUANTITY = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,2})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_secs(text: str) -> float:
    """Seconds of a duration: `90`, `250ms`, `15min`, `1.5h`, `2d`, `1w`. A number alone counts seconds.

    Raises:
        ValueError: the text is no duration; says which units there are.
    """
    return _parsed(text, _SECS)


def parse_nbytes(text: str) -> int:
    """Bytes of a size: `4096`, `8GB` (powers of 1000), `512MiB` (powers of 1024). A number alone counts bytes.

    Raises:
        ValueError: the text is no size; says which units there are.
    """
    return int(text) if text.strip().isdecimal() else round(_parsed(text, _BYTES))


def _parsed(text: str, units: dict[str, float]) -> float:
    found = _QUANTITY.fullmatch(text.strip())
    sizes = {unit.lower(): size for unit, size in units.items()}
    if found is None or (found[2] and found[2].lower() not in sizes):
        raise ValueError(f"expected a number and one of the units {', '.join(units)}")
    return float(found[1]) * sizes.get(found[2].lower(), 1)


def nbytes(n: float) -> str:
    """A size in powers of 1000: `17 B`, `1.2 GB`."""
    size = float(n)
    if round(size) < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if round(size, 1) < 1000:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} PB"


def secs(s: float | None) -> str:
    """A duration with two or three digits: `12 ms`, `1.2 s`, `3 min`, `2.5 h`, `40 d`; `?` if it is not known."""
    if s is None or not math.isfinite(s):
        return "?"
    if s < 0:
        return f"−{secs(-s)}"
    if s < 0.9995:
        return f"{_short(s * 1e3)} ms"
    # A value that would be rounded to 60 of a unit is one of the next.
    size, unit = next(
        ((size, unit) for size, unit in _SPANS if s >= size * (0.9917 if size > 1 else 0.9995)), _SPANS[-1]
    )
    return f"{_short(s / size)} {unit}"


def number(x: float) -> str:
    """A figure with about four significant digits: `0.1235`, `12.3`, `123457`, `1.235e+08`, `NaN`."""
    if isinstance(x, bool):
        return str(x)
    if isinstance(x, int) and abs(x) < 10**6:
        return str(x)
    try:
        value = float(x)
    except OverflowError:  # an int beyond every float
        return ">1e308" if x > 0 else "<−1e308"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if 1e4 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:.4g}"


def count(n: int) -> str:
    """How many, with thousands set apart: `20,000`."""
    return f"{n:,}"


def several(n: int, one: str, more: str) -> str:
    """A number of things: `1 leaf`, `20,000 leaves`."""
    return f"{count(n)} {one if n == 1 else more}"


def when(ns: float) -> str:
    """A time, nanoseconds since 1970, as this machine's local time: `2026-11-21 14:31:44`."""
    try:
        return datetime.datetime.fromtimestamp(ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # no year that a calendar has
        return "unknown"


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 9.95 else f"{x:.1f}".removesuffix(".0")
