"""How good the value of a metric is, and which epoch has the best one."""

import math
from collections.abc import Mapping


def rank(value: float, mode: str) -> float:
    """How good the value of a metric is by `mode`, `max` or `min`: larger is better, and NaN is worst."""
    try:
        number = float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf if value > 0 else -math.inf
    if math.isnan(number):
        return -math.inf
    return number if mode == "max" else -number


def best_of(ranks: Mapping[int, float | None]) -> int | None:
    """The epoch with the highest rank, the later of equals; None if no epoch has one."""
    return max(((rank, epoch) for epoch, rank in ranks.items() if rank is not None), default=(0.0, None))[1]
