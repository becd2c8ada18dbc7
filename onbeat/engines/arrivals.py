"""The tensors of a version on their way into an engine, by name: they are gathered as they arrive, and checked to be
whole modules, because engines fuse those.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager


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


def whole_modules(changed: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return `changed` and their siblings among `names`: engines fuse q/k/v, gate/up and experts, and reload a fused
    layer as a whole. E.g. `model.layers.3.self_attn.q_proj.weight` adds all of `model.layers.3.self_attn`.
    """
    groups = {_fusion_group(name) for name in changed}
    return {name for name in names if _fusion_group(name) in groups}


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
