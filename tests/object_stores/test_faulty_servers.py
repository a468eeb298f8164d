"""Servers that refuse, lose, cut and delay requests lose no epoch and fail no save: see `support.faulty_runs`."""

import logging

import pytest

from tests.support.faulty_runs import FaultyRun, run
from tests.support.object_servers import SCHEMES, Bucket

PARTS, FAULTS = 6, 1000  # of the full form, on each server


@pytest.fixture(autouse=True)
def _quiet_server() -> None:
    """moto logs a traceback for a part of an upload that was ended, which is what a late request is."""
    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)


def check(found: FaultyRun, faults: int) -> None:
    print(f"{found.faults.total()} faults {dict(found.faults)} in {dict(found.steps)}")
    assert not found.violations, "\n".join(found.violations)
    assert found.faults.total() >= faults


@pytest.mark.slow
@pytest.mark.parametrize("server", SCHEMES, indirect=True)
def test_faults_that_pass_lose_nothing(cloud: Bucket) -> None:
    """The short form."""
    check(run(cloud, seed=1, faults=80), 80)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_faults_lose_nothing(part: int, cloud: Bucket) -> None:
    """12,000 in all, in parts that can be run one by one."""
    check(run(cloud, seed=100 + part, faults=FAULTS), FAULTS)


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_without_retries_the_same_faults_are_found_out(cloud: Bucket) -> None:
    """Negative control: requests are not repeated, and saves fail because of faults that pass."""
    assert run(cloud, seed=1, faults=20, retries=0).violations
