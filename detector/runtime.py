"""One object for ranks and devices, so that the loop has no `if distributed`.

Owns the process groups, the choice of device and precision, and the number of threads. Small facts
(flags, losses, objects) cross on the CPU over gloo; only gradients use NCCL.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import inspect
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from detector.config import ConfigError, RuntimeConfig
from detector.cpus import usable_cpus

T = TypeVar("T")
CPU: Final = torch.device("cpu")
_NOISE: Final = 9  # the stream of random numbers, apart from the loader's
# With fewer pictures a card, its own statistics are too noisy to normalise with.
_ENOUGH_FOR_STATISTICS: Final = 16
# torch 2.13 renamed the argument and warns at the old name.
_NO_BUFFER_SYNC: Final[dict[str, Any]] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """Who this process is among the ranks, and how they talk."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    backend: str | None = None  # of the gradients: gloo, nccl, or None for one rank
    control_group: Any = None  # gloo, for everything that is not a gradient
    local_world_size: int = 1  # ranks on this machine

    @property
    def distributed(self) -> bool:
        """True for more than one rank."""
        return self.world_size > 1

    @property
    def is_main(self) -> bool:
        """True on the rank that writes files and prints."""
        return self.rank == 0

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the ranks, on its device."""
        if not self.distributed:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise sum over the ranks, in float64 on the CPU."""
        if not self.distributed:
            return [float(value) for value in values]
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control_group)
        return cast("list[float]", total.tolist())

    def max(self, value: int) -> int:
        """Return the greatest rank's `value`."""
        if not self.distributed:
            return value
        greatest = torch.tensor(value)
        dist.all_reduce(greatest, op=dist.ReduceOp.MAX, group=self.control_group)
        return int(greatest)

    def any_true(self, flag: bool) -> bool:
        """True on every rank where `flag` is true on at least one."""
        return self.sum([float(flag)])[0] > 0.0

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's `value`, by rank. For small things: it is pickled."""
        if not self.distributed:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control_group)
        return gathered

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        if not self.distributed:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return box[0]

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])

    def synchronize_buffers(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers (batch-norm statistics); weights are alike already."""
        buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        if not self.distributed or not buffers:
            return
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(flat, src=0)
        start = 0
        for buffer in buffers:
            buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
            start += buffer.numel()

    def wrap(self, model: nn.Module, *, batch: int) -> nn.Module:
        """Return the model for training: with gradients averaged over the ranks.

        Batch-norm statistics are not broadcast at every step: rank 0's are the ones that are averaged
        and saved, and in training mode they steer nothing. On CUDA those that train become ones over
        all ranks where a forward pass has few pictures a rank (`batch`); torch has none for the CPU.
        """
        if not self.distributed:
            return model
        if self.device.type == "cuda" and batch < _ENOUGH_FOR_STATISTICS:
            synchronize_norms(model)
        return DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **_NO_BUFFER_SYNC,
        )

    def gradients_stay(
        self, network: nn.Module, stay: bool
    ) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a micro-batch: gradients that `stay` wait for those of the next."""
        if stay and isinstance(network, DistributedDataParallel):
            return network.no_sync()
        return contextlib.nullcontext()

    def place(self, model: nn.Module) -> nn.Module:
        """Move the model to the device; on CUDA its convolutions run channels last."""
        if self.device.type == "cuda":
            # Before DDP is built, so that the strides of gradients and buckets agree.
            model.to(device=self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
            return model
        return model.to(self.device)

    def to_input(self, images: Tensor, *, side: int | None = None) -> Tensor:
        """Return uint8 `(B, 3, H, W)` as float in 0..1 on the device, laid out as the model is.

        With a `side` other than theirs the pictures are resized to it there, `(B, 3, side, side)`.
        """
        layout = torch.channels_last if self.device.type == "cuda" else torch.contiguous_format
        moved = images.to(self.device, non_blocking=True).contiguous(memory_format=layout)
        scaled = moved.float() / 255.0
        if side is None or images.shape[-2:] == (side, side):
            return scaled
        return nn.functional.interpolate(
            scaled, size=(side, side), mode="bilinear", align_corners=False
        )

    def autocast(self, precision: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which the network runs in `precision` (None: as it is)."""
        if precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=precision)

    def gpu_memory_mb(self) -> list[int] | None:
        """Return the peak memory of each rank's tensors, in 10^6 bytes; None on the CPU."""
        if self.device.type != "cuda":
            return None
        return self.all_gather(round(torch.cuda.max_memory_allocated(self.device) / 1e6))

    def describe(self) -> dict[str, Any]:
        """Return this rank's entry of `status["ranks"]`."""
        cuda = self.device.type == "cuda"
        return {
            "rank": self.rank,
            "local_rank": self.local_rank,
            "device": str(self.device),
            "gpu_name": torch.cuda.get_device_name(self.device) if cuda else None,
        }


@contextlib.contextmanager
def start_runtime(config: RuntimeConfig) -> Iterator[Runtime]:
    """Join the ranks that torchrun started (or be the only one), and leave them at the end.

    On an error the groups are left as they are: a dead peer would make an orderly goodbye hang.

    Raises:
        ConfigError: `runtime.device=cuda` without CUDA, or more ranks here than cards.
    """
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = _choose_device(config.device, local_rank)
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    set_threads(local_world_size)
    if world_size == 1:
        yield Runtime(device=device)
        return
    timeout = dt.timedelta(seconds=config.timeout_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        control = dist.new_group(backend="gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
        control = None
    runtime = Runtime(
        rank, local_rank, world_size, device, dist.get_backend(), control, local_world_size
    )
    _refuse_shared_cards(runtime)
    yield runtime
    dist.destroy_process_group()


def _choose_device(asked: str, local_rank: int) -> torch.device:
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "runtime.device=cuda, but torch sees no CUDA card; use runtime.device=cpu."
        )
    cards = torch.cuda.device_count()
    if local_rank >= cards:
        raise ConfigError(
            f"Rank {local_rank} has no card of its own: {cards} seen; use --nproc-per-node={cards}."
        )
    return torch.device("cuda", local_rank)


def _refuse_shared_cards(runtime: Runtime) -> None:
    if runtime.device.type != "cuda":
        return
    uuid = str(torch.cuda.get_device_properties(runtime.device).uuid)
    cards = runtime.all_gather((socket.gethostname(), uuid))
    if len(set(cards)) < len(cards):
        raise ConfigError(
            "Two ranks would share one card; give each its own with --nproc-per-node."
        )


def set_threads(local_world_size: int) -> int:
    """Use OMP_NUM_THREADS where set, else this rank's share of the CPUs that may be used."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() and int(asked) > 0 else 0
    threads = threads or max(1, usable_cpus() // local_world_size)
    torch.set_num_threads(threads)
    return threads


def synchronize_norms(module: nn.Module) -> None:
    """Turn batch norms into ones with statistics over all ranks, in place; frozen ones stay frozen."""
    for name, child in module.named_children():
        if type(child) is nn.BatchNorm2d:  # a frozen one is of a class below it
            converted = nn.SyncBatchNorm.convert_sync_batchnorm(child)  # type: ignore[no-untyped-call]
            setattr(module, name, converted)
        else:
            synchronize_norms(child)


def amp_dtype(device: torch.device, *, enabled: bool) -> torch.dtype | None:
    """Return the autocast type: None on CPU, float16 below compute capability 8.0, else bfloat16.

    `torch.cuda.is_bf16_supported()` is no help: it is true on a T4, which only emulates it.
    """
    if not enabled or device.type != "cuda":
        return None
    major, _ = torch.cuda.get_device_capability(device)
    return torch.bfloat16 if major >= 8 else torch.float16


def make_scaler(
    device: torch.device, dtype: torch.dtype | None, *, init_scale: float
) -> torch.amp.GradScaler:
    """Return a gradient scaler; it scales for float16 only and passes everything else through."""
    return torch.amp.GradScaler(device.type, init_scale=init_scale, enabled=dtype == torch.float16)


def picture_generators(seed: int, *, epoch: int, places: range) -> list[torch.Generator]:
    """Return a CPU generator for each place in the epoch's order (denoising noise).

    Pure functions of their arguments: a picture's noise is the same on any number of ranks.
    """
    generators = []
    for place in places:
        words = np.random.SeedSequence((seed, _NOISE, epoch, place)).generate_state(1, np.uint64)
        generators.append(torch.Generator().manual_seed(int(words[0])))
    return generators
