"""The times that epochckpt waits are replaced by value, during a block."""

from epochckpt import _patience


def test_the_times_of_the_innermost_block_count() -> None:
    """Also where blocks that are around each other set the same times; at the end they are as before."""
    before = _patience.now()
    with _patience.use(report_secs=7.0):
        with _patience.use(report_secs=8.0):
            with _patience.use(report_secs=7.0):
                assert _patience.now().report_secs == 7.0
            assert _patience.now().report_secs == 8.0
        assert _patience.now().report_secs == 7.0
        assert _patience.now().long_save_secs == before.long_save_secs
    assert _patience.now() is before
