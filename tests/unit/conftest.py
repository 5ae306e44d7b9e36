"""What several modules share: a relay, and an aggregator that leads."""

import pytest

from tests.leader_hand import Leader
from tests.relay_bench import Driver


@pytest.fixture
def driver():
    """A relay that has heard nothing."""
    return Driver()


@pytest.fixture
def led(driver):
    """A relay with a leader."""
    driver.attach()
    return driver


@pytest.fixture
def leader():
    """A leader whose lease is renewed, with nobody that stands by."""
    return Leader().begun()
