"""``atoll plan`` as a command: flags, files of fleets, JSON and text."""

import json
import math

import pytest

from broker.wire.errors import ConfigError
from ops import cli
from ops.goodput import simulation
from ops.goodput.fleet import FailureModel
from ops.goodput.simulation import expected_goodput
from ops.planning import command as planning


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch):
    """What the plan says of goodput is what the simulation says, however long that is."""
    monkeypatch.setattr(simulation, "ESTIMATE_EVENTS", 10_000)


@pytest.fixture
def atoll(monkeypatch, capsys):
    """Calls ``atoll plan``; returns exit status, standard output and standard error."""
    command = cli.Command(module="ops.planning.command", summary="plans", example="--params 5B")
    monkeypatch.setitem(cli.COMMANDS, "plan", command)

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
    document = planned(*PAIR, "--bandwidth", 2, "--latency-ms", 5, "--price-per-gb", 0.01)
    for key in planning._EPILOG.split("one object:")[1].split("bandwidth_gbps is")[0].replace("\n", " ").split(", "):
        assert key.split()[0].strip(" .") in document, key
    bandwidth = document["bandwidth_gbps"]
    assert bandwidth["up"] == bandwidth["site_up"] == bandwidth["per_site"]["up"] == pytest.approx(0.86, abs=0.01)
    assert bandwidth["down"] == bandwidth["per_site"]["down"] == pytest.approx(0.86, abs=0.01)
    assert bandwidth["broker_up"] == 8 * bandwidth["down"]
    assert set(document["alternatives"]) == {"streaming", "diloco", "dp"}
    assert document["choice"]["sync_interval_steps"] > 100  # merging 5e9 parameters takes 117 s
    assert set(document["published"]) == {"decoupled", "streaming", "diloco", "dp"}
    assert document["cost"]["accelerators_per_day"] is None


def test_the_published_pair_is_printed_with_its_assumptions(atoll, planned):
    out = atoll(*PAIR, "--assume", "paper")[1]
    row = next(line for line in out.splitlines() if line.startswith("Gbit/s needed, site up"))
    assert row.split()[4:] == ["0.841", "0.803", "18.7", "198"]
    assert "(f =" in out
    assert "128 buckets" in out
    document = planned(*PAIR, "--assume", "paper")
    assert round(document["bandwidth_gbps"]["up"], 2) == 0.84
    assert round(document["alternatives"]["dp"]["bandwidth_gbps"]["up"]) == 198
    assert "published" not in document["assumptions"][0]
    assert round(planned(*PAIR)["published"]["dp"]["gbps"]) == 198  # said whatever is assumed


def test_text_ends_with_what_to_try_next(atoll):
    lines = atoll(*PAIR, "--bandwidth", 2, "--accelerators", 8)[1].splitlines()
    assert any(line.startswith("For these links: --codec") for line in lines)
    assert lines[-1].startswith("next: atoll up --codec")
    assert "leave out --mode" in atoll(*PAIR, "--bandwidth", 2, "--mode", "dp")[1].splitlines()[-1]


def test_an_interval_of_one_step_leaves_no_step_of_overlap(planned):
    assert planned("--params", "1M", "--step-time", 1, "--sync-interval", 1)["settings"]["overlap"] == 0


def test_unequal_sites_have_the_goodput_of_each_by_the_tokens_it_brings(planned, fleet_file):
    big = "[[island]]\nstep_time = 1.0\naccelerators = 1000000\ntokens_per_step = 3000000\n"
    small = "[[island]]\nstep_time = 2.0\naccelerators = 20000\ntokens_per_step = 2000000\n"
    document = planned("--params", "1B", "--fleet", fleet_file(big + small * 3))
    own = [expected_goodput(chips=4 * chips, islands=4, step_s=2.0) for chips in (1_000_000, 20_000)]
    assert own[0] < own[1] - 0.3
    assert document["goodput"] == pytest.approx((3 * own[0] + 3 * own[1]) / 6)
    together = expected_goodput(mode="elastic-dp", chips=1_060_000, islands=4, step_s=2.0)
    assert document["alternatives"]["dp"]["goodput"] == pytest.approx(together)


@pytest.mark.parametrize(("step_s", "interval"), [(1, 24), (5, 500)])
def test_synchronous_sites_are_expected_to_do_what_simulate_says_of_their_step_and_interval(planned, step_s, interval):
    asked = ("--params", "5B", "--sites", 8, "--accelerators", 150_000, "--mode", "diloco")
    found = planned(*asked, "--step-time", step_s, "--sync-interval", interval)["goodput"]
    assert found == expected_goodput(mode="diloco", chips=1_200_000, islands=8, step_s=step_s, sync_interval=interval)
    often = planned(*asked, "--step-time", 1, "--sync-interval", 2)["goodput"]
    assert often < found  # who meets more often waits for more pauses


def test_goodput_is_that_of_the_interval_that_comes_out_and_not_of_the_one_asked_for(planned):
    """A slow aggregator makes H long, and an island that goes down takes up to H steps with it."""
    sites = ("--sites", 4, "--step-time", 1, "--accelerators", 64, "--mtbi-years", 0.01)
    asked, told = (planned("--params", "46B", *sites, "--sync-interval", interval) for interval in (24, 780))
    assert asked["sync_interval_steps"] == told["sync_interval_steps"] > 780
    assert asked["goodput"] == told["goodput"] < 0.68
    small = planned("--params", "1B", *sites)
    assert small["sync_interval_steps"] == 24
    assert small["goodput"] > asked["goodput"] + 0.03


@pytest.mark.parametrize(("sites", "accelerators", "step_s"), [(64, 1, 0.02), (128, 8, 0.05)])
def test_short_steps_of_small_sites_are_no_reason_to_refuse_a_fleet(planned, sites, accelerators, step_s):
    """By hand: each failure is a repair and a restart, for which all of them wait; those of a few overlap."""
    flags = ("--params", "125M", "--sites", sites, "--accelerators", accelerators, "--fragments", 24)
    waits = sites * accelerators / FailureModel().chip_mtbi_s * (1800.0 + 83.5)
    found = planned(*flags, "--step-time", step_s, "--mode", "streaming")
    assert found["goodput"] == pytest.approx(math.exp(-waits), abs=0.03)


def test_islands_that_stream_meet_at_every_fragment(planned):
    asked = ("--params", "5B", "--sites", 8, "--accelerators", 150_000, "--step-time", 1, "--mode", "streaming")
    often, rarely = (planned(*asked, "--fragments", fragments)["goodput"] for fragments in (8, 1))
    as_diloco = expected_goodput(mode="diloco", chips=1_200_000, islands=8, sync_interval=5)  # H / P + tau
    assert often == pytest.approx(as_diloco, abs=0.01)
    assert often < rarely - 0.05


def test_unequal_sites_come_from_a_file(planned, fleet_file):
    file = fleet_file(
        '[[island]]\nname = "east"\ncount = 2\nstep_time = 1.0\ngbps = 10\nms = 5\naccelerators = 8\n'
        '[[island]]\nname = "west"\nstep_time = 2\ngbps = 4.0\n'
    )
    document = planned("--params", "1B", "--fleet", file)
    assert [each["name"] for each in document["sites"]] == ["east", "east", "west"]
    assert document["sites"][2]["link_share_needed"] == pytest.approx(2.5 * document["sites"][0]["link_share_needed"])
    assert document["goodput"] is None
    # While the slow one steps, the fast ones wait for half of the time.
    synchronous = planned("--params", "1B", "--fleet", file, "--mode", "streaming")
    assert synchronous["utilisation"] == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--step-time 1", "params = None: is needed; give --params 5B"),
        ("--params five --step-time 1", "params = 'five'"),
        ("--params 5B", "step_time = None: is needed"),
        ("--params 5B --step-time fast", "step_time = 'fast': must be a number"),
        ("--params 5B --step-time 1 --sites 2.5", "sites = '2.5': must be a whole number"),
        ("--params 5B --step-time 1 --sites 1001", "sites = 1001: must lie between 1 and 1000"),
        ("--params 5B --step-time 1 --accelerators 1000000000000", "accelerators = 1000000000000: must lie"),
        (f"--params 5B --step-time 1 --tokens-per-step {10**310}", "tokens_per_step = 1"),
        ("--params 5B --step-time 1 --overlap 24", "overlap = 24: must be below sync_interval = 24"),
        ("--params 5B --step-time 1 --mode decoupld", "mode = 'decoupld': must be one of decoupled, streaming"),
        ("--params 5B --step-time 1 --codec int5", "codec = 'int5': must be one of f32, bf16"),
        ("--params 5B --step-time 1 --fragments 48", "fragments = 48: must lie between 1 and 24"),
        ("--params 5B --step-time 1 --bandwidth 0.0001", "needs at least"),
        ("--params 5B --step-time 1 --mtbi-years 1", "give --accelerators as well, or with --fleet"),
        (
            "--params 5B --step-time 1 --assume paper --codec int4 --version-codec f32",
            "version_codec = 'f32': does not count with --assume paper",
        ),
        (
            "--params 5B --step-time 0.01 --latency-ms 50 --overlap 2 --mode streaming",
            "0.1 s of each journey are latency; an overlap of 11 steps hides it",
        ),
        (
            "--params 1B --sites 2 --step-time 1 --accelerators 8 --mtbi-years 1e-12",
            "mtbi_years = 1e-12: has an accelerator fail every 2e-06 s",
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
        ("[[island]]\nstep_time = 1\nms = 1e300", "[island] ms of site-0 = 1e+300: must lie between 0 and"),
        ("island = " + 100_000 * "[", "is not TOML"),
        ('[[island]]\nname = "west"\nstep_time = 1\ngbps = 0\n', "[island] gbps of west = 0: must lie"),
        ("[[island]]\nstep_time = 1\nms = nan\n", "ms = nan: must be a number"),
        ("[[island]]\nstep_tim = 1\n", "did you mean step_time?"),
        ("[[island]]\ngbps = 1\n", "step_time = None: is needed"),
        ('[[island]]\nstep_time = "1"\n', "must be a number"),
        ("[[island]]\nstep_time = 1\ncount = 0\n", "count = 0: must lie between"),
        ("[[isle]]\n", "did you mean island?"),
        ("[[", "is not TOML"),
    ],
)
def test_wrong_fleet_files_are_refused(fleet_file, text, words):
    with pytest.raises(ConfigError) as caught:
        planning.read_fleet(fleet_file(text), 1000)
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
