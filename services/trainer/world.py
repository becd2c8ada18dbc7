"""The ranks of one job, as torchrun started them: sums of gradients and statistics, small messages. No pickle.

Tensors travel over the device's own backend (gloo, nccl, hccl). Messages and numbers live on the host and travel over
gloo, so they wait for no accelerator. In a world of one, everything here is the identity.
"""

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from onbeat.contracts.errors import OnbeatError
from services.trainer.device import BACKENDS, device_of_rank

CPU = torch.device("cpu")
BUCKET_BYTES = 64 << 20  # gradients are summed in pieces of about this size: few messages, little extra memory


class PeerLost(OnbeatError):
    """Another rank is gone or does not answer. The job is intact: it resumes from its checkpoint when all are back."""


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # rank among the ranks on this machine
    local_size: int = 1
    device: torch.device = CPU
    timeout_s: float = 0.0  # limit of every wait for other ranks
    _group: dist.ProcessGroup | None = None  # None: the default one

    @classmethod
    def from_environment(cls, device: torch.device, timeout_s: float) -> "World":
        """Return a world of one, or, if torchrun's variables are set, wait for all ranks and return theirs.

        `timeout_s` bounds every later wait for another rank, so it must exceed the longest that ranks may be apart.
        Raises PeerLost when ranks do not arrive, ValueError when a rank has no device.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(device=device)
        local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        rank_device = device_of_rank(device, local_rank)
        world = cls(int(os.environ["RANK"]), size, local_rank, local_size, rank_device, timeout_s)
        timeout = timedelta(seconds=timeout_s)
        with world._waiting("the start of all ranks"):
            store, _, _ = next(rendezvous("env://", timeout=timeout))
            # torchrun may keep its store over a restart: without a prefix, a rank could find addresses of dead ranks.
            fresh = PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            dist.init_process_group(
                BACKENDS[device.type], timeout=timeout, store=fresh, rank=world.rank, world_size=size
            )
        return world

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @functools.cached_property
    def side_channel(self) -> "World":
        """The same ranks on a separate channel (host tensors only), for one other thread.

        All ranks must access it for the first time at the same point.
        """
        if self.size == 1:
            return self
        with self._waiting("a second channel"):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout_s))
        return replace(self, device=CPU, _group=group)

    # ---- sums --------------------------------------------------------------------------------------------------------

    def sum_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add up over ranks in place, in the tensors' dtype (float32 gradients); all ranks get the same bits.

        The order of additions depends on shapes, size and backend only, so that a replay repeats it.
        """
        if self.size == 1:
            return
        with torch.no_grad():
            for bucket in buckets(tensors, BUCKET_BYTES):
                flat = torch.cat([tensor.flatten() for tensor in bucket])
                with self._waiting("the sum of gradients"):
                    dist.all_reduce(flat, group=self._group)
                pieces = flat.split([tensor.numel() for tensor in bucket])
                for tensor, piece in zip(bucket, pieces, strict=True):
                    tensor.copy_(piece.view_as(tensor))

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """Sum the values over ranks, in float64."""
        totals = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            with self._waiting("the sum of statistics"):
                dist.all_reduce(totals, group=self._group)
        return totals.tolist()

    # ---- messages ----------------------------------------------------------------------------------------------------

    def broadcast_bytes(self, content: bytes | None) -> bytes:
        """Return rank 0's content on every rank; the content that other ranks pass is ignored."""
        sent = content if self.is_main and content else b""
        if self.size == 1:
            return sent
        with self._waiting("a message from rank 0"):
            length = torch.tensor([len(sent)])
            dist.broadcast(length, 0, group=self._group)
            buffer = host_buffer(sent) if self.is_main else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(buffer, 0, group=self._group)
            return buffer.numpy().tobytes()

    def all_gather_bytes(self, content: bytes) -> list[bytes]:
        """Return every rank's content, by rank."""
        if self.size == 1:
            return [content]
        with self._waiting("messages from all ranks"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(content)]), group=self._group)
            longest = max(1, *map(int, lengths))  # no buffer may be empty
            received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(received, host_buffer(content.ljust(longest, b"\0")), group=self._group)
            return [buffer[: int(length)].numpy().tobytes() for buffer, length in zip(received, lengths, strict=True)]

    def largest(self, value: int) -> int:
        """Return the greatest of all ranks' values."""
        return max(map(int, self.all_gather_bytes(str(value).encode())))

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _waiting(self, awaited: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError; ValueError: bad addresses
            raise PeerLost(
                f"rank {self.rank} of {self.size} waited for {awaited} (at most {self.timeout_s:.0f} s): {error}; look "
                "for the first error in the other ranks' logs, then start all ranks again: the job resumes by itself"
            ) from error


ALONE = World()


def is_lost_peer(error: Exception) -> bool:
    """Return whether torch raised this because another rank is gone, in a collective of its own (FSDP's)."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "HCCL"))
    )


def host_buffer(content: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def buckets(tensors: Sequence[torch.Tensor], max_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Yield runs of consecutive tensors of one dtype, at most `max_bytes` together (or one larger tensor alone)."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (size + tensor.nbytes > max_bytes or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
