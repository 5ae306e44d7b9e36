"""``atoll plan`` as a command: flags, files of fleets, JSON and text."""

import json

import pytest

from broker.base.errors import ConfigError
from ops import cli
from ops.forecast_commands import plan as planning


@pytest.fixture
def atoll(capsys):
    """Calls ``atoll plan``; returns exit status, standard output and standard error."""

    def call(*arguments):
        status = cli.main(["plan", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture
def planned(atoll):
    """The document that ``atoll plan --json`` prints."""

    def call(*arguments):
        status, out, err = atoll(*arguments, "--json")
        assert status == 0, err
        return json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))

    return call


@pytest.fixture
def fleet_file(tmp_path):
    """Writes a file of sites."""

    def write(text):
        path = tmp_path / "fleet.toml"
        path.write_text(text)
        return path

    return write


PAIR = ("--params", "5e9", "--sites", 8, "--step-time", 1, "--codec", "int4", "--utilisation", 0.95)


def test_json_has_the_documented_keys_and_is_strict(planned):
    document = planned(*PAIR, "--bandwidth", 2, "--latency-ms", 5)
    for key in planning._EPILOG.split("one object:")[1].split("bandwidth_gbps is")[0].replace("\n", " ").split(", "):
        assert key.split()[0].strip(" .") in document, key
    bandwidth = document["bandwidth_gbps"]
    assert bandwidth["up"] == pytest.approx(0.86, abs=0.01) == bandwidth["down"]
    assert bandwidth["broker_up"] == 8 * bandwidth["down"]
    assert set(document["alternatives"]) == {"streaming", "diloco", "dp"}
    assert document["choice"]["sync_interval_steps"] > 100  # merging 5e9 parameters takes 117 s


def test_the_published_pair_is_printed_with_its_assumptions(atoll, planned):
    out = atoll(*PAIR, "--assume", "paper")[1]
    row = next(line for line in out.splitlines() if line.startswith("Gbit/s needed, site up"))
    assert row.split()[4:] == ["0.841", "0.803", "18.7", "198"]
    assert "(f =" in out
    assert "128 buckets" in out
    document = planned(*PAIR, "--assume", "paper")
    assert round(document["bandwidth_gbps"]["up"], 2) == 0.84
    assert round(document["alternatives"]["dp"]["bandwidth_gbps"]["up"]) == 198


def test_of_adapters_the_wire_and_the_hub_have_no_base_and_the_islands_have(planned, tmp_path):
    config = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    config |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ("--model", tmp_path, "--step-time", 1)
    whole, adapted = planned(*flags), planned(*flags, "--lora-rank", 16, "--dtype", "bf16")
    assert whole["settings"]["parameters"] == 8_030_261_248  # as Llama 3 8B says of itself
    adapters = adapted["settings"]["parameters"]
    assert adapters == 32 * 16 * (4096 + 4096 + 4096 + 1024)
    up = adapted["traffic"]["round_up_bytes"]
    assert up == pytest.approx(2 * adapters / adapted["settings"]["fragments"], rel=0.01)
    trainer = adapted["memory_bytes"]["island_accelerators"]["expected"]
    assert trainer == 2 * 8_030_261_248 + 16 * adapters
    aggregator = [each["memory_bytes"]["aggregator"]["expected"] for each in (whole, adapted)]
    assert aggregator[1] < 350e6 < 30e9 < aggregator[0]
    assert any("never travels" in sentence for sentence in adapted["assumptions"])


def test_text_ends_with_what_to_try_next(atoll):
    lines = atoll(*PAIR, "--bandwidth", 2)[1].splitlines()
    assert any(line.startswith("For these links: --codec") for line in lines)
    assert lines[-1].startswith("next: atoll up --codec")
    assert "give --bandwidth" in atoll(*PAIR)[1].splitlines()[-1]
    assert "leave out --assume" in atoll(*PAIR, "--bandwidth", 2, "--assume", "paper")[1].splitlines()[-1]


def test_an_interval_of_one_step_leaves_no_step_of_overlap(planned):
    assert planned("--params", "1M", "--step-time", 1, "--sync-interval", 1)["settings"]["overlap"] == 0


def test_unequal_sites_come_from_a_file(planned, fleet_file):
    file = fleet_file(
        '[[island]]\nname = "east"\ncount = 2\nstep_time = 1.0\nbandwidth = 10\nlatency_ms = 5\n'
        '[[island]]\nname = "west"\nstep_time = 2\nbandwidth = 4.0\n'
    )
    document = planned("--params", "1B", "--fleet", file)
    assert [each["name"] for each in document["sites"]] == ["east", "east", "west"]
    assert document["sites"][2]["link_share_needed"] == pytest.approx(2.5 * document["sites"][0]["link_share_needed"])
    # While the slow one steps, the fast ones wait for half of the time.
    assert document["alternatives"]["streaming"]["utilisation"] == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--step-time 1", "params = None: is needed; give --params 5B"),
        ("--params five --step-time 1", "params = 'five'"),
        ("--params 5B", "step_time = None: is needed"),
        ("--params 5B --step-time 1 --lora-rank 8", "lora_rank = '8': needs the shapes of the model"),
        ("--params 5B --step-time 1 --dtype bf16", "dtype = 'bf16': is about adapters: give --lora-rank"),
        ("--model config.toml --step-time 1 --lora-rank 8", "lora_rank = 8: is in [task] of config.toml"),
        ("--model . --step-time 1 --lora-rank 0", "lora_rank = 0: must be at least 1"),
        ("--params 5B --step-time fast", "step_time = 'fast': must be a number"),
        ("--params 5B --step-time 1 --sites 1001", "sites = 1001: must lie between 1 and 1000"),
        (f"--params 5B --step-time 1 --tokens-per-step {10**310}", "tokens_per_step = 1"),
        ("--params 5B --step-time 1 --overlap 24", "overlap = 24: must be below sync_interval = 24"),
        ("--params 5B --step-time 1 --codec int5", "codec = 'int5': must be one of f32, bf16"),
        ("--params 5B --step-time 1 --fragments 48", "fragments = 48: must lie between 1 and 24"),
        (
            "--params 5B --step-time 1 --assume paper --codec int4 --version-codec f32",
            "version_codec = 'f32': does not count with --assume paper",
        ),
    ],
)
def test_wrong_command_lines_are_one_line_with_a_cure(atoll, flags, words):
    status, out, err = atoll(*flags.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must have a table [[island]]"),
        ("[[island]]\nstep_time = 1" + 400 * "0", "must be at most 1e+18"),
        (
            "[[island]]\nstep_time = 1\nlatency_ms = 1e300",
            "[island] latency_ms of site-0 = 1e+300: must lie between 0 and",
        ),
        ("island = " + 100_000 * "[", "is not TOML"),
        ('[[island]]\nname = "west"\nstep_time = 1\nbandwidth = 0\n', "[island] bandwidth of west = 0: must lie"),
        ("[[island]]\nstep_tim = 1\n", "did you mean step_time?"),
        ("[[island]]\nbandwidth = 1\n", "step_time of site-0 = None: is needed"),
        ("[[island]]\nstep_time = 1\ncount = 0\n", "count = 0: must lie between"),
        ("[[isle]]\n", "did you mean island?"),
    ],
)
def test_wrong_fleet_files_are_refused(fleet_file, text, words):
    with pytest.raises(ConfigError) as caught:
        planning.read_fleet(fleet_file(text), {})
    assert words in str(caught.value)


def test_a_fleet_file_and_flags_for_sites_do_not_mix(atoll, fleet_file):
    path = fleet_file("[[island]]\nstep_time = 1\n")
    assert "leave the flag out" in atoll("--params", "1B", "--fleet", path, "--sites", 2)[2]


def test_where_nothing_can_be_chosen_the_plan_says_what_is_in_the_way(atoll, planned):
    asked = ("--params", 10**12, "--sites", 8, "--step-time", 10, "--sync-interval", 1000, "--bandwidth", 1e6)
    document = planned(*asked)
    assert document["choice"] is None
    assert "Merging every fragment once" in " ".join(document["notes"])
    assert atoll(*asked)[1].splitlines()[-1].startswith("next: no settings tried here are within")
