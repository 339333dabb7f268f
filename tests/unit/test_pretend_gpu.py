"""The pretend GPU itself: it computes what the CPU does, refuses what CUDA refuses, and counts waits and bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from iwopd import algo, devices
from models import make_model
from pretend_gpu import PretendGPU, pretend_gpu
from pretend_gpu.ledger import Ledger

MB = 2**20


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with pretend_gpu(total_bytes=128 * MB) as opened:
        yield opened


def test_it_computes_what_the_cpu_computes(gpu: PretendGPU) -> None:
    left, right = torch.randn(4, 6), torch.randn(6, 3)
    product = left.to(gpu.device) @ right.to(gpu.device)
    assert product.device == gpu.device == torch.device("pretend:0")
    assert type(product) is Tensor
    assert torch.equal(product.cpu(), left @ right)
    view = product.t()[1:, ::2]
    view.mul_(2)
    assert torch.equal(product.cpu()[::2, 1:], 2 * (left @ right)[::2, 1:])
    assert torch.tensor([1, 2], device=gpu.device).tolist() == [1, 2]
    assert ((product > 0) | True).all()
    with pytest.raises(TypeError, match="can't convert"):
        product.numpy()


def test_inference_mode_and_gradients(gpu: PretendGPU) -> None:
    layer = nn.Linear(5, 5)
    inputs = torch.randn(3, 5)

    def gradient(device: torch.device) -> Tensor:
        moved, values = layer.to(device), inputs.to(device)
        moved.zero_grad()
        hidden = checkpoint(lambda x: moved(x).relu(), values, use_reentrant=False)
        moved(hidden).square().sum().backward()
        assert moved.weight.grad is not None
        return moved.weight.grad.clone().cpu()

    expected = gradient(torch.device("cpu"))
    assert torch.equal(gradient(gpu.device), expected)
    with torch.inference_mode():
        written = layer(inputs.to(gpu.device))
        written[0] = 0.0
    assert written.is_inference()
    with pytest.raises(RuntimeError, match=r"[Ii]nference"):
        written.add_(1)


# --- mixed devices --------------------------------------------------------------------------------------------------

MIXED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda here, there: here + there,
    "product": lambda here, there: here @ there,
    "cat": lambda here, there: torch.cat((here, there)),
    "where": lambda here, there: torch.where(here > 0, here, there),
    "comparison": lambda here, there: here == there,
    "in place": lambda here, there: there.add_(here),
    "out": lambda here, there: torch.exp(here, out=there),
    "gather": lambda here, there: here.gather(0, there.long()),
    "embedding": lambda here, there: F.embedding(there.long(), here),
    "index of a CPU tensor": lambda here, there: there[here.long()],
    "assignment": lambda here, there: here.__setitem__(slice(None), here + there),
    "attention": lambda here, there: F.scaled_dot_product_attention(here[None, None], there[None, None], here[None, None]),
    "loss": lambda here, there: F.mse_loss(here, there),
    "a number of the CPU that is written": lambda here, there: there[0, 0].add_(here.sum()),
    "a number of the CPU in a list": lambda here, there: torch.cat((here.flatten(), there[0, 0][None])),
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED.keys())
def test_mixed_devices_are_refused(gpu: PretendGPU, mixed: Callable[[Tensor, Tensor], object]) -> None:
    here, there = torch.zeros(3, 3, device=gpu.device), torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match=r"Expected all tensors to be on the same device|indices should be"):
        mixed(here, there)


def test_what_cuda_allows_is_allowed(gpu: PretendGPU) -> None:
    here, there = torch.arange(6.0, device=gpu.device), torch.arange(6.0)
    assert (here * torch.tensor(2.0)).device == gpu.device
    assert torch.where(here > 1, here, torch.tensor(0.0)).device == gpu.device
    assert here[torch.tensor([1, 2])].tolist() == [1.0, 2.0]
    here[torch.tensor([0])] = torch.tensor(5.0)
    here[1:3].copy_(there[3:5])
    there[:2] = here[:2]
    assert there.tolist() == [5.0, 3.0, 2.0, 3.0, 4.0, 5.0]


# --- waits of the host ----------------------------------------------------------------------------------------------

WAITS: dict[str, tuple[str, Callable[[Tensor, Tensor], object]]] = {
    "item": ("_local_scalar_dense", lambda x, _: x.sum().item()),
    "if": ("_local_scalar_dense", lambda x, _: bool((x > 0).all())),
    "cpu": ("download", lambda x, _: x.cpu()),
    "tolist": ("download", lambda x, _: x.tolist()),
    "to": ("upload", lambda x, _: torch.ones(3).to(x.device)),
    "tensor": ("upload", lambda x, _: torch.tensor([1.0], device=x.device)),
    "nonzero": ("nonzero", lambda _, mask: mask.nonzero()),
    "where": ("nonzero", lambda _, mask: torch.where(mask)),
    "mask": ("index with a mask", lambda x, mask: x[mask]),
    "values by mask": ("_index_put_impl_ with a mask", lambda x, mask: x.__setitem__(mask, x + 1)),
    "indices": ("index with indices of the host", lambda x, _: x[torch.tensor([0, 1])]),
    "unique": ("_unique2", lambda x, _: x.unique()),
    "equal": ("equal", lambda x, _: torch.equal(x, x)),
    "repeats": ("repeat_interleave without output_size", lambda x, mask: x.repeat_interleave(mask.long())),
    "isin": ("isin by unique", lambda x, _: torch.isin(x, x.repeat(20))),
    "synchronize": ("synchronize", lambda x, _: torch.get_device_module(x.device).synchronize()),
}


@pytest.mark.parametrize(("what", "wait"), WAITS.values(), ids=WAITS.keys())
def test_waits_are_counted(gpu: PretendGPU, what: str, wait: Callable[[Tensor, Tensor], object]) -> None:
    values = torch.tensor([3.0, 1.0, 2.0], device=gpu.device)
    mask = values > 0
    gpu.syncs.clear()
    wait(values, mask)
    assert [sync.what for sync in gpu.syncs] == [what]


QUIET: dict[str, Callable[[Tensor, Tensor], object]] = {
    "arithmetic": lambda x, mask: (x * 2 + x.sum()).softmax(-1)[None] @ x[:, None],
    "search": lambda x, _: torch.searchsorted(x, x),
    "one value by mask": lambda x, mask: x.__setitem__(mask, 0.0),
    "masked": lambda x, mask: torch.where(mask, x, 0.0).masked_fill(mask, 1.0).masked_scatter(mask, x),
    "indices": lambda x, mask: x[mask.long()].index_copy(0, mask.long().cumsum(0) - 1, x),
    "upload": lambda x, _: torch.ones(3).to(x.device, non_blocking=True),
    "repeats": lambda x, mask: x.repeat_interleave(mask.long(), output_size=3),
    "few": lambda x, _: torch.isin(x, x),
    "views": lambda x, _: x[1:].view(-1).clone().zero_(),
}


@pytest.mark.parametrize("work", QUIET.values(), ids=QUIET.keys())
def test_work_does_not_wait(gpu: PretendGPU, work: Callable[[Tensor, Tensor], object]) -> None:
    values = torch.tensor([3.0, 1.0, 2.0], device=gpu.device)
    mask = values > 0
    gpu.syncs.clear()
    work(values, mask)
    assert gpu.syncs == []


def test_a_wait_has_its_place_in_our_code(gpu: PretendGPU) -> None:
    values = torch.zeros(1, 3, device=gpu.device)
    gpu.syncs.clear()
    algo.floor_logprobs(values, values == 0)
    assert gpu.syncs
    assert {sync.by for sync in gpu.syncs} == {"iwopd"}
    assert {sync.place.partition(":")[0] for sync in gpu.syncs} == {"algo/_checks.py", "algo/logprobs.py"}
    gpu.syncs.clear()
    values.sum().item()
    assert gpu.syncs[0].place.startswith(__file__)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_tensors_are_counted_once_and_stay_reserved(gpu: PretendGPU) -> None:
    module = torch.get_device_module(gpu.device)
    assert gpu.memory.allocated == gpu.memory.reserved == 0
    first = torch.zeros(1000, device=gpu.device)  # 4,000 bytes: eight blocks of 512
    views = [first[10:], first.view(10, 100), first.detach()]
    assert gpu.memory.allocated == module.memory_allocated(gpu.device) == 4096
    assert gpu.memory.reserved == module.memory_reserved(gpu.device) == 2 * MB
    assert module.mem_get_info(gpu.device) == (126 * MB, 128 * MB)
    assert devices.free_bytes(gpu.device) == 128 * MB - 4096
    assert devices.total_bytes(gpu.device) == 128 * MB
    del first
    assert gpu.memory.allocated == 4096  # the views hold it
    views.clear()
    assert (gpu.memory.allocated, gpu.memory.peak, gpu.memory.reserved) == (0, 4096, 2 * MB)
    assert devices.free_bytes(gpu.device) == 128 * MB
    gpu.memory.reset_peak()
    assert module.max_memory_allocated(gpu.device) == 0
    module.empty_cache()
    assert gpu.memory.reserved == 0


def test_out_of_memory(gpu: PretendGPU) -> None:
    half = torch.zeros(16 * MB, device=gpu.device)
    with pytest.raises(torch.OutOfMemoryError, match="pretend GPU out of memory"):
        torch.zeros(20 * MB, device=gpu.device)
    assert gpu.memory.allocated == 64 * MB
    del half
    torch.zeros(30 * MB, device=gpu.device)  # what is reserved and free makes room


def test_what_autograd_keeps_is_counted(gpu: PretendGPU) -> None:
    weight = torch.zeros(256, 256, device=gpu.device, requires_grad=True)
    before = gpu.memory.allocated
    loss = weight.exp().exp().sum()
    assert gpu.memory.allocated - before == 2 * 256 * 256 * 4 + 512
    loss.backward()
    del loss
    assert gpu.memory.allocated - before == 256 * 256 * 4  # the gradient
    gc.collect()


def test_the_ledger_cuts_joins_and_uses_blocks_again() -> None:
    ledger = Ledger(64 * MB)
    small = [ledger.allocate(500 * 1024) for _ in range(4)]
    assert ledger.reserved == 2 * MB
    ledger.release(small[1])
    assert ledger.allocate(400 * 1024) is not small[1] or small[1].size == 400 * 1024
    assert ledger.reserved == 2 * MB
    middling = ledger.allocate(3 * MB)
    assert ledger.reserved == 22 * MB
    other = ledger.allocate(16 * MB)  # 17 MB of the middling segment are free
    assert ledger.reserved == 22 * MB
    ledger.release(middling)
    ledger.release(other)
    assert ledger.allocate(20 * MB).size == 20 * MB  # neighbours are one block again
    assert ledger.reserved == 22 * MB
    with pytest.raises(torch.OutOfMemoryError):
        ledger.allocate(43 * MB)
    ledger.allocate(42 * MB)
    assert ledger.reserved == ledger.peak_reserved == 64 * MB


# --- what else torch does with a device -----------------------------------------------------------------------------


def test_autocast_follows_cudas_lists(gpu: PretendGPU) -> None:
    layer = nn.Linear(64, 64).to(gpu.device)
    values = torch.randn(4, 64, device=gpu.device)
    before = gpu.memory.allocated
    with torch.autocast(gpu.device.type, torch.bfloat16):
        hidden = layer(values)
        assert hidden.dtype == torch.bfloat16
        assert hidden.softmax(-1).dtype == hidden.exp().dtype == hidden.sum().dtype == torch.float32
        assert (hidden + hidden).dtype == torch.bfloat16
        del hidden
        assert gpu.memory.allocated - before == 64 * 64 * 2 + 512  # copies of weight and bias, kept for the next call
        with torch.autocast(gpu.device.type, enabled=False):
            assert layer(values).dtype == torch.float32
    assert gpu.memory.allocated == before
    with torch.autocast(gpu.device.type, torch.bfloat16):
        layer(values).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


def test_random_numbers_are_the_devices_own(gpu: PretendGPU) -> None:
    torch.manual_seed(7)
    module = torch.get_device_module(gpu.device)
    state, host = module.get_rng_state(gpu.device), torch.get_rng_state()
    first = torch.rand(3, device=gpu.device)
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.rand(3, device=gpu.device).cpu(), first.cpu())
    module.set_rng_state(state, gpu.device)
    assert torch.equal(torch.rand(3, device=gpu.device).cpu(), first.cpu())
    assert devices.rng_states().keys() == {"pretend.0"}


def test_tied_weights_stay_tied(gpu: PretendGPU) -> None:
    model = make_model("qwen3").to(gpu.device)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() != model.model.norm.weight.data_ptr()


def test_a_closed_device_is_not_there() -> None:
    with pretend_gpu() as opened:
        assert torch.accelerator.is_available()
        left = torch.zeros(2, device=opened.device)
    assert not torch.accelerator.is_available()
    assert devices.rng_states() == {}
    with pytest.raises(RuntimeError, match="outside of `with pretend_gpu"):
        left + 1
