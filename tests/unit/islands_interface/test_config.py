"""The island's settings refuse what cannot work, with the field, the value and the cure."""

import subprocess
import sys

import pytest

from broker.base.errors import ConfigError
from islands.interface.config import IslandConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run_id", "my run"),
        ("island_id", "paris 1"),
        ("island_id", "broker"),
        ("pace", -1.0),
        ("checkpoint_interval_s", 0.0),
        ("join_timeout_s", -5.0),
        ("max_message_bytes", 1),
    ],
)
def test_a_wrong_setting_is_refused_with_the_cure(field, value):
    with pytest.raises(ConfigError, match=f"^{field} = {value!r}: ."):
        IslandConfig(**{field: value})


def test_importing_the_interface_and_the_daemon_does_not_import_jax():
    code = (
        "import sys, islands, islands.interface.config, islands.daemon; islands.join; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_everything_that_the_package_offers_exists():
    import islands

    assert all(getattr(islands, name) is not None for name in islands.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = islands.nothing
