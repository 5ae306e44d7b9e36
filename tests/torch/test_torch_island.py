"""Torch loops as islands, against a real broker and a real aggregator, over loopback."""

import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import islands.torch
from broker.base.errors import ConfigError
from islands.protocol.data_shares import DataShare
from islands.torch.copies import SMALL_BYTES
from tests.hub import RUN, WAIT_S, Hub
from tests.local_run import wait_for
from tests.training_loops import TOKENS, newest, stored

pytestmark = pytest.mark.timeout(240)  # the first optimizer loads torch's compiler


@pytest.fixture
def hub(tmp_path):
    with Hub(tmp_path / "store") as running:
        yield running


def network(seed=0, dtype=torch.float32):
    """Linear layers, and statistics of normalisation, which are each island's own."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 1)).to(dtype)


def batch(step, dtype=torch.float32):
    random = np.random.default_rng(step)
    inputs = torch.from_numpy(random.standard_normal((16, 8))).to(dtype)
    return inputs, 0.3 * inputs.sum(1, keepdim=True)


def join(hub, model, optimizer=None, **options):
    given = {"run": RUN, "timeout_s": WAIT_S, "tokens_per_step": TOKENS} | options
    return islands.torch.join(hub.address, model, optimizer, **given)


def train(island, model, optimizer, *, until=lambda: False, scaler=None, dtype=torch.float32):
    """A loop as people have it; returns the losses."""
    losses, ends_s = [], time.monotonic() + 3 * WAIT_S  # a machine that others keep busy takes its time
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    while not island.done and not until():
        assert time.monotonic() < ends_s
        inputs, wanted = batch(island.inner_step, dtype)
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        island.step(tokens=TOKENS, loss=loss)
        losses.append(loss.item())
        time.sleep(0.002)  # plays the work of a step
    return losses


def together(*loops):
    """Runs each in a thread of its own; returns what they return."""
    with ThreadPoolExecutor() as threads:
        return [loop.result() for loop in [threads.submit(loop) for loop in loops]]


def with_adamw(seed=0, dtype=torch.float32):
    model = network(seed, dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_loops_train_together_and_end_with_the_runs_parameters_in_the_same_objects(tmp_path, dtype):
    def loop(name, seed):
        model, optimizer = with_adamw(seed, dtype)
        objects = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
        with join(hub, model, optimizer, island_id=name) as island:
            losses = train(island, model, optimizer, dtype=dtype)
        assert objects == {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
        return model.state_dict(), losses, island.versions, island.tokens

    with Hub(tmp_path / "store", islands=2, total_tokens=6_000) as hub:
        results = together(lambda: loop("a", 1), lambda: loop("b", 2))
        books = hub.tokens()
    assert books["merged"] + sum(books["wasted"].values()) == books["trained"] == sum(r[3] for r in results)
    merged = stored(tmp_path / "store")
    assert set(merged) == {n for n, _ in network().named_parameters()}, "the names of the state dict, without buffers"
    for model, losses, versions, _ in results:
        assert min(versions) > 1
        assert np.mean(losses[-20:]) < 0.35, "half of what a constant has: 0.72"
        for name, expected in merged.items():
            assert torch.equal(model[name], torch.from_numpy(expected).to(dtype)), "the global parameters, to the bit"
    statistics = [model["1.running_mean"] for model, *_ in results]
    assert not torch.equal(*statistics), "each island has its own"


def test_the_statistics_that_an_export_lacks_are_told_at_the_join_and_computed_from_data(tmp_path, caplog):
    model, optimizer = with_adamw()
    with Hub(tmp_path / "store", total_tokens=4_000) as hub, join(hub, model, optimizer) as island:
        losses = train(island, model, optimizer)
    told = [each.getMessage() for each in caplog.records if "island.not_merged" in each.getMessage()]
    assert len(told) == 1
    assert "buffers=2 first=1.running_mean" in told[0]
    exported = {name: torch.from_numpy(array) for name, array in stored(tmp_path / "store").items()}
    loaded = network(5)
    missing = loaded.load_state_dict(exported, strict=False).missing_keys
    assert missing == ["1.running_mean", "1.running_var"]
    torch.optim.swa_utils.update_bn((batch(step)[0] for step in range(200)), loaded)
    loaded.eval()
    held_out = np.mean([(loaded(x) - y).square().mean().item() for x, y in map(batch, range(9000, 9020))])
    assert held_out < 1.3 * np.mean(losses[-20:])


# --- what only this island has ---------------------------------------------------------------------------------------


def moments(model, optimizer):
    return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


def test_an_island_that_failed_comes_back_with_its_optimizer_its_scaler_and_its_statistics(hub, tmp_path):
    options = {"state_dir": tmp_path, "checkpoint_interval_s": 0.05}
    path = tmp_path / "island-0.checkpoint"

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)

    (model, optimizer), scale = with_adamw(), scaler()

    def fails():
        with join(hub, model, optimizer, scaler=scale, **options) as island:
            assert island.restored == "fresh"
            train(island, model, optimizer, scaler=scale, until=lambda: path.exists() and island.inner_step >= 20)
            island.save()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    (again, another), another_scale = with_adamw(7), scaler()
    with join(hub, again, another, scaler=another_scale, **options) as island:
        assert (island.id, island.restored) == ("island-0", "checkpoint")
        assert island.restored_cursor >= 20
        assert all(torch.equal(a, b) for a, b in zip(moments(again, another), moments(model, optimizer), strict=True))
        assert another.state[again[0].weight]["step"] == optimizer.state[model[0].weight]["step"]
        assert another_scale.state_dict() == scale.state_dict()
        assert torch.equal(again[1].running_var, model[1].running_var)
        assert again[1].num_batches_tracked == model[1].num_batches_tracked
        train(island, again, another, scaler=another_scale, until=lambda: island.inner_step >= 30)


def test_an_island_without_a_checkpoint_takes_the_optimizers_state_of_another(tmp_path):
    (model, optimizer), stop = with_adamw(), threading.Event()
    with (
        Hub(tmp_path / "store", islands=2) as hub,
        join(hub, model, optimizer, island_id="donor") as donor,
        ThreadPoolExecutor() as threads,
    ):
        training = threads.submit(train, donor, model, optimizer, until=stop.is_set)
        try:
            wait_for(lambda: donor.inner_step >= 20 and min(newest(hub)) > 1, "donor that has trained", WAIT_S)
            newcomer, theirs = with_adamw(3)
            with join(hub, newcomer, theirs, island_id="newcomer") as island:
                assert island.restored == "donor"
                assert all(moment.abs().sum() > 0 for moment in moments(newcomer, theirs))
                assert theirs.state[newcomer[0].weight]["step"] > 0
                assert newcomer[1].num_batches_tracked > 0
                train(island, newcomer, theirs, until=lambda: island.inner_step >= 5)
        finally:
            stop.set()
        training.result()


def test_spoilt_parameters_are_replaced_and_the_optimizer_begins_afresh(hub):
    model, optimizer = with_adamw()
    with join(hub, model, optimizer) as island:
        train(island, model, optimizer, until=lambda: min(island.versions) > 1)
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
            model[1].running_mean.fill_(torch.nan)
        wait_for(lambda: island.step(tokens=TOKENS) or island.reset_optimizer, "replacement", WAIT_S)
        assert len(optimizer.state) == 0
        assert all(torch.isfinite(x).all() for x in model.state_dict().values())
        losses = train(island, model, optimizer, until=lambda: min(island.versions) > 4)
    assert np.isfinite(losses).all()


def test_a_frozen_parameter_is_the_runs_and_never_changes(tmp_path):
    def half_frozen(seed):
        model = network(seed)
        model[0].weight.requires_grad_(False)
        return model

    with Hub(tmp_path / "store", islands=2) as hub:
        first, second = half_frozen(1), half_frozen(2)
        one, two = (torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (first, second))
        base = first[0].weight.clone()
        with join(hub, first, one, island_id="a") as a, join(hub, second, two, island_id="b") as b:
            assert torch.equal(second[0].weight, base), "that of the first island"
            assert not second[0].weight.requires_grad
            train(a, first, one, until=lambda: max(a.versions) > 1)
            train(b, second, two, until=lambda: b.inner_step >= 3)
    assert torch.equal(first[0].weight, base)


def test_a_parameter_that_is_unfrozen_in_mid_run_ends_training_with_the_cure(hub):
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loop():
        with join(hub, model, optimizer) as island:
            train(island, model, optimizer, until=lambda: min(newest(hub)[:-1]) > 1)
            model[0].weight.requires_grad_(True)
            train(island, model, optimizer)

    with pytest.raises(ConfigError, match=r"params 0.weight = .*the run calls it frozen"):
        loop()


def test_a_layer_that_is_added_after_the_join_is_refused_by_the_step_that_trains_it(hub):
    model, optimizer = with_adamw()
    elsewhere = torch.optim.SGD(network().parameters(), lr=0.1)
    with join(hub, model, optimizer) as island:
        elsewhere.step()  # another model's is none of its business
        train(island, model, optimizer, until=lambda: island.inner_step >= 3)
        model.add_module("late", nn.Linear(1, 1))
        for another in (optimizer, torch.optim.SGD(model.late.parameters(), lr=0.1)):
            if another is optimizer:
                optimizer.add_param_group({"params": model.late.parameters()})
            with pytest.raises(ConfigError, match=r"params late.weight = .*was not in the model when it joined"):
                another.step()


def test_an_optimizer_that_is_replaced_after_the_join_is_told_once_and_waits_for_copies_all_the_same(hub, caplog):
    model, optimizer = with_adamw()
    with join(hub, model, optimizer) as island:
        train(island, model, optimizer, until=lambda: island.inner_step >= 3)
        another = torch.optim.SGD(model.parameters(), lr=0.01)
        island._copies.take([model[0].weight])
        train(island, model, another, until=lambda: island.inner_step >= 6)
        assert not island._copies.under_way
    told = [record for record in caplog.records if record.getMessage().startswith("island.optimizer_differs")]
    assert ["another SGD than those of the join" in each.atoll_fields["detail"] for each in told] == [True]


def test_large_fragments_are_copied_beside_training_and_waits_for_them_count(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(SMALL_BYTES // 4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with Hub(tmp_path / "store", total_tokens=300, fragments=1) as hub, join(hub, model, optimizer) as island:
        while not island.done:
            optimizer.zero_grad()
            model.weight.square().mean().backward()
            optimizer.step()
            island.step(tokens=TOKENS)
        assert 0 < island.sync_share < 1
    assert not any(thread.name.startswith("atoll-copies") for thread in threading.enumerate()), (
        "it ends with the island"
    )
    (merged,) = stored(tmp_path / "store").values()
    assert np.array_equal(model.weight.detach().numpy(), merged)


def test_a_gpu_copies_a_loss_now_and_then(monkeypatch):
    """A copy costs the training thread more than the rest of a usual step. The tensor only says that it is on a GPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    now_s, copied = [10.0], []
    monkeypatch.setattr(islands.torch.island.clocks, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(islands.torch.island, "loss_leaf", lambda loss: copied.append(now_s[0]) or loss)
    island = object.__new__(islands.torch.TorchIsland)
    island._next_loss_s = 0.0
    loss = torch.zeros(()).as_subclass(OnGpu)
    told = []
    for step in range(20):
        now_s[0] = 10 + 0.0625 * step
        told.append(island._for_reports(loss) is not None)
    assert copied == [10.0, 10.25, 10.5, 10.75, 11.0]
    assert told == [step % 4 == 0 for step in range(20)]


def test_a_loop_without_an_optimizer_joins_too(tmp_path):
    model = network()
    with Hub(tmp_path / "store", total_tokens=400) as hub, join(hub, model) as island:
        assert island.restored == "fresh"
        while not island.done:
            with torch.no_grad():
                model[0].weight.mul_(0.99)
            island.step(tokens=TOKENS)
            time.sleep(0.002)
    assert np.array_equal(model[0].weight.detach().numpy(), stored(tmp_path / "store")["0.weight"])


def test_workers_of_a_loader_load_the_numbers_that_are_dealt_and_one_that_shuffles_is_refused():
    data, share = TensorDataset(torch.arange(64)), DataShare(index=0, count=1)
    numbers = islands.batches(range(64), share, batch=8, collate=list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, where it is loaded: workers are forked, and it has threads
        loaded = [each for (each,) in islice(DataLoader(data, batch_sampler=numbers, num_workers=2), 8)]
    assert sorted(torch.cat(loaded).tolist()) == list(range(64))
    for shuffling in ({"shuffle": True}, {"batch_sampler": BatchSampler(RandomSampler(data), 8, drop_last=True)}):
        with pytest.raises(ConfigError, match="shuffles by itself"):
            islands.batches(DataLoader(data, **shuffling), share, batch=8)
    plain = next(islands.batches(DataLoader(data), share, batch=8, collate=torch.utils.data.default_collate))
    assert plain[0].shape == (8, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_island_whose_reference_changes_in_memory_names_it_adopts_anew_and_ends_as_the_others(
    tmp_path, caplog, dtype
):
    def loop(name, seed, flips):
        model, optimizer = with_adamw(seed, dtype)
        with join(hub, model, optimizer, island_id=name) as island:
            for _ in range(flips):
                until = island.inner_step + 20
                train(island, model, optimizer, until=lambda: island.inner_step >= until, dtype=dtype)  # noqa: B023
                values = island._island._array_work._references[0].values[0]
                values.flags.writeable = True  # a version's own memory is read-only, and a bit flips there all the same
                values.view(np.uint32)[3] ^= 1 << 20
            train(island, model, optimizer, dtype=dtype)
        return model.state_dict()

    with Hub(tmp_path / "store", islands=2, total_tokens=6_000) as hub:
        results = together(lambda: loop("a", 1, 0), lambda: loop("b", 2, 2))
        corruptions = [hub.member(name).corruptions for name in "ab"]
        books = hub.tokens()
    assert corruptions == [0, 2]
    assert "changed in memory, in elements 0 to" in caplog.text
    assert set(books["wasted"]) <= {"overwritten"}
    for name, expected in stored(tmp_path / "store").items():
        for model in results:
            assert torch.equal(model[name], torch.from_numpy(expected).to(dtype))
