"""The load of a version into an engine, as names: its safetensors file is checked, the tensors that differ are found,
and their names are gathered as they arrive. No weight is touched here.

The loaders of both engines load what they are given and keep the rest: a file that lacks a tensor would silently mix
two policies. So a file must hold exactly the tensors of the checkpoint that the engine was started on, by its header,
before a single weight is touched; and tensors arrive in whole modules, because engines fuse those.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open

from onbeat.weights.wire import Manifest

# Checkpoints of models with tied embeddings may or may not repeat the embedding under this name.
LM_HEAD_WEIGHT = "lm_head.weight"

TensorShapes = dict[str, tuple[int, ...]]


class BadWeightFile(Exception):
    """A weight file is missing, broken, or holds other tensors than the model."""


def read_shapes(weights_file: Path) -> TensorShapes:
    """Return the names and shapes in a safetensors file. Raises BadWeightFile if it is missing or broken."""
    try:
        with safe_open(weights_file, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise BadWeightFile(f"cannot read the weights in {weights_file}: {error}") from error


def read_checkpoint_shapes(model_dir: Path) -> TensorShapes:
    """Return the names and shapes of a whole HF checkpoint, sharded or not."""
    shapes: TensorShapes = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        shapes |= read_shapes(shard)
    if not shapes:
        raise BadWeightFile(f"no safetensors file in {model_dir}")
    return shapes


def check_weight_file(weights_file: Path, expected: TensorShapes, *, is_tied: bool) -> set[str]:
    """Return the names in the file. Raises BadWeightFile unless it holds exactly the `expected` tensors.

    Dtypes may differ. A tied model's own output head, which no engine reads, may be there or not.
    """
    shapes = read_shapes(weights_file)
    ignored = {LM_HEAD_WEIGHT} if is_tied else set()
    names, expected_names = shapes.keys() - ignored, expected.keys() - ignored
    if names != expected_names:
        missing, unexpected = sorted(expected_names - names), sorted(names - expected_names)
        raise BadWeightFile(
            f"{weights_file} is of another model: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unexpected)} are unexpected {unexpected[:3]}"
        )
    for name in sorted(names):
        if shapes[name] != expected[name]:
            raise BadWeightFile(f"{name} in {weights_file} has shape {shapes[name]}, the model's is {expected[name]}")
    return set(shapes)


def whole_modules(changed: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return `changed` and their siblings among `names`: engines fuse q/k/v, gate/up and experts, and reload a fused
    layer as a whole. E.g. `model.layers.3.self_attn.q_proj.weight` adds all of `model.layers.3.self_attn`.
    """
    groups = {_fusion_group(name) for name in changed}
    return {name for name in names if _fusion_group(name) in groups}


def names_to_load(served: Manifest | None, manifest: Manifest) -> set[str]:
    """Return the tensors that differ from the served version, by whole modules; all of them if none is served."""
    names = {tensor.name for tensor in manifest.tensors}
    if served is None:
        return names
    digests = {tensor.name: tensor.digest for tensor in served.tensors}
    return whole_modules((tensor.name for tensor in manifest.tensors if digests[tensor.name] != tensor.digest), names)


def _fusion_group(name: str) -> str:
    """Return the module that a tensor may be fused within: all experts of a layer, else the parent of its module, but
    the module alone outside the numbered layers.

    model.layers.3.mlp.experts.7.up_proj.weight  ->  model.layers.3.mlp.experts
    model.layers.3.self_attn.q_proj.weight       ->  model.layers.3.self_attn
    model.layers.3.input_layernorm.weight        ->  model.layers.3    (the norms directly below the layer)
    model.embed_tokens.weight                    ->  model.embed_tokens
    """
    path = name.split(".")
    if "experts" in path:
        return ".".join(path[: path.index("experts") + 1])
    module = path[:-1]
    is_in_layer = any(part.isdigit() for part in module)
    return ".".join(module[:-1] if is_in_layer else module)


# ---- while they arrive -----------------------------------------------------------------------------------------------


class Arrivals:
    """The arrivals of one load: names that arrive while the engine works on others are handed over as one batch.

    `expected`: the names that may arrive. `must_be_all`: all of them must, because no version is served to build on.

    async with gathered(...) as arrived:
        while names := await arrived.take():   # the loop ends early when the iterator raises
            ...                                # load them
        ...                                    # close the load, whatever came of it
        arrived.check()                        # serve nothing if this raises
    """

    def __init__(self, arrivals: AsyncIterator[Sequence[str]], expected: Collection[str], *, must_be_all: bool) -> None:
        self._expected = set(expected)
        self._must_be_all = must_be_all
        self._named: set[str] = set()
        self._waiting: list[str] = []
        self._changed = asyncio.Event()
        self.gathering = asyncio.create_task(self._gather(arrivals), name="gather arriving tensors")
        self.gathering.add_done_callback(lambda _: self._changed.set())

    async def _gather(self, arrivals: AsyncIterator[Sequence[str]]) -> None:
        async for names in arrivals:
            batch = set(names)
            if unknown := batch - self._expected:
                raise ValueError(f"{len(unknown)} tensors arrived that the model does not have: {sorted(unknown)[:3]}")
            if twice := batch & self._named:
                raise ValueError(f"{len(twice)} tensors arrived twice: {sorted(twice)[:3]}")
            self._named |= batch
            self._waiting += names
            self._changed.set()

    async def take(self) -> list[str]:
        """Wait for names and return all since the last call; an empty list at the end or after an error."""
        while not self._waiting and not self.gathering.done():
            self._changed.clear()
            await self._changed.wait()
        names, self._waiting = self._waiting, []
        return names

    def check(self) -> None:
        """Check the load after its end. Raises the error of the iterator, or ValueError if tensors are missing."""
        self.gathering.result()
        needed = self._expected if self._must_be_all else whole_modules(self._named, self._expected)
        if missing := sorted(needed - self._named):
            reason = "no version is served to take them from" if self._must_be_all else "modules load as a whole"
            raise ValueError(f"{len(missing)} tensors did not arrive, but {reason}: {missing[:3]}")


@asynccontextmanager
async def gathered(
    arrivals: AsyncIterator[Sequence[str]], expected: Collection[str], *, must_be_all: bool
) -> AsyncIterator[Arrivals]:
    arrived = Arrivals(arrivals, expected, must_be_all=must_be_all)
    try:
        yield arrived
    finally:
        arrived.gathering.cancel()
        await asyncio.wait({arrived.gathering})
