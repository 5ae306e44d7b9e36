"""The aggregator's settings: which codecs they take."""

import pytest

from aggregator.config import AggregatorConfig
from broker.wire.errors import ConfigError
from broker.wire.messages import Codec


def test_a_name_that_no_message_could_bear_is_refused():
    with pytest.raises(ConfigError, match="run_id = 'my run'"):
        AggregatorConfig(run_id="my run")


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
def test_versions_in_a_blockwise_codec_are_refused_with_the_cure(codec):
    with pytest.raises(ConfigError, match=rf"version_codec = '{codec}'"):
        AggregatorConfig(version_codec=codec)
