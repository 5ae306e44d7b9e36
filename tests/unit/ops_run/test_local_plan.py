"""What ``up`` resolves its flags and file to, and the processes that follow, without starting any."""

import argparse
import dataclasses
import json
import os
import signal
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.base import sources
from broker.base.errors import ConfigError
from broker.process.signals import Interrupted
from ops.link_proxy import placing
from ops.plans.devices import Found, Platform, placements
from ops.run import daemons, display, local_plan, resume
from ops.run.local_run import LocalRun
from ops.run.prepare import prepare


def parsed(*words):
    parser = argparse.ArgumentParser()
    parser.set_defaults(resume=None)
    local_plan.add_arguments(parser)
    return parser.parse_args(words)


def resolved(*words, redis_port=6379, run_dir=Path("/runs/demo one")):
    return local_plan.resolve(
        parsed(*words), run_dir=run_dir, port=7101, redis_url="redis://127.0.0.1:6379", redis_port=redis_port
    )


def test_paths_and_addresses_follow_from_the_run_directory():
    plan = resolved()
    assert plan.run_id == "demo-one"
    assert plan.aggregator.store == Path("/runs/demo one/store")
    assert plan.aggregator.tape == Path("/runs/demo one/events.jsonl")
    assert (plan.broker.host, plan.broker.port) == ("127.0.0.1", 7101)
    assert plan.aggregator.broker == plan.island.broker == "tcp://127.0.0.1:7101"
    assert plan.aggregator.total_tokens == local_plan.DEFAULT_TOKENS


@pytest.mark.parametrize(
    ("stored", "run_id"), [("first", "second"), ("first-2", "second"), ("first-x", "first-x"), ("mine", "mine")]
)
def test_a_repetition_is_named_after_its_own_directory_where_the_run_before_was(tmp_path, stored, run_id):
    path = tmp_path / "first" / "config.toml"
    path.parent.mkdir()
    path.write_text(f'[run]\nrun_id = "{stored}"\n')
    assert resolved("--config", str(path), run_dir=tmp_path / "second").run_id == run_id
    assert resolved("--config", str(path), run_dir=tmp_path / "first").run_id == stored  # resumed
    assert resolved("--config", str(path), "--run", stored, run_dir=tmp_path / "second").run_id == stored


def test_several_brokers_have_ports_two_apart_and_everybody_knows_all_of_them():
    plan = resolved("--brokers", "3")
    assert plan.broker_ports == {"broker-0": 7101, "broker-1": 7103, "broker-2": 7105}
    assert plan.island.brokers == plan.aggregator.brokers == tuple(f"tcp://127.0.0.1:{n}" for n in (7101, 7103, 7105))
    specs = daemons.processes(plan, environment={}, island_environment={})
    flags = [each.command[-6:] for each in specs if each.name.startswith("broker-")]
    ports = [7101 + 2 * k for k in range(3)]
    assert flags == [
        ["--broker-name", f"broker-{k}", "--port", f"{port}", "--ipc", f"@atoll-{port}"] for k, port in enumerate(ports)
    ]
    ways = {each.environment.get("ATOLL_BROKER") for each in specs if not each.name.startswith("broker-")}
    assert ways == {",".join(f"ipc://@atoll-{port}" for port in ports)}


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[run]\nrun_id = "mine"\n[aggregator]\nislands = 3\nquorum = 2\n[task]\nmodel = "tiny"\nbatch = 4\n'
        "[up]\npace = [0.1]\n"
    )
    plan = resolved("--config", str(path), "--islands", "2", "--model", "medium", "--task-option", "batch=9")
    assert (plan.run_id, plan.aggregator.islands, plan.aggregator.quorum) == ("mine", 2, 2)
    assert plan.task == {"model": "medium", "batch": 9}
    assert plan.up.pace == (0.1,)


def test_an_option_that_the_task_does_not_have_is_refused_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"task.modle = 'tiny': .* has no such option; did you mean model\?"):
        resolved("--task-option", "modle=tiny")
    (tmp_path / "built_by_a_call.py").write_text("task = make()\n")
    monkeypatch.chdir(tmp_path)  # islands are started here
    path = tmp_path / "mine.toml"
    path.write_text('[island]\ntask = "built_by_a_call:task"\n[task]\nanything = 1\n')
    assert resolved("--config", str(path)).task == {"anything": 1}  # the source does not tell: the islands will


@pytest.mark.parametrize(
    ("task", "cure"),
    [
        ("examples.numpy_taks:task", r"there is no module examples\.numpy_taks: check the name"),
        ("exampels.numpy_task:task", r"there is no module exampels: check the name"),
        ("examples.numpy_task:tusk", r"does not mention tusk; did you mean task\?"),
        ("examples.numpy_task", "must read package.module:function"),
    ],
)
def test_a_misspelt_task_is_refused_before_anything_starts(tmp_path, task, cure):
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=cure):
        prepare(parsed("--task", task, "--run-dir", str(run_dir), "--redis-url", "redis://127.0.0.1:1"))
    assert not run_dir.exists()


def test_the_resolved_file_gives_every_process_the_same_settings_again(tmp_path):
    plan = resolved("--islands", "3", "--data", "here", "python:numpy", "--codec", "f32")
    path = tmp_path / "config.toml"
    path.write_text(local_plan.config_toml(plan))
    args, environment = argparse.Namespace(config=path), {"REDIS_URL": plan.redis_url}
    for name, wanted in (("broker", plan.broker), ("aggregator", plan.aggregator), ("island", plan.island)):
        assert sources.load(type(wanted), args, name, environment=environment) == wanted
    tables = tomllib.loads(path.read_text())
    assert tables["task"]["data"] == [os.path.abspath("here"), "python:numpy"]
    assert "run_dir" not in tables["up"]


def test_a_run_without_keys_takes_none_from_the_file_of_one_with(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(local_plan.config_toml(resolved("--keys")))
    plan = resolved("--config", str(path), "--no-keys")
    assert (plan.broker.key, plan.aggregator.key) == (None, None)


def test_a_broker_that_the_shell_names_is_not_that_of_a_local_run(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_BROKER", "tcp://127.0.0.1:7001")
    plan = resolved()
    path = tmp_path / "config.toml"
    path.write_text(local_plan.config_toml(plan))
    environment = os.environ | daemons.our_environment(plan.redis_url)
    island = sources.load(type(plan.island), argparse.Namespace(config=path), "island", environment=environment)
    assert island.broker == plan.island.broker


WAY = {"ATOLL_BROKER": "ipc://@atoll-7101"}  # Linux


def test_there_is_a_process_for_everything_and_islands_are_pinned_and_paced():
    plan = resolved("--islands", "3", "--pace", "0.1,0.2,0.3")
    specs = daemons.processes(plan, environment={"A": "1"}, island_environment={"B": "2"})
    assert [spec.name for spec in specs] == ["broker", "aggregator", "island-0", "island-1", "island-2"]
    assert [spec.ends_by_itself for spec in specs] == [False, True, True, True, True]
    assert specs[0].environment == {"A": "1"}
    assert specs[1].environment == {"A": "1", "B": "2", "JAX_PLATFORMS": "cpu"} | WAY
    cpus = sorted(os.sched_getaffinity(0))
    for index, spec in enumerate(specs[2:]):
        assert spec.cpus == (cpus[index % len(cpus)],)
        assert spec.command[-2:] == ["--pace", f"0.{index + 1}"]
        assert spec.environment == {"A": "1", "B": "2"} | WAY
        assert f"--health {spec.progress}" in " ".join(spec.command), "a step in its life is a sign of work"
    assert specs[1].progress == plan.store_of("aggregator") / "ledger.jsonl"
    one = daemons.processes(resolved("--pace", "0.5"), environment={}, island_environment={})
    assert all(spec.command[-1] == "0.5" for spec in one[2:])


def test_islands_have_their_devices_and_nobody_else_has_any():
    places = placements(Found(platform=Platform.GPU, devices=("0", "1")), islands=2, devices_per_island=1)
    plan = dataclasses.replace(resolved("--islands", "2"), devices=places)
    broker, aggregator, *islands = daemons.processes(
        plan, environment={"A": "1"}, island_environment={"JAX_PLATFORMS": "cuda"}
    )
    assert broker.environment == {"A": "1"}
    assert aggregator.environment == {"A": "1", "JAX_PLATFORMS": "cpu"} | WAY
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in islands] == ["0", "1"]
    assert [each.cpus for each in islands] == [(), ()]


def test_an_island_of_several_cpu_devices_has_as_many_processors_while_there_are_any():
    places = placements(Found(platform=Platform.CPU), islands=2, devices_per_island=2)
    plan = dataclasses.replace(resolved("--islands", "2"), devices=places)
    specs = daemons.processes(plan, environment={}, island_environment={})[2:]
    cpus = sorted(os.sched_getaffinity(0))
    assert [len(each.cpus) for each in specs] == [min(2, len(cpus))] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--brokers 0", "brokers = 0"),
        ("--brokers 17", "brokers = 17"),
        ("--islands 1001", "islands = 1001"),
        ("--port 70000", "port = 70000"),
        ("--pace -1", "pace = "),
        ("--pace 1,2,3", "pace = '1,2,3'"),
        ("--platform gqu", "platform = 'gqu': must be one of auto, cpu, gpu, tpu"),
        ("--devices-per-island -1", "devices_per_island = -1: must be at least 1, or 0"),
        ("--evaluate-every -5", "evaluate_every = -5: must be a number of tokens, such as 200K, or 0"),
        ("--benchmark mine", "benchmark = 'mine': must read package.module:function, such as mymodel:accuracy"),
        ("--benchmark no.such:one", "benchmark = 'no.such:one': there is no module no"),
        ("--benchmark json:dump json.tool:mian", "benchmark = 'json.tool:mian': "),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(words, said):
    with pytest.raises(ConfigError) as caught:
        resolved(*words.split())
    assert str(caught.value).startswith(said)


def test_an_interrupt_while_processes_are_started_starts_no_more_of_them(tmp_path):
    names = []

    def interrupted_at_the_fourth():
        if len(names) == 3:
            raise Interrupted(signal.SIGINT)

    cluster = SimpleNamespace(start=lambda specs: names.extend(spec.name for spec in specs))
    run = LocalRun(plan=resolved(redis_port=None, run_dir=tmp_path), started_s=0.0)
    with pytest.raises(Interrupted), display.Display() as shown:
        run.start(cluster, shown, SimpleNamespace(check=interrupted_at_the_fourth))
    assert names == ["broker", "aggregator", "island-0"]


@pytest.mark.parametrize(("status", "hint"), [(1, True), (130, True), (2, False), (0, False)])
def test_a_run_that_gave_up_says_how_to_go_on_with_it(tmp_path, status, hint):
    report = LocalRun(plan=resolved(run_dir=tmp_path), started_s=0.0).report(status)
    assert report["resume"] == (f"atoll up --resume {tmp_path}" if hint else "")
    assert report["tokens"]["trained"] is None  # nobody has written any count


def test_a_run_of_two_shards_has_ended_when_both_have_and_what_both_counted_is_put_away(tmp_path):
    plan = resolved("--shards", "2", "--tokens", "100", run_dir=tmp_path)
    (tmp_path / "aggregator-1").mkdir()
    for path, phase in zip(plan.reports, ("ended", "running"), strict=True):
        path.write_text(json.dumps({"phase": phase, "tokens": {"trained": 100}}))
    assert not resume.has_ended(plan)
    plan.reports[1].write_text(plan.reports[0].read_text())
    assert resume.has_ended(plan)
    resume.put_away_reports(plan)
    assert not any(path.exists() for path in plan.reports)


def test_nobody_is_asked_for_metrics_of_a_run_that_has_ended(tmp_path):
    plan = resolved("--metrics", "9401", "--islands", "2", run_dir=tmp_path)
    written = [json.loads(daemons.write_scrape_targets(plan, live=live).read_text()) for live in (True, False)]
    named = {each["labels"]["process"]: each["targets"] for each in written[0]}
    assert named["broker"] == ["127.0.0.1:9401"]
    assert len(named) == 4  # with the aggregator and two islands
    assert written[1] == []


def test_a_redis_that_runs_is_taken_from_flag_environment_or_file(tmp_path, monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)
    assert local_plan.given_redis_url(parsed()) is None
    path = tmp_path / "mine.toml"
    path.write_text('[run]\nredis_url = "redis://file"\n')
    assert local_plan.given_redis_url(parsed("--config", str(path))) == "redis://file"
    monkeypatch.setenv("REDIS_URL", "redis://environment")
    assert local_plan.given_redis_url(parsed("--config", str(path))) == "redis://environment"
    assert local_plan.given_redis_url(parsed("--redis-url", "redis://flag")) == "redis://flag"


def test_with_links_the_clients_that_have_one_are_sent_to_their_doors(tmp_path):
    path = tmp_path / "region.toml"
    path.write_text('[link."island-*"]\ndelay_ms = 40\n')
    plan = resolved("--islands", "2", "--link", str(path))
    assert plan.up.link == path
    ways = placing.ways(plan.clients, [plan.aggregator.broker], redis_clients=["broker"], redis_url=plan.redis_url)
    links = placing.place(placing.read(path), ways, find_ports=lambda count: 7201, run_dir=plan.run_dir)
    specs = daemons.processes(dataclasses.replace(plan, links=links), environment={"A": "1"}, island_environment={})
    assert [spec.name for spec in specs] == ["links", "broker", "aggregator", "island-0", "island-1"]
    ways_in = ["ipc://@atoll-7101", "tcp://127.0.0.1:7201", "tcp://127.0.0.1:7203"]  # the aggregator has no link here
    assert [spec.environment.get("ATOLL_BROKER") for spec in specs] == [None, None, *ways_in]
    assert [spec.stop_order for spec in specs] == [1, 1, 0, 0, 0]


def test_what_the_inner_optimizer_decides_stays_open_and_the_recipe_has_a_table_of_its_own():
    written = tomllib.loads(local_plan.config_toml(resolved("--task-option", "optimizer=muon", "--keep", "0")))
    assert written["recipe"]["keep"] == 0
    assert not {"merge", "outer_learning_rate", "outer_momentum"} & written["recipe"].keys()
    assert not written["recipe"].keys() & written["aggregator"].keys()


def test_the_follower_is_told_what_to_evaluate_and_when():
    plan = resolved("--evaluate-every", "200K", "--benchmark", "json:dump", "json:dumps")
    follower = daemons.follower(plan, environment={"A": "b"})
    words = follower.command[follower.command.index("evaluate") :]
    assert words == [
        *("evaluate", "--follow", "/runs/demo one", "--every", "200000"),
        *("--benchmark", "json:dump", "--benchmark", "json:dumps"),
    ]
    assert follower.ends_by_itself
    assert resolved().up.evaluate_every == 0
