"""Addresses of Redis: what is taken, what is refused at the start, and that no password is ever shown."""

import argparse
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    TimeoutError,
)

from aggregator.interface.config import AggregatorConfig
from aggregator.store.tape import start_line
from broker.base.errors import ConfigError, masked, shown
from broker.base.sources import from_sources, read_file
from broker.gateway.config import BrokerConfig
from broker.registry import redis_address, redis_client
from broker.registry.redis_address import Place
from broker.registry.registry import Registry
from ops.processes.child_process import ProcessSpec
from ops.run import local_plan, up

REFUSED = {
    "scheme": ["", "hub:6379", "http://hub", "redis:hub:6379", "unix+sentinel://a/master"],
    "place": ["redis://[::1:6379", "redis://::1:6379", "redis://a..b", "redis://" + "a" * 300, "redis://hub%00"],
    "port": ["redis://hub:port", "redis://hub:0", "redis://hub:65536"],
    "path": ["redis://hub /0", "redis://hub/name", "redis://hub#1", "unix://run/redis.sock", "unix://"],
    "database": ["redis://hub?db", "redis://hub?db=-1", "redis://hub?db=one", "redis://hub?db=1&db=2"],
    "option": ["redis://hub?foo=bar", "redis://hub?protocol=9", "redis://hub?ssl_cert_reqs=none"],
    "option of TLS": ["rediss://hub?ssl_cert_reqs=maybe"],
    "password": ["redis://:a/b@hub", "redis://:a#b@hub", "redis://:a?b@hub", "redis://:\udcff@hub"],
    "empty password": ["redis://hub?password="],
    "password file": ["redis://hub?password_file=relative", "redis://hub?sentinel_password_file=/f"],
    "two passwords": ["redis://:pw@hub?password_file=/f", "redis://hub?password=pw&password_file=/f"],
    "master": ["redis://a:1,b:2/master", "redis+sentinel://a:26379", "redis+sentinel://a:26379/"],
    "name of the master": ["redis+sentinel://a,b/master/one", "redis+sentinel://a,b/mas ter"],
    "sentinels": ["redis+sentinel://a:26379,/master", "redis+sentinel://a:26379,b:port/master"],
    "sentinel": ["redis+sentinel://::1/master", "redis+sentinel://a/master#1"],
    "option of a sentinel": ["redis+sentinel://a/master?ssl_ca_certs=f"],
    "two passwords of it": ["redis+sentinel://a/master?sentinel_password=p&sentinel_password_file=/f"],
}


@pytest.mark.parametrize(
    "url", [pytest.param(url, id=f"{wrong} {i}") for wrong, urls in REFUSED.items() for i, url in enumerate(urls)]
)
def test_what_redis_py_chokes_on_later_is_refused_by_whoever_is_given_it(url):
    with pytest.raises(ConfigError, match=r"redis_url = .* is no address of Redis: "):
        Registry(url, "demo")
    if url:  # which stands for none given
        for config in (BrokerConfig, AggregatorConfig):
            with pytest.raises(ConfigError, match=r"redis_url = .* is no address of Redis: "):
                config(redis_url=url)


NOT_SECRET = [
    *("redis://hub:6379/0", "redis://[::1]:6379", "redis://[::1:6379", "localhost:6379"),
    "redis://hub?password_file=/run/pw",
    "redis+sentinel://a:1,b:2/m/0?password_file=/f",
]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        *((url, url) for url in NOT_SECRET),
        *(
            (url, "redis://***")
            for url in ("redis://H:P?password=x", "redis://:pw", "redis://:123456", "redis://:pw,x")
        ),
        ("redis://user:secret@hub:6379/0", "redis://***@hub:6379/0"),
        ("redis://hub?password=x&db=1", "redis://hub?password=***&db=1"),
        ("redis://hub?foo=bar", "redis://hub?foo=***"),
        ("unix:///s?password=x", "unix:///s?password=***"),
        ("user:pw", "***"),
        ("rediss://hub?ssl_password=x&ssl_cert_reqs=none", "rediss://hub?ssl_password=***&ssl_cert_reqs=none"),
        ("tcp://user:pw@hub:7001", "tcp://***@hub:7001"),
        (
            "redis+sentinel://u:p@a,[::1]:2/m?sentinel_password=x",
            "redis+sentinel://***@a,[::1]:2/m?sentinel_password=***",
        ),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(url, text):
    assert shown(url) == text


def test_a_part_of_an_address_shows_no_password_either():
    assert masked("b:26379/main?sentinel_password=s3cret&db=1") == "b:26379/main?sentinel_password=***"


# Each begins with what stands in no text of ours: Hypothesis also tries words that it finds in our code.
SECRETS = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="*"), min_size=6, max_size=18
).map("7Q".__add__)
PLACES = st.sampled_from(["hub", "hub:6379", "[::1]:6379", "[::1:6379", "hub:port", "a..b", ""])
SCHEMES = st.sampled_from(["redis", "rediss", "unix", "tcp", "redis+sentinel", "rediss+sentinel"])


FORMS = [
    "{scheme}://{who}:{written}@{place}{tail}",
    "{scheme}://{place}?password={written}",
    "{scheme}://{place}/1?db=1&password={written}&protocol=3",
    "{scheme}:///run/s?password={written}",
    "{scheme}://{who}:{written}@/run/s",
    "{scheme}://{place}?ssl_password={written}",
    "{scheme}://{who}:{written}@{place},other:26379/master{tail}",
    "{scheme}://{place},other/master/0?sentinel_username=u&sentinel_password={written}",
    "{scheme}://{place}?pasword={written}",
]


@st.composite
def secret_addresses(draw):
    """An address with a password in one of the places where it can stand, quoted or not, good or bad besides."""
    secret = draw(SECRETS)
    written = draw(st.sampled_from([secret, quote(secret, safe="")]))
    who = draw(st.sampled_from(["", "user", "us%20er"]))
    tail = draw(st.sampled_from(["", "/0", "/nine", "?db=1", "?foo=bar", "#0"]))
    form, scheme, place = draw(st.sampled_from(FORMS)), draw(SCHEMES), draw(PLACES)
    return form.format(scheme=scheme, who=who, written=written, place=place, tail=tail), (
        secret,
        written,
        quote(secret),
    )


def texts_about(url):
    """Every text that this project makes of an address."""
    yield shown(url)
    yield masked(f"--redis-url={url}")
    yield str(ConfigError("argument", url, "is not understood"))
    for make in (
        lambda: BrokerConfig(redis_url=url),
        lambda: AggregatorConfig(redis_url=url),
        lambda: AggregatorConfig(broker=url),
        lambda: from_sources(BrokerConfig, {"redis_uri": url}, where="run"),
        lambda: Registry(url, "demo").address,
        lambda: ProcessSpec(name="broker", command=["broker"], environment={"REDIS_URL": url}),
    ):
        try:
            made = make()
        except ConfigError as err:
            yield from (str(err), repr(err), repr(err.value))
            continue
        yield from (str(made), repr(made))
        if isinstance(made, AggregatorConfig):
            yield str(start_line(made, 0.0, None, {}))


@given(secret_addresses())
def test_no_text_shows_a_secret(made):
    url, secrets = made
    for text in texts_about(url):
        for secret in secrets:
            assert secret not in text


@given(secret_addresses())
def test_an_address_that_is_kept_has_no_secret_and_still_leads_to_the_same_place(made):
    url, secrets = made
    try:
        redis_address.check(url)
    except ConfigError:
        return
    kept = redis_address.without_password(url)
    Registry(kept, "demo")
    assert all(secret not in kept for secret in secrets)
    assert redis_address.without_password(kept) == kept
    assert redis_address.names(url, kept)
    before, after = urlsplit(url), urlsplit(kept)
    assert (before.scheme, before.path) == (after.scheme, after.path)
    assert before.netloc.rpartition("@")[2] == after.netloc.rpartition("@")[2]


@pytest.mark.parametrize("url", ["redis://me:s3cret@hub:6379/1", "redis://hub:6379/1?db=1&password=s3cret"])
def test_the_files_of_a_run_have_the_address_without_its_password(tmp_path, url):
    parser = argparse.ArgumentParser(epilog="")
    up.add_arguments(parser)
    plan = local_plan.resolve(parser.parse_args([]), run_dir=tmp_path, port=7001, redis_url=url, redis_port=None)
    text = local_plan.config_toml(plan)
    assert "s3cret" not in text + repr(plan)
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    assert read_file(path)["run"]["redis_url"] == redis_address.without_password(url)


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://me:pw@hub:1/2?protocol=3", Place(url="redis://me:pw@hub:1/2?protocol=3", user="me")),
        ("rediss://me@hub?password_file=/f&db=1", Place(url="rediss://hub?db=1", user="me", password_file="/f")),
        ("redis://hub?username=me&password_file=/f", Place(url="redis://hub", user="me", password_file="/f")),
        ("unix://me@/run/s?password_file=/f", Place(url="unix:///run/s", user="me", password_file="/f")),
        (
            "rediss+sentinel://me:pw@a:1,[::1]:2,c/main/3?sentinel_username=s&sentinel_password=t&ssl_ca_certs=/c",
            Place(
                url="rediss://me:pw@a:1/3?ssl_ca_certs=/c",
                user="me",
                sentinels=(("a", 1), ("::1", 2), ("c", 26379)),
                master="main",
                sentinel_user="s",
                sentinel_password="t",
            ),
        ),
        (
            "redis+sentinel://a/main?password_file=/f&sentinel_password_file=/g",
            Place(
                url="redis://a/",
                password_file="/f",
                sentinels=(("a", 26379),),
                master="main",
                sentinel_password_file="/g",
            ),
        ),
    ],
)
def test_an_address_is_taken_apart_for_redis_py(url, place):
    redis_address.check(url)
    assert redis_address.place(url) == place
    assert "pw" not in repr(redis_address.place(url))
    if not place.password_file:
        assert "pw" not in Registry(url, "demo").address


@pytest.mark.parametrize(
    ("err", "url", "said", "cure"),
    [
        (AuthenticationError("HELLO must be called .."), "redis://hub", "NOAUTH", "redis://:PASSWORD@HOST:PORT"),
        (AuthenticationError("Authentication required."), "rediss://hub", "NOAUTH", "rediss://:PASSWORD@HOST:PORT"),
        (AuthenticationError("Authentication required."), "unix:///s", "NOAUTH", "unix://:PASSWORD@/PATH"),
        (AuthenticationError("invalid username-password pair"), "redis://:x@hub", "WRONGPASS", "give the password"),
        (AuthenticationError("AUTH called without any password configured"), "redis://:x@h", "no password", "leave it"),
        (NoPermissionError("this user has no permissions"), "redis://hub", "no permissions", "keys atoll:*"),
        (MasterNotFoundError("No master found for 'x'"), "redis+sentinel://a/x", "No master", "name of the master"),
        (ConnectionError("(104, 'Connection reset by peer')"), "redis+sentinel://a/x", "reset by peer", "rediss://"),
        (ReadOnlyError("You can't write"), "redis://hub", "can't write", "its primary"),
        (InvalidResponse("Protocol Error: b'\\x15'"), "redis://hub", "Protocol Error", "rediss://"),
        (ConnectionError("Connection closed by server."), "redis://hub", "closed by server", "rediss://"),
        (TimeoutError("Timeout connecting to server"), "rediss://hub", "Timeout", "begins with redis://"),
    ],
)
def test_what_redis_says_comes_with_what_to_do(err, url, said, cure):
    assert said in redis_client.why(err)
    assert cure in redis_client.cure(err, url)
