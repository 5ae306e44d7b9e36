"""Containers and services: the files are structurally right, and every command in them parses with our own flags."""

import configparser
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from broker.base.errors import ConfigError
from broker.wire.identity import Identity, KeyRole
from broker.wire.records import BROKER_WITHIN_S, LEADER_WITHIN_S
from islands.interface.config import IslandConfig
from ops.cli import COMMANDS, parser_of

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = (ROOT / "docker-compose.yml").read_text()
REGION = (ROOT / "examples" / "compose.region.yml").read_text()
DOCKERFILE = (ROOT / "Dockerfile").read_text()
UNITS = {name: (ROOT / "examples" / f"atoll-{name}.service").read_text() for name in ("island", "hub")}


def services(text):
    """Service name -> its lines. The files keep to block maps with two spaces and JSON lists, which this relies on."""
    assert "\t" not in text
    body = re.search(r"^services:\n(.*?)(?=^\S|\Z)", text, re.M | re.S).group(1)
    parts = re.split(r"^  ([a-z]+):\n", body, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def value(block, key, **variables):
    """The JSON list that stands behind ``key:``, its variables replaced by those given here, or by their defaults."""
    found = re.search(rf"^ +{key}: (\[.*\])$", block, re.M)
    assert found, f"{key} is missing in {block}"
    return json.loads(re.sub(r"\$\{(\w+):-([^}]*)\}", lambda each: variables.get(each[1], each[2]), found.group(1)))


def arguments_of(text, service, **variables):
    """What a service gives our command line: behind the image's entry point, or behind its own."""
    block, shared = services(text)[service], text[: text.index("services:")]
    words = []
    for key in ("entrypoint", "command"):
        if f" {key}: [" in block + shared:
            words += value(block if f" {key}: [" in block else shared, key, **variables)
    return words[3:] if words[:3] == ["python3", "-m", "ops"] else words


def parse(arguments):
    """Parses a command of ours as ``atoll`` would; fails on anything unknown."""
    name, *rest = arguments
    parser = parser_of(name)
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    args, unknown = parser.parse_known_args(rest)
    assert unknown == []
    return args


each_file = pytest.mark.parametrize("text", [COMPOSE, REGION], ids=["whole", "region"])


def test_the_whole_run_has_all_its_services_and_their_commands_are_ours():
    assert list(services(COMPOSE)) == ["keys", "redis", "broker", "aggregator", "island"]
    assert list(services(REGION)) == ["settings", "island"]
    for service in ("keys", "broker", "aggregator", "island"):
        arguments = arguments_of(COMPOSE, service)
        assert arguments[0] == service
        parse(arguments)


def test_the_region_starts_an_island_of_ours_behind_a_check_of_the_same_settings():
    args, checked = parse(arguments_of(REGION, "island")), parse(arguments_of(REGION, "settings"))
    assert not args.check
    assert checked.check
    checked.check = False
    assert vars(checked) == vars(args)
    # Docker starts again whatever fails: nothing behind the check does that where it cannot help.
    assert "settings: { condition: service_completed_successfully }" in services(REGION)["island"]
    assert 'restart: "no"' in services(REGION)["settings"]


def test_the_region_can_be_looked_at_and_taken_down_without_an_address_and_is_not_started():
    assert ":?" not in REGION  # it makes every command of compose fail, down and logs too
    args = parse(arguments_of(REGION, "settings"))
    with pytest.raises(ConfigError, match=r"broker = 'ATOLL_BROKER is not set': must be tcp://HOST:PORT"):
        IslandConfig(run_id=args.run_id, broker=args.broker, key=Path(args.key))
    args = parse(arguments_of(REGION, "settings", ATOLL_BROKER="tcp://hub:7001"))
    assert IslandConfig(run_id=args.run_id, broker=args.broker, key=Path(args.key)).brokers == ("tcp://hub:7001",)


def test_an_island_that_has_ended_its_run_is_not_started_again():
    assert "restart: on-failure" in COMPOSE[: COMPOSE.index("services:")]
    assert "restart:" not in services(COMPOSE)["island"]
    assert "restart: on-failure" in services(REGION)["island"]


def test_what_the_head_of_the_file_says_about_keys_is_a_command_of_ours():
    (said,) = re.findall(r"docker compose run --rm (.*)$", COMPOSE, re.M)
    service, *words = shlex.split(said)
    assert value(services(COMPOSE)[service], "entrypoint") == ["python3", "-m", "ops", "keys"]
    args = parse(["keys", *words])
    assert (args.action, args.role, args.name, str(args.dir)) == ("new", "island", "paris", "/etc/atoll")
    assert (args.run, args.join) == (parse(arguments_of(COMPOSE, "broker")).run_id, "hub.example.com")
    assert "working_dir: /etc/atoll\n" in services(COMPOSE)[service]  # where the join file is written


@each_file
def test_islands_start_in_a_folder_of_the_users_with_a_task_its_options_and_an_image_for_it(text):
    usual = parse(arguments_of(text, "island"))
    assert (usual.task, str(usual.config)) == (IslandConfig().task, "/dev/null")
    args = parse(arguments_of(text, "island", ATOLL_TASK="islands.hf:task", ATOLL_CONFIG="fleet.toml"))
    assert (args.task, str(args.config)) == ("islands.hf:task", "fleet.toml")
    assert re.search(r"^ +working_dir: /srv/files$", text, re.M)
    assert re.search(r'"\$\{ATOLL_FILES:-[./a-z]+\}:/srv/files:ro"\]', text)
    assert "LOCK: ${LOCK:-requirements-runtime.lock}\n" in text
    for name in ("LOCK", "ATOLL_TASK", "ATOLL_FILES", "ATOLL_CONFIG"):
        assert name in text[: text.index("\nname: ")]
    # From any folder, and what the Hugging Face hub gives goes where there is room.
    for variable in ("PYTHONPATH=/srv/atoll ", "HF_HOME=/var/lib/atoll/"):
        assert variable in DOCKERFILE


@pytest.mark.parametrize(
    ("service", "asked", "within_s"), [("aggregator", "leader", LEADER_WITHIN_S), ("broker", "broker", BROKER_WITHIN_S)]
)
def test_the_hub_is_healthy_when_redis_says_so(service, asked, within_s):
    block = services(COMPOSE)[service]
    check = value(block, "test")
    assert check[:4] == ["CMD", "python3", "-m", "ops"]
    args = parse(check[4:])
    checks = {"leader": args.leader, "broker": args.broker}
    assert float(checks.pop(asked)) == within_s
    assert list(checks.values()) == [None]
    assert (args.json, args.watch, args.run_dir) == (False, False, None)  # a check excludes these
    assert args.run == parse(value(block, "command")).run_id


@each_file
def test_an_island_is_healthy_while_it_steps_and_hears_its_broker(text, tmp_path):
    args = parse(arguments_of(text, "island"))
    _, *command = value(services(text)["island"], "test")
    file = tmp_path / "health"
    assert str(args.health) == "/tmp/health"
    assert command[-1].count(f"'{args.health}'") == 1
    command = [sys.executable, *command[1:-1], command[-1].replace(str(args.health), str(file))]

    def status():
        return subprocess.run(command, capture_output=True, timeout=30).returncode

    assert status() == 1  # it has not begun
    file.touch()
    assert status() == 0
    os.utime(file, (time.time() - 61.0,) * 2)
    assert status() == 1


@each_file
def test_every_command_is_about_the_same_run_and_its_name_is_a_variable(text):
    for name, block in services(text).items():
        if name not in ("redis", "keys"):
            assert '"--run", "${ATOLL_RUN:-compose}"' in (block if " command: " in block else text), name
            assert '"--run", "compose"' not in block, name
    # A store holds one run, and optimizer state is of one run: neither is found under another name.
    assert '"/var/lib/atoll/store/${ATOLL_RUN:-compose}"' in COMPOSE
    assert '"/var/lib/atoll/island/${ATOLL_RUN:-compose}"' in text


def test_ports_are_published_to_this_host_alone_unless_told_otherwise():
    assert value(services(COMPOSE)["broker"], "ports") == ["127.0.0.1:7001:7001", "127.0.0.1:7002:7002"]
    assert COMPOSE.count("    ports: ") == 1
    assert COMPOSE.count("${ATOLL_BIND:-127.0.0.1}") == 2
    assert "#   ATOLL_BIND " in COMPOSE


@each_file
def test_islands_keep_their_optimizer_state_on_a_volume(text):
    block = services(text)["island"]
    args = parse(arguments_of(text, "island"))
    assert Path(args.state_dir).is_relative_to("/var/lib/atoll")
    # The directory that the image gives to its user: a volume over any other one would be root's.
    assert value(block if " volumes: " in block else text, "volumes")[0] == "islands:/var/lib/atoll"
    assert re.search(r"^volumes:\n(?:  \w+:\n)*  islands:$", text, re.M)


@each_file
def test_every_service_is_checked_for_health_and_shut_in(text):
    shared = text[: text.index("services:")]
    assert "socket" not in text  # the broker would count a connection that says nothing as a message to refuse
    for name, block in services(text).items():
        if name not in ("keys", "settings"):  # they end as soon as they have done their work
            assert "healthcheck:" in block, name
            kind, *check = value(block, "test")
            assert kind == "CMD", name
            if "-c" in check:
                compile(check[check.index("-c") + 1], "healthcheck", "exec")
        for wanted in ("read_only: true", 'cap_drop: ["ALL"]', "no-new-privileges:true", "tmpfs:"):
            assert wanted in block or ("<<: *atoll" in block and wanted in shared), (name, wanted)


def test_no_service_waits_for_the_health_of_another_one_which_would_leave_it_unstarted():
    assert "service_healthy" not in COMPOSE
    needs = {"broker": "redis", "aggregator": "broker", "island": "aggregator"}  # so they are stopped in that order
    for name, needed in needs.items():
        assert f"{needed}: {{ condition: service_started }}" in services(COMPOSE)[name]


@each_file
def test_islands_can_be_scaled_because_nothing_names_one_of_them(text):
    block = services(text)["island"]
    assert "container_name" not in text
    assert "hostname" not in block
    assert "ports:" not in block
    assert parse(arguments_of(text, "island")).island_id is None


def test_the_store_is_on_a_volume_that_the_image_gives_to_its_user():
    assert value(services(COMPOSE)["aggregator"], "volumes")[0] == "store:/var/lib/atoll"
    assert re.search(r"^volumes:\n  keys:\n  store:\n", COMPOSE, re.M)
    assert "chown atoll:atoll /var/lib/atoll /etc/atoll" in DOCKERFILE


def test_everybody_has_a_key_that_the_keys_service_makes():
    blocks = services(COMPOSE)
    made = {f"{KeyRole.BROKER}.secret"}
    for each in parse(arguments_of(COMPOSE, "keys")).who:
        role, _, name = each.partition(":")
        made.add(Identity(role=KeyRole(role), name=name or role).stem + ".secret")
    used = {parse(value(blocks[name], "command")).key for name in ("broker", "aggregator", "island")}
    assert {Path(path).name for path in used} == made
    assert {str(Path(path).parent) for path in used} == {"/etc/atoll"}
    for name in ("broker", "aggregator", "island"):
        assert "keys:/etc/atoll:ro" in value(blocks[name], "volumes")
    assert "keys: { condition: service_completed_successfully }" in blocks["broker"]
    assert value(blocks["keys"], "volumes") == ["keys:/etc/atoll"]
    assert parse(arguments_of(REGION, "island")).key == "/etc/atoll/islands.secret"


def test_the_image_needs_no_special_builder_and_runs_as_nobody_special():
    assert not DOCKERFILE.startswith("# syntax")
    assert "--mount" not in DOCKERFILE
    assert "<<" not in DOCKERFILE
    assert DOCKERFILE.count("FROM ${BASE_IMAGE}") == 2
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.M)
    assert re.search(r"^ARG LOCK=requirements-runtime.lock$", DOCKERFILE, re.M)
    assert "--require-hashes -r ${LOCK}" in DOCKERFILE
    assert (ROOT / re.search(r"--build-arg LOCK=(\S+)", DOCKERFILE).group(1)).exists()
    assert 'ENTRYPOINT ["python3", "-m", "ops"]' in DOCKERFILE
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    for copied in ("requirements*.lock", "pyproject.toml", "broker", "islands", "aggregator", "ops", "examples"):
        assert f"!{copied}" in ignore


@pytest.mark.parametrize("name", UNITS)
def test_a_systemd_unit_starts_a_command_of_ours_and_does_not_retry_wrong_settings(name, tmp_path):
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read_string(UNITS[name])
    service = unit["Service"]
    words = shlex.split(service["ExecStart"])
    assert Path(words[0]).name == "atoll"
    assert words[1] == name
    args = parse(words[1:])
    if name == "island":
        assert str(args.key) == "%d/island.secret"
    else:
        assert service["KillMode"] == "mixed"  # else all processes are told to end at once
    kept = args.state_dir if name == "island" else args.run_dir
    assert str(kept) == f"%S/{service['StateDirectory']}"  # which belongs to its user
    assert service["RestartPreventExitStatus"] == "2"
    assert service["DynamicUser"] == "yes"
    if shutil.which("systemd-analyze"):
        file = tmp_path / f"atoll-{name}.service"
        file.write_text(UNITS[name].replace("/opt/atoll/bin/atoll", "/bin/true"))
        checked = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
        assert [line for line in checked.stderr.splitlines() if file.name in line] == []
