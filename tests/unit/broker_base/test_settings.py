"""Settings: TOML tables and flags become frozen dataclasses, or a one-line error that says what to do."""

import argparse
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.base.errors import ConfigError
from broker.base.settings import setting, to_table
from broker.base.sources import (
    CommandParser,
    add_config_flag,
    add_flags,
    from_sources,
    load,
    of_a_run,
    read_file,
    to_toml,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    dead_after_s: float = setting(6.0, "silence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    run_id: str = setting("atoll", "name", flag="--run")
    count: int = setting(4, "how many, 100 % of them")
    rate: float = setting(0.7, "how fast")
    wide: bool = setting(False, "or narrow")
    colour: Colour = setting(Colour.RED, "paint")
    store: Path = setting(Path("store"), "where")
    tape: Path | None = setting(None, "tape")
    pace: tuple[float, ...] = setting((), "paces")
    data: tuple[Path, ...] = setting((), "inputs")
    options: Mapping[str, Any] = field(default_factory=dict)
    inner: Inner = Inner()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needy:
    key: str
    redis_url: str = setting("", "where")


def parse(*words, cls=Sample):
    parser = argparse.ArgumentParser()
    add_config_flag(parser)
    add_flags(parser, cls)
    return parser.parse_args(words)


def refusal(make):
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.toml"


def test_without_sources_the_defaults_hold():
    assert from_sources(Sample, {}, parse()) == Sample()


def test_flags_win_over_the_own_table_which_wins_over_run(path):
    path.write_text('[run]\nrun_id = "a"\ndead_after_s = 9.0\n[broker]\ncount = 5\nrate = 0.1\nrun_id = "b"\n')
    config = load(Sample, parse("--config", str(path), "--rate", "0.2"), "broker", environment={})
    assert (config.run_id, config.count, config.rate, config.inner.dead_after_s) == ("b", 5, 0.2, 9.0)


def test_every_type_is_read_from_flags():
    flags = """--run x --count 1_000 --rate 1e-3 --wide --colour blue --store s --tape t --pace 0.05,0.1 1
               --data a,b c --options model=tiny --dead-after-s 7"""
    args = parse(*flags.split())
    assert from_sources(Sample, {}, args) == Sample(
        run_id="x",
        count=1000,
        rate=0.001,
        wide=True,
        colour=Colour.BLUE,
        store=Path("s"),
        tape=Path("t"),
        pace=(0.05, 0.1, 1.0),
        data=(Path("a,b"), Path("c")),
        options={"model": "tiny"},
        inner=Inner(dead_after_s=7.0),
    )


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"cuont": 5}, "[broker] cuont = 5: is no setting; did you mean count?"),
        ({"xyzzy": 5}, "is no setting; there are run_id, count"),
        ({"count": "5"}, "count = '5': must be a whole number"),
        ({"count": True}, "count = True: must be a whole number"),
        ({"count": 1.0}, "must be a whole number"),
        ({"rate": float("nan")}, "rate = nan: must be a number"),
        ({"wide": 1}, "must be true or false"),
        ({"colour": "green"}, "must be one of red, blue"),
        ({"pace": 0.1}, "must be a list, each item a number"),
        ({"pace": ["x"]}, "pace = 'x': must be a number"),
        ({"options": 3}, "must be a table"),
        ({"store": 3}, "must be a path in quotes"),
    ],
)
def test_a_wrong_table_is_refused_with_field_value_and_cure(table, words):
    assert words in refusal(lambda: from_sources(Sample, table, where="broker"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--count", "five"), "count = 'five': must be a whole number"),
        (("--count", "2.5"), "count = '2.5': must be a whole number"),
        (("--count", "1e400"), "count = '1e400': must be a whole number"),
        (("--count", "M"), "count = 'M': must be a whole number"),
        (("--count", "1.2345k"), "count = '1.2345k': must be a whole number"),
        (("--pace", "0.1,x"), "pace = 'x': must be a number"),
        (("--rate", "nan"), "rate = nan: must be a number"),
        (("--options", "model"), "options = 'model': must be KEY=VALUE"),
        (("--colour", "green"), "must be one of red, blue"),
    ],
)
def test_a_wrong_flag_gets_the_same_error_as_a_wrong_line(flags, words):
    assert words in refusal(lambda: from_sources(Sample, {}, parse(*flags)))


def test_a_whole_number_may_be_written_as_people_write_large_ones():
    written = {"1e6": 10**6, "1.2e6": 1_200_000, "1.2M": 1_200_000, "4.35k": 4350, "1.15M": 1_150_000, "2B": 2 * 10**9}
    for text, number in (written | {"7": 7}).items():
        count = from_sources(Sample, {}, parse("--count", text)).count
        assert (count, type(count)) == (number, int), text


def test_a_setting_without_default_is_asked_for():
    assert "key = None: is needed; give --key" in refusal(lambda: from_sources(Needy, {}))


def test_a_daemon_is_told_its_run_by_flag_or_file(path):
    cure = "run_id = None: is needed: give --run NAME, or --config with run_id in [run]"
    assert cure in refusal(lambda: of_a_run(Sample, parse(), "broker", environment={"REDIS_URL": "redis://here"}))
    assert of_a_run(Sample, parse("--run", "demo"), "broker", environment={})["run_id"] == "demo"
    path.write_text('[run]\nrun_id = "demo"\n')
    assert of_a_run(Sample, parse("--config", str(path)), "broker", environment={})["run_id"] == "demo"


def test_the_environment_supplies_addresses_and_a_flag_still_wins():
    environment = {"REDIS_URL": "redis://there", "KEY": "not an address"}
    assert load(Needy, parse("--key", "k", cls=Needy), "up", environment=environment).redis_url == "redis://there"
    args = parse("--key", "k", "--redis-url", "redis://here", cls=Needy)
    assert load(Needy, args, "up", environment=environment).redis_url == "redis://here"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[brokre]\n", ["[brokre] = ", "did you mean broker?"]),
        ("[run]\nislands = 3\n", ["[run] islands = 3: is no setting"]),
        ("port = 3\n", ["port"]),
        ("[run\n", ["is not TOML"]),
        ("run = " + 100_000 * "[", ["is not TOML"]),
        ('run_id = "x"\n', ["run_id = 'x': must be in a table: write [run], or another of recipe, "]),
        ('redis_url = "redis://:s3cret@hub"\n', ["redis_url = 'redis://***@hub': must be in a table"]),
        ('[run]\nredis_uri = "redis://:s3cret@hub"\n', ["[run] redis_uri = 'redis://***@hub': is no setting; did you"]),
        (None, ["config.toml", "cannot be read (No such file"]),
    ],
)
def test_a_wrong_file_is_refused_without_a_secret_in_it(path, text, words):
    if text is not None:
        path.write_text(text)
    said = refusal(lambda: read_file(path))
    assert all(each in said for each in words), said


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    host: str = setting("", "where", subject="addresses")
    port: int = setting(0, "which")
    limit: int = setting(9, "how many", subject="limits")
    inner: Inner = field(default_factory=Inner)
    key: str = setting("", "whose", subject="addresses")


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedToo:
    count: int = setting(4, "how many more", subject="limits")


def test_flags_stand_under_the_subject_of_their_setting_or_of_the_one_before_it():
    parser = CommandParser(everyday={"everyday": ["--port"]})
    for cls in (Grouped, GroupedToo):
        add_flags(parser, cls, defaults={"limit": 3})
    under: dict[str, list[str]] = {}
    for line in parser.format_help_all().splitlines():
        if line.endswith(":"):
            under[line[:-1]] = flags = []
        elif line.lstrip().startswith("--"):
            flags.append(line.split()[0])
    assert under["addresses"] == ["--host", "--port", "--key"]
    assert under["limits"] == ["--limit", "--dead-after-s", "--count"]
    assert "how many (default 3)" in parser.format_help_all()


def test_a_short_help_has_the_everyday_flags_alone():
    parser = CommandParser(prog="atoll probe", everyday={"where": ["--port", "--key"]}, epilog="example")
    parser.add_argument("file", nargs="?", metavar="FILE", help="of faults")
    add_flags(parser, Grouped)
    text = parser.format_help()
    assert text.startswith("usage: atoll probe [FILE] [FLAGS]\n")
    flags = [line.split()[0] for line in text.splitlines() if line.startswith("  -")]
    assert flags == ["--port", "--key", "-h,", "--help-all"]
    assert "where:\n  --port N" in text
    assert text.endswith("example\n")
    assert "--limit" in parser.format_help_all()
    assert parser.parse_args(["--limit", "5"]).limit == "5"


def test_help_shows_defaults_choices_and_percent_signs():
    parser = argparse.ArgumentParser()
    add_flags(parser, Sample)
    text = " ".join(parser.format_help().split())
    assert "how many, 100 % of them (default 4)" in text
    assert "paint (red | blue) (default red)" in text
    assert "--wide, --no-wide" in text


def test_a_dumped_config_reads_back_to_the_same_value():
    config = Sample(
        run_id='quoted "x" \\ \x7f é\n',
        rate=1e-07,
        colour=Colour.BLUE,
        pace=(0.05, 1.0),
        data=(Path("/a b"),),
        options={"model": "tiny", "deep": {"odd key": [1, True]}},
    )
    text = to_toml({"broker": to_table(config)}, heading="Resolved.\nBy a test.")
    assert text.startswith("# Resolved.\n# By a test.\n\n[broker]\n")
    assert from_sources(Sample, tomllib.loads(text)["broker"]) == config


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(
            st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
            lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=4), each, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_whatever_is_dumped_is_toml_with_the_same_content(table):
    assert tomllib.loads(to_toml({"task": table})) == {"task": table}
