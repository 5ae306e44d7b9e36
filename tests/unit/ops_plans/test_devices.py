"""Which devices each island of a local run gets, and how they are looked for."""

import types

import pytest

from broker.base.errors import ConfigError
from ops.plans import devices
from ops.plans.devices import Found, Placement, Platform, placements
from ops.run import prepare

CPU = Found(platform=Platform.CPU)


def gpus(count, platform=Platform.GPU):
    return Found(platform=platform, devices=tuple(map(str, range(count))))


def chips(count):
    return gpus(count, Platform.TPU)


@pytest.mark.parametrize(("each", "flags"), [(0, {}), (3, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"})])
def test_on_the_cpu_each_island_has_one_device_or_is_made_to_have_more(each, flags):
    for place in placements(CPU, islands=2, devices_per_island=each):
        assert place.environment == {"JAX_PLATFORMS": "cpu"} | flags
        assert place.count == (each or 1)


@pytest.mark.parametrize(
    ("islands", "each", "visible"),
    [(8, 0, list("01234567")), (2, 4, ["0,1,2,3", "4,5,6,7"]), (3, 2, ["0,1", "2,3", "4,5"]), (2, 0, ["0", "1"])],
)
def test_gpus_go_to_the_islands_in_turn_and_no_two_have_the_same(islands, each, visible):
    found = placements(gpus(8), islands=islands, devices_per_island=each)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in found] == visible
    assert all(place.environment["JAX_PLATFORMS"] == "cuda,cpu" for place in found)
    assert not any("XLA_PYTHON_CLIENT_MEM_FRACTION" in place.environment for place in found)


def test_islands_that_outnumber_the_gpus_share_them_and_their_memory():
    named = Found(platform=Platform.GPU, devices=("6", "GPU-4f"))  # the names that the user left visible
    found = placements(named, islands=5, devices_per_island=0)
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in found] == ["6", "GPU-4f", "6", "GPU-4f", "6"]
    shared = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.300", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    assert all(shared.items() <= place.environment.items() for place in found)


def test_chips_of_a_tpu_are_told_how_they_lie():
    found = placements(chips(8), islands=2, devices_per_island=4)
    assert found[1].environment == {
        "JAX_PLATFORMS": "tpu,cpu",
        "TPU_VISIBLE_CHIPS": "4,5,6,7",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
    (whole,) = placements(chips(4), islands=1, devices_per_island=4)
    assert whole.environment == {"JAX_PLATFORMS": "tpu,cpu"}


@pytest.mark.parametrize(
    ("found", "islands", "each", "said"),
    [
        (gpus(1), 2, 1, r"^islands = 2: need 2 GPU devices, .* 1: at most 1 islands of 1, or leave --devices"),
        (gpus(8), 3, 4, r"^islands = 3: need 12 GPU devices, and here are 8: at most 2 islands of 4"),
        (gpus(8), 2, 3, r"^devices_per_island = 3: must divide the devices here, of which there are 8: 1, 2, 4, 8$"),
        (gpus(2), 1, 4, r"^devices_per_island = 4: must divide the devices here, of which there are 2: 1, 2$"),
        (chips(4), 5, 0, r"^islands = 5: need 5 TPU devices, and here are 4: at most 4 islands of 1$"),
        (chips(12), 2, 3, r"^devices_per_island = 3: must be 1, 2, 4, 8, or all 12"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_cure(found, islands, each, said):
    with pytest.raises(ConfigError, match=said):
        placements(found, islands=islands, devices_per_island=each)


def test_variables_of_devices_win_and_flags_of_xla_add_up():
    place = Placement(environment={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--devices"})
    ours = {"XLA_FLAGS": "--one", "JAX_PLATFORMS": "cuda", "A": "b"}
    assert devices.merged(ours, place) == {"XLA_FLAGS": "--devices --one", "JAX_PLATFORMS": "cpu", "A": "b"}
    assert devices.merged({"A": "b"}, Placement()) == {"A": "b"}


def test_the_evaluation_at_the_end_takes_a_gpu_and_never_a_tpu():
    assert devices.for_evaluation((), 2) == {"JAX_PLATFORMS": "cpu"}
    assert devices.for_evaluation(placements(chips(4), islands=1, devices_per_island=0), 2) == {"JAX_PLATFORMS": "cpu"}
    both = devices.for_evaluation(placements(gpus(2), islands=2, devices_per_island=0), 2)
    assert (both["CUDA_VISIBLE_DEVICES"], both["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("0", "0.450")


@pytest.mark.parametrize(
    ("found", "islands", "each", "said"),
    [
        (CPU, 4, 0, "4 islands train on the CPU, one device each"),
        (CPU, 1, 2, "1 island trains on the CPU, 2 devices each"),
        (gpus(4), 2, 2, "2 islands train on GPU: i0 0,1, i1 2,3"),
        (gpus(1), 2, 0, "2 islands train on GPU, each shared by up to 2: i0 0, i1 0"),
    ],
)
def test_one_line_says_what_each_island_has(found, islands, each, said):
    names = tuple(f"i{n}" for n in range(islands))
    assert devices.sentence(names, placements(found, islands=islands, devices_per_island=each)) == said


def answering(monkeypatch, stdout, plugin=True):
    """Has the child process print this; returns the environments that it was started with."""
    started = []

    def run(command, *, env, **_):
        started.append(env)
        return types.SimpleNamespace(stdout=stdout)

    monkeypatch.setattr(prepare, "_has_plugin", lambda: plugin)
    monkeypatch.setattr(prepare.subprocess, "run", run)
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"):
        monkeypatch.delenv(name, raising=False)
    return started


@pytest.mark.parametrize(
    ("plugin", "asked", "kept"),
    [(False, Platform.AUTO, ""), (True, Platform.CPU, ""), (True, Platform.AUTO, "cpu")],
    ids=["no plugin", "asked for", "kept by the environment"],
)
def test_without_a_plugin_or_with_jax_kept_on_the_cpu_nothing_is_started(monkeypatch, plugin, asked, kept):
    started = answering(monkeypatch, "", plugin)
    if kept:
        monkeypatch.setenv("JAX_PLATFORMS", kept)
    assert prepare.find_devices(asked) == CPU
    assert started == []


def test_what_the_child_finds_is_taken_by_the_names_that_the_user_knows(monkeypatch):
    started = answering(monkeypatch, 'noise\n["gpu", 2]\n')
    assert prepare.find_devices(Platform.AUTO) == gpus(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert prepare.find_devices(Platform.GPU).devices == ("3", "5")
    assert ["JAX_PLATFORMS" in each for each in started] == [False, True]
    assert started[1]["JAX_PLATFORMS"] == "cuda"


@pytest.mark.parametrize("stdout", ["", '["cpu", 1]', "no JSON"])
def test_what_is_not_found_is_said_or_refused(monkeypatch, stdout):
    answering(monkeypatch, stdout)
    found = prepare.find_devices(Platform.AUTO)
    assert found.platform is Platform.CPU
    assert found.note.endswith(": islands train on the CPU")
    with pytest.raises(ConfigError, match=r"^platform = 'gpu': JAX finds no GPU here: .*jax\[cuda12\]=="):
        prepare.find_devices(Platform.GPU)
    with pytest.raises(ConfigError, match=r"^platform = 'tpu': JAX finds no TPU here"):
        prepare.find_devices(Platform.TPU)
