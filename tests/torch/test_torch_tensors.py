"""Tensors as leaves: to numpy and back, copies, installation in place. No sockets."""

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from broker.base.errors import ConfigError
from islands.arrays import placement
from islands.arrays.in_place import InPlacePlacement
from islands.arrays.reference import adopted, wide_dtype
from islands.interface import arguments
from islands.torch.conversion import as_array, as_tensor, numpy_dtype
from islands.torch.copies import SMALL_BYTES, CopyThread
from islands.torch.tensors import Blank, TensorLeaf, loss_leaf
from tests.forked import said

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ALL = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int8, torch.uint8, torch.bool, torch.uint16]


def random(dtype, *shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_passes_through_numpy_with_its_bits_and_without_a_copy(dtype):
    tensor = random(torch.float32, 5, 3).mul(3).to(dtype)
    array = as_array(tensor)
    assert (array.shape, array.dtype) == ((5, 3), numpy_dtype(dtype))
    back = as_tensor(array)
    assert back.dtype == dtype
    assert (back.data_ptr(), array.tobytes()) == (tensor.data_ptr(), as_array(back).tobytes())


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)])
def test_scalars_and_empty_tensors_keep_their_shape(shape):
    assert as_tensor(as_array(torch.zeros(shape, dtype=torch.bfloat16))).shape == shape


def test_what_must_not_be_written_to_is_copied_and_a_transposed_tensor_is_read_in_its_order():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    array.flags.writeable = False
    assert as_tensor(array).add_(1).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert array[0, 0] == 0
    assert TensorLeaf(torch.arange(6).reshape(2, 3).T).to_host().tolist() == [[0, 3], [1, 4], [2, 5]]


def versions_for(tensors):
    """What shifts some tensors, and their values before."""
    leaves = [TensorLeaf(tensor) for tensor in tensors]
    shifts = [
        np.random.default_rng(i).standard_normal(leaf.shape).astype(wide_dtype(leaf.dtype)) / 3
        for i, leaf in enumerate(leaves)
    ]
    return leaves, shifts, [leaf.to_host().copy() for leaf in leaves]


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_version_is_written_into_the_tensor_as_the_host_computes_it_to_the_last_bit(dtype, keep):
    tensors = [random(dtype, 64, 8, seed=1), random(dtype, 7, seed=2)]
    leaves, shifts, before = versions_for(tensors)
    here = placement.placement_of(leaves)
    assert isinstance(here, InPlacePlacement)
    installed = here.install(leaves, here.place(shifts, keep), keep)
    assert installed == leaves, "the same objects"
    for tensor, old, shift in zip(tensors, before, shifts, strict=True):
        assert as_array(tensor).tobytes() == adopted(old, shift, keep).tobytes()


def test_with_nothing_kept_the_version_replaces_the_values_and_is_no_view_of_the_message():
    leaf, version = TensorLeaf(torch.ones(3, 2)), np.full((3, 2), 5, np.float32)
    here = placement.placement_of([leaf])
    placed = here.place([version], 0)
    version[:] = 9
    here.install([leaf], placed, 0)
    assert leaf.tensor.tolist() == [[5, 5]] * 3


def test_a_parameter_that_needs_a_gradient_is_written_to_and_its_graph_is_told():
    parameter = torch.nn.Parameter(torch.ones(3))
    version = parameter._version
    here = placement.placement_of([TensorLeaf(parameter)])
    here.install([TensorLeaf(parameter)], here.place([np.ones(3, np.float32)], 1), 1)
    assert parameter.tolist() == [2, 2, 2]
    assert (parameter.is_leaf, parameter.requires_grad, parameter._version > version) == (True, True, True)


def test_copies_of_numbers_and_tensors_outlive_what_is_written_to_their_originals():
    tensor = torch.ones(2, dtype=torch.bfloat16)
    copies = placement.copy([3, TensorLeaf(tensor), 0.5])
    tensor.zero_()
    assert (copies[0], copies[1].to_host().tolist(), copies[2]) == (3, [1, 1], 0.5)


def test_samples_are_of_the_elements_that_move_most():
    leaf = TensorLeaf(torch.arange(12, dtype=torch.bfloat16).reshape(3, 4))
    here = placement.placement_of([leaf])
    movement = np.zeros((3, 4), np.float32)
    movement[2, 1] = -1
    ((number, where),) = here.places([movement]).items()
    (found,) = placement.sample([leaf], [where])
    assert (number, 9.0 in found.to_host().astype(np.float32).tolist()) == (0, True)
    leaf.tensor.zero_()
    assert 9.0 in found.to_host().astype(np.float32).tolist(), "a copy"


def test_a_blank_leaf_has_a_form_and_takes_no_memory():
    blank = Blank((1 << 20, 1 << 10), torch.bfloat16, torch.device("cpu"))
    assert (blank.nbytes, blank.to_host().shape) == (1 << 31, (1 << 20, 1 << 10))
    assert placement.from_host(np.ones(3, np.float32), Blank((3,), torch.float64, torch.device("cpu"))).dtype == "f8"


# --- copies beside the training thread ------------------------------------------------------------------------------


@pytest.fixture
def copier():
    thread = CopyThread()
    yield thread
    thread.close()


LARGE = SMALL_BYTES // 4


def test_a_large_copy_has_the_values_of_then_once_the_optimizer_may_write(copier):
    tensors = [torch.full((LARGE,), 7.0), torch.full((3,), 8.0)]
    leaves = [TensorLeaf(tensor, copier=copier) for tensor in tensors]
    copies = placement.copy(leaves)
    copier.settle()
    for tensor in tensors:
        tensor.zero_()
    assert [float(each.to_host()[-1]) for each in copies] == [7, 8]
    assert copies[0].shape == (LARGE,)


def test_copies_are_kept_by_those_who_read_them_alone(copier):
    copies = placement.copy([TensorLeaf(torch.ones(LARGE), copier=copier)])
    kept = weakref.ref(copies[0].tensor)  # made by now
    del copies
    gc.collect()
    assert kept() is None
    copier.settle()


def test_an_installation_waits_for_the_copies_of_what_it_writes_to(copier):
    leaf = TensorLeaf(torch.full((LARGE,), 7.0), copier=copier)
    (copied,) = placement.copy([leaf])
    here = placement.placement_of([leaf])
    here.install([leaf], here.place([np.ones(LARGE, np.float32)], 1), 1)
    assert (float(copied.to_host()[0]), float(leaf.tensor[0])) == (7, 8)


def test_a_tensor_that_is_written_to_while_it_is_copied_is_told_with_the_cure(copier):
    tensor = torch.zeros(LARGE)
    placement.copy([TensorLeaf(tensor, copier=copier)])
    tensor.add_(1)
    with pytest.raises(ConfigError, match=r"between island.step and optimizer.step.*background_copies=False"):
        copier.settle()
    copier.settle()


def test_small_tensors_may_be_written_to_at_any_time(copier):
    tensor = torch.zeros(10)
    (copied,) = placement.copy([TensorLeaf(tensor, copier=copier)])
    tensor.add_(1)
    copier.settle()
    assert copied.to_host().sum() == 0


def test_a_process_may_end_while_its_copies_are_made():
    code = (
        "import torch\n"
        "from islands.torch.copies import CopyThread\n"
        "thread = CopyThread()\n"
        "for _ in range(8):\n"
        "    thread.take([torch.zeros(1 << 22)])\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_replaced_is_copied_into_memory_that_was_there_before():
    leaf = TensorLeaf(torch.full((5,), 3.0, dtype=torch.bfloat16))
    here = placement.placement_of([leaf])
    placed = here.place([np.ones(5, np.float32)], 1)
    (before,) = here.before([leaf], placed)
    here.install([leaf], placed, 1)
    assert (before.to_host().tolist(), leaf.to_host().tolist()) == ([3] * 5, [4] * 5)
    assert before.tensor.data_ptr() == placed[0].room.data_ptr()


def test_a_loss_is_read_at_once_on_the_cpu_and_one_of_several_elements_is_refused():
    weight = torch.ones(3, requires_grad=True)
    assert arguments.of_step(1, loss_leaf(2 * weight.sum()), None, 0, 1)[1] == 6.0
    with pytest.raises(ConfigError, match=r"loss = 'torch.float32\[3\]': must be a number"):
        arguments.of_step(1, loss_leaf(2 * weight), None, 0, 1)


def test_an_optimizer_that_steps_in_a_forked_child_does_not_wait_for_copies(copier):
    may_copy = threading.Event()
    copier._pool.submit(may_copy.wait, 20)
    copier.take([torch.zeros(2)])
    assert said(lambda: (copier.settle(), copier.close())) == "(None, None)"
    may_copy.set()
