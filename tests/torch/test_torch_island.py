"""Torch loops as islands, against a real broker and a real aggregator, over loopback."""

import threading
import time

import numpy as np
import pytest
import torch
from torch import nn

import islands
import islands.torch
from broker.wire.errors import ConfigError
from islands.torch.copies import SMALL_BYTES
from tests.hub import RUN, WAIT_S, Hub
from tests.training_loops import TOKENS, stored

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


def train(island, model, optimizer, *, until=lambda: False, scaler=None, dtype=torch.float32, pause_s=0.002):
    """A loop as people have it; returns the losses."""
    losses, ends_s = [], time.monotonic() + WAIT_S
    while not island.done and not until():
        assert time.monotonic() < ends_s
        inputs, wanted = batch(island.inner_step, dtype)
        optimizer.zero_grad()
        loss = (model(inputs) - wanted).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        island.step(tokens=TOKENS, loss=loss)
        losses.append(loss.item())
        time.sleep(pause_s)
    return losses


def values(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_loops_train_together_and_end_with_the_runs_parameters_in_the_same_objects(tmp_path, dtype):
    results, failures = {}, []

    def loop(name, seed):
        try:
            model = network(seed, dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            objects = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
            with join(hub, model, optimizer, island_id=name) as island:
                losses = train(island, model, optimizer, dtype=dtype)
            assert objects == {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
            results[name] = (values(model), losses, island.versions, island.tokens)
        except BaseException as err:
            failures.append(err)
            raise

    with Hub(tmp_path / "store", islands=2, total_tokens=6_000) as hub:
        threads = [threading.Thread(target=loop, args=each) for each in (("a", 1), ("b", 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures
        books = hub.core.run.ledger.books().tokens()
    assert books["merged"] + sum(books["wasted"].values()) == books["trained"] == sum(r[3] for r in results.values())
    merged = stored(tmp_path / "store")
    assert set(merged) == {n for n, _ in network().named_parameters()}, "the names of the state dict, without buffers"
    for model, losses, versions, _ in results.values():
        assert min(versions) > 1
        assert np.mean(losses[-20:]) < 0.35, "half of what a constant has: 0.72"
        for name, expected in merged.items():
            assert torch.equal(model[name], torch.from_numpy(expected).to(dtype)), "the global parameters, to the bit"
    statistics = [model["1.running_mean"] for model, *_ in results.values()]
    assert not torch.equal(*statistics), "each island has its own"


def test_a_torch_island_and_a_numpy_island_are_in_one_run(tmp_path):
    """The tree of the second is a dict with the names and shapes of the first one's parameters."""
    found, failures = {}, []

    def torch_loop():
        try:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            with join(hub, model, optimizer, island_id="torch") as island:
                train(island, model, optimizer)
            found["torch"] = {name: p.detach().numpy() for name, p in model.named_parameters()}
        except BaseException as err:
            failures.append(err)
            raise

    def numpy_loop():
        try:
            given = {name: p.detach().numpy().copy() for name, p in network(1).named_parameters()}
            with islands.join(
                hub.address, given, run=RUN, timeout_s=WAIT_S, tokens_per_step=TOKENS, island_id="numpy"
            ) as island:
                params, _ = island.restore(given)
                while not island.done:
                    params = {name: x - np.float32(0.001) * np.sign(x) for name, x in params.items()}
                    params = island.step(params, tokens=TOKENS)
                    time.sleep(0.002)
                found["numpy"] = island.close(params)
        except BaseException as err:
            failures.append(err)
            raise

    with Hub(tmp_path / "store", islands=2, total_tokens=4_000) as hub:
        threads = [threading.Thread(target=each) for each in (torch_loop, numpy_loop)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert not failures
    for name, expected in stored(tmp_path / "store").items():
        assert np.array_equal(found["torch"][name], expected)
        assert np.array_equal(found["numpy"][name], expected)


# --- what only this island has ---------------------------------------------------------------------------------------


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def moments(model, optimizer):
    return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


def test_an_island_that_failed_comes_back_with_its_optimizer_its_scaler_and_its_statistics(hub, tmp_path):
    options = {"state_dir": tmp_path / "state", "checkpoint_interval_s": 0.05}
    path = tmp_path / "state" / "island-0.checkpoint"

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)

    model, scale = network(), scaler()
    optimizer = adamw(model)

    def fails():
        with join(hub, model, optimizer, scaler=scale, **options) as island:
            assert island.restored == "fresh"
            train(island, model, optimizer, scaler=scale, until=lambda: path.exists() and island.inner_step >= 20)
            island.save()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    again, another_scale = network(7), scaler()
    another = adamw(again)
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
    stop, failures = threading.Event(), []
    model = network()
    optimizer = adamw(model)

    def keep_training(island):
        try:
            train(island, model, optimizer, until=stop.is_set)
        except BaseException as err:
            failures.append(err)
            raise

    with Hub(tmp_path / "store", islands=2) as hub, join(hub, model, optimizer, island_id="donor") as donor:
        trainer = threading.Thread(target=keep_training, args=(donor,))
        trainer.start()
        try:
            ends_s = time.monotonic() + WAIT_S
            while donor.inner_step < 20 or min(f.version for f in hub.core.run.fragments.values()) < 2:
                assert time.monotonic() < ends_s
                time.sleep(0.01)
            newcomer = network(3)
            theirs = adamw(newcomer)
            with join(hub, newcomer, theirs, island_id="newcomer") as island:
                assert island.restored == "donor"
                assert all(moment.abs().sum() > 0 for moment in moments(newcomer, theirs))
                assert theirs.state[newcomer[0].weight]["step"] > 0
                assert newcomer[1].num_batches_tracked > 0
                train(island, newcomer, theirs, until=lambda: island.inner_step >= 5)
        finally:
            stop.set()
            trainer.join(WAIT_S)
    assert not failures


def test_spoilt_parameters_are_replaced_and_the_optimizer_begins_afresh(hub):
    model = network()
    optimizer = adamw(model)
    with join(hub, model, optimizer) as island:
        train(island, model, optimizer, until=lambda: min(island.versions) > 1)
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
            model[1].running_mean.fill_(torch.nan)
        ends_s = time.monotonic() + WAIT_S
        while not island.reset_optimizer:
            assert time.monotonic() < ends_s
            island.step(tokens=TOKENS)
            time.sleep(0.002)
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


def test_a_parameter_that_is_replaced_ends_training_with_the_cure(hub):
    model = network()
    optimizer = adamw(model)

    def loop():
        with join(hub, model, optimizer) as island:
            model[0].weight = nn.Parameter(torch.zeros(40, 8))
            train(island, model, optimizer)

    with pytest.raises(ConfigError, match=r"params 0.weight = .*never replace them"):
        loop()


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
    assert any(thread.name == "atoll-copies" for thread in threading.enumerate()) is False, "it ends with the island"
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
