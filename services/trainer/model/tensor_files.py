"""Named tensors in safetensors files: a model's weights, or the rows that each rank holds, in a file per rank.

The latter are in the format of torch.distributed.checkpoint's Hugging Face storage (a row offset per tensor in the
header), which reads them: each reader takes the rows that it needs out of all files, so any number of ranks can read
the files of any other number. It does not write them, because `dcp.save` sends pickled plans between the ranks.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class HostShards:
    """A rank's part of some tensors, on the host. CPU tensors are not copied: they must not change meanwhile."""

    tensors: Tensors
    offsets: dict[str, list[int]]  # index of the part's first element in the whole tensor, by dimension

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], is_main: bool) -> "HostShards":
        """Take this rank's rows of sharded tensors; replicated ones are taken by the main rank only."""
        parts, offsets = {}, {}
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                mesh, placements = tensor.device_mesh, tensor.placements
                start = list(compute_local_shape_and_global_offset(tensor.shape, mesh, placements)[1])
                part = tensor.to_local()
            elif is_main:
                part, start = tensor, [0] * tensor.dim()
            else:
                continue
            if part.numel() > 0:
                parts[name], offsets[name] = part.detach().to("cpu").contiguous(), start
        return cls(parts, offsets)

    def write(self, path: Path) -> None:
        info = {name: {"saved_offsets": offset} for name, offset in self.offsets.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(info)}
        save_file(self.tensors, path, metadata=metadata)


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a Hugging Face model's safetensors files, by name."""

    files: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]  # as safetensors names them, such as BF16

    @classmethod
    def find(cls, source: str) -> "StoredWeights":
        """Open the files that `from_pretrained` would read. Raises OSError or SafetensorError if they are not readable
        safetensors files.
        """
        from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
        from transformers.utils.hub import get_checkpoint_shard_files

        try:
            paths = [cached_file(source, SAFE_WEIGHTS_NAME)]
        except OSError:  # there is none, but perhaps several with an index
            paths, _ = get_checkpoint_shard_files(source, cached_file(source, SAFE_WEIGHTS_INDEX_NAME))
        files, shapes, dtypes = {}, {}, {}
        for path in paths:
            with safe_open(path, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  not a mapping
                    tensor = stored.get_slice(name)
                    files[name], shapes[name], dtypes[name] = path, tuple(tensor.get_shape()), tensor.get_dtype()
        return cls(files, shapes, dtypes)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor on the host; the file is mapped, and only pages that are used are read."""
        with safe_open(self.files[name], framework="pt") as stored:
            tensor: torch.Tensor = stored.get_tensor(name)
            return tensor


def read_tensors(folder: Path, sharded: Mapping[str, torch.Tensor]) -> Tensors:
    """Read all tensors of the folder's files; those named KIND.NAME with NAME in `sharded` come sharded like that one.

    Raises ValueError for a sharded tensor of another shape; the caller checks whole ones.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(str(folder))
    targets: Tensors = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        like = sharded.get(key.partition(".")[2])
        if like is None:
            targets[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
        elif like.shape != stored.size:
            stored_shape, wanted = tuple(stored.size), tuple(like.shape)
            raise ValueError(f"the checkpoint is of another model: {key} needs {wanted}, has shape {stored_shape}")
        else:
            targets[key] = torch.empty_like(like, dtype=stored.properties.dtype)
    try:
        with warnings.catch_warnings():  # it warns that it reads as a single process, which is intended
            warnings.simplefilter("ignore", UserWarning)
            load(dict(targets), storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # not an Exception: it would pass every handler
        raise ValueError(f"{folder} cannot be read: {error}") from error
    return targets
