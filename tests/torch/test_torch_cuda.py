"""PyTorch on a GPU: what is dispatched and read elsewhere. Skipped where there is none."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

import islands.torch
from islands.arrays import placement
from islands.arrays.reference import adopted
from islands.session import checkpoint
from islands.torch.conversion import as_array
from islands.torch.optimizer_state import OptimizerState
from islands.torch.tensors import TensorLeaf, loss_leaf
from tests.hub import RUN, WAIT_S, Hub
from tests.local_run import wait_for
from tests.several_hosts import Merges, islands_in
from tests.torch.test_torch_optimizer_state import through_a_file
from tests.torch.test_torch_tensors import FLOATS, versions_for
from tests.training_loops import stored

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.timeout(300),
]
LARGE = 1 << 26  # elements: a copy of them takes a while


def busy():
    """Gives the current stream some 50 ms of work, so that what is dispatched behind it has not happened yet."""
    x = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(40):
        x = (x @ x).clamp(max=1)
    return x


def test_copies_are_of_the_moment_while_later_steps_write_to_their_originals():
    tensor = torch.zeros(LARGE, device="cuda")
    copies = []
    for step in range(6):
        busy()
        tensor.fill_(step)
        copies.append(placement.copy([TensorLeaf(tensor)])[0])
    tensor.fill_(-1)
    found = [copy.to_host() for copy in copies]
    assert [(x.min(), x.max()) for x in found] == [(step, step) for step in range(6)]


def test_copies_are_read_by_another_thread_while_this_one_trains():
    tensor, found, failures = torch.zeros(LARGE, device="cuda"), [], []

    def read(copy):
        try:
            found.append(copy.to_host())
        except BaseException as err:
            failures.append(err)
            raise

    threads = []
    for step in range(8):
        tensor.fill_(step)
        (copied,) = placement.copy([TensorLeaf(tensor)])
        threads.append(threading.Thread(target=read, args=[copied]))
        threads[-1].start()
        del copied  # its memory is the allocator's again as soon as it was read
        busy()
    for thread in threads:
        thread.join()
    assert not failures
    assert sorted((float(x.min()), float(x.max())) for x in found) == [(step, step) for step in range(8)]


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_version_is_written_into_the_tensor_as_the_host_computes_it_to_the_last_bit(dtype, keep):
    tensors = [torch.randn(64, 8, device="cuda").to(dtype), torch.randn(7, device="cuda").to(dtype)]
    leaves, shifts, before = versions_for(tensors)
    here, placed = placement.placement_of(leaves), []
    thread = threading.Thread(target=lambda: placed.append(here.place(shifts, keep)))  # as in a run
    thread.start()
    thread.join()
    busy()
    here.install(leaves, placed.pop(), keep)
    for tensor, old, shift in zip(tensors, before, shifts, strict=True):
        assert as_array(tensor.cpu()).tobytes() == adopted(old, shift, keep).tobytes()


def test_samples_and_losses_are_read_later():
    leaf = TensorLeaf(torch.arange(12, dtype=torch.bfloat16, device="cuda").reshape(3, 4))
    movement = np.zeros((3, 4), np.float32)
    movement[2, 1] = -1
    ((_, where),) = placement.placement_of([leaf]).places([movement]).items()
    placement.sample([leaf], [where])[0].to_host()  # kernels are loaded when they are first called, which waits
    float(loss_leaf(leaf.tensor.sum()))
    busy()
    (found,) = placement.sample([leaf], [where])
    loss = loss_leaf(leaf.tensor.sum())
    leaf.tensor.zero_()
    assert not loss.is_ready(), "nothing has waited for the device"
    assert 9.0 in found.to_host().astype(np.float32).tolist()
    assert (float(loss), loss.is_ready()) == (66.0, True)


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"capturable": True}, {"amsgrad": True}], ids=str)
def test_the_state_of_an_optimizer_passes_through_a_file(settings, tmp_path):
    def stepped(steps):
        torch.manual_seed(0)
        model = nn.Linear(40, 30, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 40, device="cuda")).square().sum().backward()
            optimizer.step()
        return model, optimizer

    _, trained = stepped(3)
    _, fresh = stepped(0)
    saved = through_a_file(tmp_path / "c", OptimizerState([trained]))
    checkpoint.restored(OptimizerState([fresh]), saved.state)
    for ours, theirs in zip(fresh.state.values(), trained.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), key
            assert (ours[key].device, ours[key].dtype) == (value.device, value.dtype), key


def test_a_loop_with_mixed_precision_and_a_scaler_ends_with_the_runs_parameters(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).to("cuda")
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler("cuda")
    losses, steps = [], 400
    with (
        Merges() as merges,
        Hub(tmp_path / "store", fragments=3, sync_interval=8, total_tokens=16 * steps) as hub,
        islands.torch.join(
            hub.address, model, optimizer, run=RUN, scaler=scaler, tokens_per_step=16, timeout_s=WAIT_S
        ) as island,
    ):
        while not island.done:
            random = np.random.default_rng(island.inner_step)
            inputs = torch.from_numpy(random.standard_normal((16, 8), np.float32)).to("cuda")
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = (model(inputs) - 0.3 * inputs.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            island.step(tokens=16, loss=loss)
            losses.append(loss)
    assert np.mean([loss.item() for loss in losses[-20:]]) < 0.25 * np.mean([loss.item() for loss in losses[:5]])
    merges.check()
    for name, expected in stored(tmp_path / "store").items():
        assert np.array_equal(model.get_parameter(name).detach().cpu().numpy(), expected), name


@pytest.mark.parametrize(("spread", "processes"), [("fsdp", 1), ("ddp", 1), ("ddp", 2)])
def test_processes_of_a_distributed_job_on_gpus_are_an_island(tmp_path, spread, processes):
    """By NCCL where there is a GPU for each, else by gloo on one."""
    with (
        Merges() as merges,
        Hub(tmp_path / "store", islands=1, fragments=3, sync_interval=8, total_tokens=4000) as hub,
        islands_in(tmp_path, hub, "tests.fsdp_torch", spread=spread, device="cuda", pace_s=0.01) as start,
    ):
        ranks = start("a", processes)
        wait_for(lambda: ranks[0].lines("restored"), "the ranks train", 120)
        for rank in ranks:
            assert rank.process.wait(120) == 0, rank.err.read_text()[-2000:]
    lines = ranks[0].lines()
    assert np.mean([line["loss"] for line in lines[-10:]]) < 0.5 * np.mean([line["loss"] for line in lines[:3]])
    assert len(merges.of("a")) > 2
    merges.check()
