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
from tests.integration.test_island_loop import RUN, TOKENS, WAIT_S, Hub, stored


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
        assert np.mean(losses[-20:]) < 0.7 * np.mean(losses[:20])
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
            given = {name: np.array(p.detach()) for name, p in network(1).named_parameters()}
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
