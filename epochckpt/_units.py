"""Numbers as people read and write them: sizes, durations, times, figures."""

import datetime
import math
import re
from collections.abc import Mapping

_SPANS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
_SECS = {"s": 1, "ms": 0.001, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}  # a number without a unit counts bytes or seconds
_QUANTITY = re.compile(r"((?:\d{1,25}\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_secs(text: str) -> float:
    """Seconds of a duration: `90`, `250ms`, `15min`, `1.5h`, `2d`, `1w`; ValueError for other texts."""
    return float(_parsed(text, _SECS))


def parse_nbytes(text: str) -> int:
    """Bytes of a size: `4096`, `8GB` (powers of 1000), `512MiB` (powers of 1024); ValueError for other texts."""
    return round(_parsed(text, _BYTES))


def exact_nbytes(n: int) -> str:
    """A size that `parse_nbytes` reads as the same: with the largest unit that divides it."""
    size, unit = max((size, unit) for unit, size in _BYTES.items() if n % size == 0)
    return str(n) if size == 1 else f"{n // size}{unit}"


def _parsed(text: str, units: Mapping[str, float]) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    sizes = {unit.lower(): size for unit, size in units.items()}
    if match is None or (match[2] and match[2].lower() not in sizes):
        raise ValueError(f"expected a number and one of the units {', '.join(units)}")
    number = int(match[1]) if match[1].isdecimal() else float(match[1])  # integers stay exact
    size = number * sizes.get(match[2].lower(), 1)
    if not math.isfinite(size):
        raise ValueError("it is too large")
    return size


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
    # A value that would be rounded to 60 of a unit is one of the next.
    least = ((size * (0.9917 if size > 1 else 0.9995), size, unit) for size, unit in _SPANS)
    size, unit = next(((size, unit) for limit, size, unit in least if s >= limit), (1e-3, "ms"))
    figure = f"{s / size:.0f}" if s / size >= 9.95 else f"{s / size:.1f}".removesuffix(".0")
    return f"{figure} {unit}"


def age(s: float) -> str:
    """A time that has passed, roughly: `12 s`, `3 min`, `5 h`, `40 d`; `0 s` of less than a second; else as `secs`."""
    if not math.isfinite(s):
        return secs(s)
    size, unit = next(((size, unit) for size, unit in _SPANS if round(s / size)), (1.0, "s"))
    return f"{max(round(s / size), 0)} {unit}"


def number(x: float) -> str:
    """A figure with about four significant digits: `0.1235`, `12.3`, `123457`, `1.235e+08`, `NaN`."""
    if isinstance(x, int) and abs(x) < 10**6:  # also True and False
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


def roughly(n: int) -> str:
    """How many, with three digits: `9,999`, `33.3 k`, `1.44 M`, `7 G`."""
    if n < 10_000:
        return count(n)
    digits = 3 - len(str(n))
    rounded = round(n, digits)  # of an integer: exact
    power = next((power for power in (3, 6, 9) if rounded < 10 ** (power + 3)), 12)
    figure = f"{rounded / 10**power:.2f}".rstrip("0").rstrip(".") if power < 12 else f"{rounded // 10**12:,}"
    return f"{figure} {'kMGT'[power // 3 - 1]}"


def several(n: int, one: str, more: str) -> str:
    """A number of things: `1 leaf`, `20,000 leaves`."""
    return f"{count(n)} {one if n == 1 else more}"


def when(ns: float) -> str:
    """A time, nanoseconds since 1970, as this machine's local time: `2026-11-21 14:31:44`."""
    try:
        return datetime.datetime.fromtimestamp(ns / 1e9).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):  # no year that a calendar has
        return "unknown"
