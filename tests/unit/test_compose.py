"""Containers and services: the files are structurally right, and every command in them parses with our own flags."""

import argparse
import configparser
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from broker.identity import Identity, KeyRole
from broker.records import LEADER_WITHIN_S
from ops import cli
from ops.cli import COMMANDS, parser_of

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
REGION = (ROOT / "examples" / "compose.region.yml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNIT = (ROOT / "examples" / "atoll-island.service").read_text()


def services(text):
    """Service name -> its lines. The files keep to block maps with two spaces and JSON lists, which this relies on."""
    assert "\t" not in text
    body = re.search(r"^services:\n(.*?)(?=^\S|\Z)", text, re.M | re.S).group(1)
    parts = re.split(r"^  ([a-z]+):\n", body, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def value(block, key):
    """The JSON list that stands behind ``key:``, its variables replaced by their defaults."""
    found = re.search(rf"^ +{key}: (\[.*\])$", block, re.M)
    assert found, f"{key} is missing in {block}"
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", found.group(1))
    return json.loads(re.sub(r"\$\{\w+:\?[^}]*\}", "tcp://hub:7001", text))


def parse(arguments):
    """Parses a command of ours as ``atoll`` would; fails on anything unknown."""
    name, *rest = arguments
    module = COMMANDS[name].module
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    parser = parser_of(name)
    cli.importlib.import_module(module).add_arguments(parser)
    args, unknown = parser.parse_known_args(rest)
    assert unknown == []
    assert isinstance(args, argparse.Namespace)
    return args


def test_the_whole_run_has_all_its_services():
    assert list(services(COMPOSE)) == ["keys", "redis", "broker", "aggregator", "island"]
    assert list(services(REGION)) == ["island"]


@pytest.mark.parametrize("service", ["keys", "broker", "aggregator", "island"])
def test_commands_in_compose_are_commands_of_ours(service):
    arguments = value(services(COMPOSE)[service], "command")
    assert arguments[0] == service
    parse(arguments)


def test_the_region_starts_an_island_of_ours():
    parse(value(services(REGION)["island"], "command"))


def test_the_aggregator_is_healthy_when_it_leads_its_run():
    block = services(COMPOSE)["aggregator"]
    check = value(block, "test")
    assert check[:4] == ["CMD", "python3", "-m", "ops"]
    args = parse(check[4:])
    assert args.leader == LEADER_WITHIN_S
    assert not args.json  # the two exclude each other
    assert args.watch is None
    assert args.run_dir is None
    assert args.run == parse(value(block, "command")).run_id


def test_every_command_is_about_the_same_run_and_its_name_is_a_variable():
    for text in (COMPOSE, REGION):
        for name, block in services(text).items():
            if name not in ("redis", "keys"):
                assert '"--run", "${ATOLL_RUN:-compose}"' in block, name
                assert '"--run", "compose"' not in block, name
    # A store holds one run, and optimizer state is of one run: neither is found under another name.
    assert '"/var/lib/atoll/store/${ATOLL_RUN:-compose}"' in COMPOSE
    for text in (COMPOSE, REGION):
        assert '"/var/lib/atoll/island/${ATOLL_RUN:-compose}"' in services(text)["island"]


def test_ports_are_published_to_this_host_alone_unless_told_otherwise():
    assert value(services(COMPOSE)["broker"], "ports") == ["127.0.0.1:7001:7001", "127.0.0.1:7002:7002"]
    assert COMPOSE.count("    ports: ") == 1
    assert COMPOSE.count("${ATOLL_BIND:-127.0.0.1}") == 2
    assert "#   ATOLL_BIND " in COMPOSE


@pytest.mark.parametrize("text", [COMPOSE, REGION], ids=["whole", "region"])
def test_islands_keep_their_optimizer_state_on_a_volume(text):
    block = services(text)["island"]
    args = parse(value(block, "command"))
    assert Path(args.state_dir).is_relative_to("/var/lib/atoll")
    # The directory that the image gives to its user: a volume over any other one would be root's.
    assert value(block, "volumes")[0] == "islands:/var/lib/atoll"
    assert re.search(r"^volumes:\n(?:  \w+:\n)*  islands:$", text, re.M)


@pytest.mark.parametrize("text", [COMPOSE, REGION], ids=["whole", "region"])
def test_every_service_is_checked_for_health_and_shut_in(text):
    shared = text[: text.index("services:")]
    for name, block in services(text).items():
        if name != "keys":  # it ends as soon as it has done its work
            assert "healthcheck:" in block, name
            assert value(block, "test")[0] == "CMD", name
        for wanted in ("read_only: true", 'cap_drop: ["ALL"]', "no-new-privileges:true", "tmpfs:"):
            assert wanted in block or ("<<: *atoll" in block and wanted in shared), (name, wanted)


def test_services_wait_for_what_they_need():
    blocks = services(COMPOSE)
    assert "redis: { condition: service_healthy }" in blocks["broker"]
    assert "broker: { condition: service_healthy }" in blocks["aggregator"]
    assert "broker: { condition: service_healthy }" in blocks["island"]


def test_islands_can_be_scaled_because_nothing_names_one_of_them():
    for text in (COMPOSE, REGION):
        block = services(text)["island"]
        assert "container_name" not in text
        assert "hostname" not in block
        assert "ports:" not in block
        assert not any(each.startswith("--id") for each in value(block, "command"))


def test_health_checks_in_python_compile():
    for text in (COMPOSE, REGION):
        for name, block in services(text).items():
            check = value(block, "test") if name != "keys" else []
            if "-c" in check:
                compile(check[check.index("-c") + 1], "healthcheck", "exec")


def test_the_store_is_on_a_volume_that_the_image_gives_to_its_user():
    assert value(services(COMPOSE)["aggregator"], "volumes")[0] == "store:/var/lib/atoll"
    assert re.search(r"^volumes:\n  keys:\n  store:\n", COMPOSE, re.M)
    assert "chown atoll:atoll /var/lib/atoll /etc/atoll" in DOCKERFILE


def test_everybody_has_a_key_that_the_keys_service_makes():
    blocks = services(COMPOSE)
    made = {f"{KeyRole.BROKER}.secret"}
    for each in parse(value(blocks["keys"], "command")).who:
        role, _, name = each.partition(":")
        made.add(Identity(role=KeyRole(role), name=name or role).stem + ".secret")
    used = {parse(value(blocks[name], "command")).key for name in ("broker", "aggregator", "island")}
    assert {Path(path).name for path in used} == made
    assert {str(Path(path).parent) for path in used} == {"/etc/atoll"}
    for name in ("broker", "aggregator", "island"):
        assert "keys:/etc/atoll:ro" in value(blocks[name], "volumes")
    assert "keys: { condition: service_completed_successfully }" in blocks["broker"]
    assert value(blocks["keys"], "volumes") == ["keys:/etc/atoll"]
    assert parse(value(services(REGION)["island"], "command")).key == "/etc/atoll/islands.secret"


def test_the_image_needs_no_special_builder_and_runs_as_nobody_special():
    assert not DOCKERFILE.startswith("# syntax")
    assert "--mount" not in DOCKERFILE
    assert "<<" not in DOCKERFILE
    assert DOCKERFILE.count("FROM ${BASE_IMAGE}") == 2
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.M)
    assert "--require-hashes" in DOCKERFILE
    assert 'ENTRYPOINT ["python3", "-m", "ops"]' in DOCKERFILE


def test_what_the_image_copies_is_let_through_to_the_builder():
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for needed in ("requirements.lock", "pyproject.toml", "broker", "islands", "aggregator", "ops", "examples"):
        assert f"!{needed}" in ignore


def test_the_systemd_unit_starts_an_island_of_ours_and_does_not_retry_wrong_settings():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read_string(UNIT)
    words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(words[0]).name == "atoll"
    args = parse(words[1:])
    assert str(args.state_dir) == "%S/atoll"
    assert str(args.key) == "%d/island.secret"
    assert unit["Service"]["StateDirectory"] == "atoll"  # %S/atoll belongs to its user
    assert unit["Service"]["RestartPreventExitStatus"] == "2"
    assert unit["Service"]["DynamicUser"] == "yes"
