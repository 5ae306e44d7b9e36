"""What the tests of the relay share."""

import pytest

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
