"""The aggregator's settings: which codecs they take."""

import pytest

from aggregator.config import AggregatorConfig
from broker.wire.errors import ConfigError
from broker.wire.messages import Codec


def test_a_name_that_no_message_could_bear_is_refused():
    with pytest.raises(ConfigError, match="run_id = 'my run'"):
        AggregatorConfig(run_id="my run")


@pytest.mark.parametrize("codec", list(Codec))
def test_versions_travel_as_pseudo_gradients_do_unless_they_have_a_codec_of_their_own(codec):
    assert AggregatorConfig(codec=codec).codec_of_versions is codec
    assert AggregatorConfig(codec=Codec.INT4, version_codec=codec).codec_of_versions is codec
