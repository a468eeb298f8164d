"""How long epochckpt waits where no option says it: all such times, in one place.

Tests shorten them with `use`, for a test of what happens after a wait that would be long.
"""

import dataclasses
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """Times in seconds.

    Attributes:
        read_pauses_secs: before storage that does not answer is asked again.
        change_pauses_secs: before each try to change a file that others change as well.
        attachment_pauses_secs: before each try to attach metrics to an epoch of a bucket, which gives way to saves.
        request_pauses_secs: before a request to a bucket is repeated, if no setting says otherwise.
        request_silent_secs: of a server, before a small request counts as failed.
        large_request_secs: one large request may take so long, with its answer.
        late_read_secs: a read of a bucket that takes no longer is not late, however fast others are.
        request_quiet_secs: of repeating a request, before it is said.
        upload_late_secs: without progress of an upload, before a piece that came too early is taken all the same.
        upload_still_secs: without progress of an upload, before it is said.
        verdict_margin_secs: by how much the other processes of a save wait longer than the primary does.
        hear_margin_secs: the other processes wait so much longer for the primary, which may come late itself.
        report_secs: how long nodes may take to report, once all older saves are decided, before a new save fails.
        long_save_secs: a save that holds training for longer says why.
        long_exit_secs: an exit that takes longer says why.
        mirror_pauses_secs: the first and the longest pause before a mirror that does not answer is asked again.
        handler_call_secs: a metadata handler hangs if one call takes longer.
        run_call_margin_secs: by how much the other processes wait longer for a call of a run than the primary, which
            names the late ones.
        delivery_secs: how long the end of a call waits for listeners to events.
        bar_delay_secs: work that ends within this time shows no bar.
        bar_removal_secs: how long the end of work waits for its bar to be taken away: a terminal may stand still.
    """

    read_pauses_secs: tuple[float, ...] = (0.05, 0.2, 0.75)
    change_pauses_secs: tuple[float, ...] = (0.0, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *(5.0,) * 8)
    attachment_pauses_secs: tuple[float, ...] = (0.0, 0.0, 1.0, 2.0, 4.0, 8.0, *(16.0,) * 50)
    request_pauses_secs: tuple[float, ...] = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0, 8.0)
    request_silent_secs: float = 15.0
    large_request_secs: float = 90.0
    late_read_secs: float = 0.05
    request_quiet_secs: float = 3.0
    upload_late_secs: float = 30.0
    upload_still_secs: float = 10.0
    verdict_margin_secs: float = 60.0
    hear_margin_secs: float = 60.0
    report_secs: float = 1.0
    long_save_secs: float = 1.0
    long_exit_secs: float = 10.0
    mirror_pauses_secs: tuple[float, float] = (1.0, 60.0)
    handler_call_secs: float = 60.0
    run_call_margin_secs: float = 5.0
    delivery_secs: float = 1.0
    bar_delay_secs: float = 2.0
    bar_removal_secs: float = 5.0


_used = [Patience()]  # the last one counts


def now() -> Patience:
    """The times that count at this moment in this process."""
    return _used[-1]


@contextmanager
def use(**changes: Any) -> Generator[None]:
    """During the block, these attributes have these values, in the whole process."""
    changed = dataclasses.replace(now(), **changes)
    _used.append(changed)
    try:
        yield
    finally:
        _used[:] = [each for each in _used if each is not changed]  # `remove` would take an equal one
