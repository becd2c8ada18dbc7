"""The rollout engine over vLLM's AsyncLLM: continuous batching in processes of its own, weights replaced in place.

vLLM is imported in a thread, once per service, after the environment that it reads while being imported has been set:
from `prepare` on, or else in `start`.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import platform
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onbeat.engines import (
    ChatSampling,
    EngineBroken,
    EngineDied,
    GeneratedResponse,
    Sampling,
    TextPiece,
    VersionMismatch,
    VersionSpan,
)
from onbeat.engines.arrivals import Arrivals, gathered
from onbeat.machine.accelerators import ROLLOUTS_MEMORY
from services.rollout.engines.failure import CAUSE_FILE, EngineStartFailed, describe_cause, kept_cause
from services.rollout.engines.imports import large_import
from services.rollout.engines.registry import find_device
from services.rollout.engines.stops import read_end_ids
from services.rollout.engines.vllm_core import fork_engine_cores
from services.rollout.engines.vllm_platform import (
    check_architectures,
    check_vllm,
    engine_arguments,
    engine_environment,
    kv_cache_bytes,
    num_cached_seqs,
)
from services.rollout.engines.weight_files import TensorShapes, check_weight_file, read_checkpoint_shapes

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

MAX_SHUTDOWNS = 3
CORE_CHECK_S = 0.5  # vLLM's engine core is looked at this often while it owes an answer
MIN_TEMPERATURE = 0.01  # vLLM replaces temperatures that are lower, except 0


@dataclass(frozen=True)
class ModelFiles:
    """The facts that the files of a model tell: tensors of a checkpoint, and tokens that end a response."""

    shapes: TensorShapes
    is_tied: bool
    end_ids: frozenset[int]


class VllmEngine:
    """One vLLM engine, serving one policy version. See `Engine` for the contract.

    max_model_len: prompt + response tokens; None takes the model's own limit.
    max_num_seqs: responses generated concurrently; more wait in vLLM's queue.
    device: auto, cpu, cuda or npu. Raises ValueError where it, its driver or the vLLM for it is missing.
    has_episodes: responses are episodes, which wait for their environments between their turns.
    kv_cache_gib, cpu_cores: CPU only. The cache is smaller where all sequences need less. `cpu_cores` binds the
        workers' threads, e.g. "0" or "0-3"; None lets vLLM choose.
    tensor_parallel_size: devices (or shares of the cores) that hold the model together.
    gpu_memory_utilization: share of each device's memory, not used on the CPU.
    """

    takes = frozenset({"greedy", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids"})

    def __init__(
        self,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        has_episodes: bool = False,
        dtype: str = "bfloat16",
        device: str = "auto",
        kv_cache_gib: float = 1.0,
        cpu_cores: str | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = ROLLOUTS_MEMORY,
    ) -> None:
        self._device = find_device(device)
        self.check_device(self._device, tensor_parallel_size)
        self._num_cached_seqs = num_cached_seqs(max_num_seqs, has_episodes)
        self._engine_args: dict[str, Any] = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "dtype": dtype,
            **engine_arguments(
                self._device,
                kv_cache_gib=kv_cache_gib,
                tensor_parallel_size=tensor_parallel_size,
                gpu_memory_utilization=gpu_memory_utilization,
            ),
        }
        self._environment = engine_environment(
            self._device, os.environ, cpu_cores=cpu_cores, tensor_parallel_size=tensor_parallel_size
        )
        self._llm: AsyncLLM | None = None
        self._building: asyncio.Task[None] | None = None  # it goes on when `start` is cancelled, as threads do
        self._model = ModelFiles({}, is_tied=False, end_ids=frozenset())
        self._version: int | None = None
        self.num_in_flight = self.num_cancelled_tokens = 0
        self._num_requests = 0

    @staticmethod
    def check_device(device: str, tensor_parallel_size: int = 1) -> None:
        """Check that vLLM can run on devices of this kind. Raises ValueError, with the remedy, if not."""
        check_vllm(device)
        if device == "cpu":
            return
        import torch

        if tensor_parallel_size > (visible := torch.get_device_module(device).device_count()):
            raise ValueError(
                f"ONBEAT_TENSOR_PARALLEL_SIZE={tensor_parallel_size}, but {visible} {device} devices are visible"
            )

    @staticmethod
    def prepare(device: str, cpu_cores: str | None, tensor_parallel_size: int) -> None:
        """Begin to import vLLM, so that an engine with the same arguments, started later in this process, need not wait
        for it. An error of the import is raised by `start`.
        """
        set_environment(
            engine_environment(device, os.environ, cpu_cores=cpu_cores, tensor_parallel_size=tensor_parallel_size)
        )
        importing()

    async def start(self, model_dir: Path, policy_version: int) -> None:
        assert self._llm is None, "the engine is already started"
        assert self._building is None, "an engine that did not start has to be stopped first"
        model_config = json.loads((model_dir / "config.json").read_text("utf-8"))
        check_architectures(model_config)
        is_tied = bool(model_config.get("tie_word_embeddings", False))
        end_ids = frozenset(read_end_ids(model_dir))  # vLLM itself reads only one of the two files
        self._model = ModelFiles(read_checkpoint_shapes(model_dir), is_tied, end_ids)
        if (limit := self._engine_args.get("kv_cache_memory_bytes")) is not None:
            sizes = (self._engine_args["dtype"], self._engine_args["max_model_len"], self._num_cached_seqs)
            self._engine_args["kv_cache_memory_bytes"] = kv_cache_bytes(limit, model_config, *sizes)
        set_environment(self._environment)
        # This runs in a thread, because it takes many seconds in which heartbeats and leases have to go on.
        self._building = asyncio.create_task(asyncio.to_thread(self._build, model_dir), name="build vLLM")
        await asyncio.shield(self._building)
        self._building = None
        assert self._llm is not None
        await _unless_core_dies(self._llm, self._llm.update_weight_version(str(policy_version)))
        self._version = policy_version
        logger.info("vLLM serves %s as policy version %d", model_dir, policy_version)

    def _build(self, model_dir: Path) -> None:
        """Build vLLM. Raises EngineBroken where it cannot be imported, EngineDied if its core was killed, as by a lack
        of memory, EngineStartFailed with the cause that another process of vLLM logged, and what vLLM itself raises.
        """
        try:
            importing().result()
        except Exception as error:  # any error of the imported libraries
            raise EngineBroken(f"vLLM cannot be imported: {describe_cause(error)}") from error
        started, cause_file = time.monotonic(), model_dir.parent / "cause"
        cause_file.unlink(missing_ok=True)
        set_environment({CAUSE_FILE: str(cause_file)})
        try:
            self._llm = self._create_llm(model_dir)
        except Exception as error:  # vLLM raises many kinds
            if not (cause := kept_cause(error, cause_file)):
                raise
            raise EngineStartFailed(cause) from error
        finally:
            set_environment({CAUSE_FILE: None})
        logger.info("built vLLM in %.2f s", time.monotonic() - started)

    def _create_llm(self, model_dir: Path) -> "AsyncLLM":
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from services.rollout.engines.weight_transfer import BACKEND

        # No accelerator survives a fork. On Arm, vLLM preloads libraries into a new process (not run).
        if self._device == "cpu" and platform.machine() == "x86_64":
            fork_engine_cores()
        engine_args = AsyncEngineArgs(
            model=str(model_dir),
            # These are the logprobs of the sampled distribution, that is after temperature.
            logprobs_mode="processed_logprobs",
            weight_transfer_config=WeightTransferConfig(backend=BACKEND),
            **self._engine_args,
        )
        return AsyncLLM.from_engine_args(engine_args)

    async def generate(
        self, prompt_token_ids: list[int], num_samples: int, sampling: Sampling, expected_version: int
    ) -> list[GeneratedResponse]:
        if self._llm is None or expected_version != self._version:
            raise VersionMismatch(expected_version, self._version)
        with _refusals():
            params = _sampling_params(sampling, num_samples, self._model.end_ids)
        self._num_requests += 1
        self.num_in_flight += num_samples
        try:
            llm, request_id = self._llm, str(self._num_requests)
            request = _complete(llm, prompt_token_ids, params, request_id)
            return await _unless_core_dies(llm, request, lambda: self._count_cancelled(llm, request_id))
        finally:
            self.num_in_flight -= num_samples

    def _count_cancelled(self, llm: "AsyncLLM", request_id: str) -> None:
        """Count the tokens of a request that is about to be cancelled, those of its finished responses included."""
        every_state = llm.output_processor.request_states.values()
        states = [state for state in every_state if state.external_req_id == request_id]
        self.num_cancelled_tokens += sum(state.detokenizer.num_output_tokens() for state in states)
        if states and (group := states[0].parent_req) is not None:
            finished = [completion for completion in group.output_aggregator if completion is not None]
            self.num_cancelled_tokens += sum(len(completion.token_ids) for completion in finished)

    async def stream(
        self, prompt_token_ids: list[int], sampling: ChatSampling, expected_version: int
    ) -> AsyncGenerator[TextPiece]:
        """Yield text; see `StreamingEngine`. All that vLLM generates before it is asked again is one piece."""
        if self._llm is None or expected_version != self._version:
            raise VersionMismatch(expected_version, self._version)
        with _refusals():
            params = _chat_params(sampling, self._model.end_ids)
        self._num_requests += 1
        self.num_in_flight += 1
        prompt = {"type": "token", "prompt_token_ids": prompt_token_ids}
        try:
            request = self._llm.generate(prompt, params, request_id=str(self._num_requests))
            async with aclosing(request) as outputs:
                with _refusals():
                    async for output in outputs:
                        yield _to_piece(output.outputs[0], expected_version)
        finally:
            self.num_in_flight -= 1

    async def load(self, policy_version: int, weights_file: Path, arrivals: AsyncIterator[Sequence[str]]) -> None:
        """Load a version; see `Engine`. When vLLM itself fails, a load of all tensors may repair it; if that fails too,
        or if this is cancelled, stop and start the engine.
        """
        assert self._llm is not None, "load before start"
        assert self.num_in_flight == 0, f"load with {self.num_in_flight} responses in flight"
        served, self._version = self._version, None
        names_in_file = check_weight_file(weights_file, self._model.shapes, is_tied=self._model.is_tied)
        async with gathered(arrivals, names_in_file, must_be_all=served is None) as arrived:
            await _unless_core_dies(self._llm, _replace_weights(self._llm, weights_file, arrived))
            arrived.check()
        await _unless_core_dies(self._llm, self._llm.update_weight_version(str(policy_version)))
        await _unless_core_dies(self._llm, self._llm.resume_generation())
        self._version = policy_version

    @property
    def doing(self) -> str:
        """The step that the start is at, in words; '' when the model is loaded."""
        if not importing().done():
            return "importing vLLM, usually 20 to 60 s"
        return "vLLM loads the model and prepares its kernels" if self._llm is None else ""

    @property
    def is_dead(self) -> bool:
        return self._llm is not None and self._llm.errored

    def version(self) -> int | None:
        return self._version

    def capacity(self) -> int:
        return int(self._engine_args["max_num_seqs"])

    async def stop(self) -> None:
        if (building := self._building) is not None:  # a cancelled or failed start, whose thread cannot be stopped
            await asyncio.wait({building})
            self._building = None
            if not building.cancelled() and (error := building.exception()) is not None:
                logger.warning("vLLM did not start: %s: %s", type(error).__name__, error)
        llm, self._llm, self._version = self._llm, None, None
        if llm is None:
            return
        if llm.output_handler is not None:
            llm.output_handler.cancel()  # it would take the end of the engine core for a crash
        await asyncio.to_thread(shut_down, llm)


def shut_down(llm: "AsyncLLM") -> None:
    """End the processes of vLLM, which raises when one of them ends by itself while it looks at it: then again."""
    import psutil

    for _ in range(MAX_SHUTDOWNS):
        with contextlib.suppress(psutil.NoSuchProcess):
            llm.shutdown()
            return


def set_environment(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@functools.cache
def importing() -> Future[None]:
    """Return the one import of vLLM in this process, begun by the first call. A second try after a failure would not
    raise the same error: what vLLM has registered by then stays.
    """
    return ThreadPoolExecutor(1, thread_name_prefix="import-vllm").submit(import_vllm)


def import_vllm() -> None:
    """Import vLLM and its plug-in, which takes seconds. Any error of the imported libraries may be raised."""
    started, process_s, thread_s = time.monotonic(), time.process_time(), time.thread_time()
    with large_import():
        import vllm.v1.engine.async_llm  # noqa: F401

        import services.rollout.engines.weight_transfer  # noqa: F401

    # The CPU time of other threads is logged, too, so that the import's own cost can be read even on a single core.
    others_s = (time.process_time() - process_s) - (time.thread_time() - thread_s)
    logger.info(
        "imported vLLM in %.2f s, other threads of this process used a core for %.2f s of them",
        time.monotonic() - started,
        others_s,
    )


async def _unless_core_dies(
    llm: "AsyncLLM", call: Coroutine[Any, Any, Answer], before_cancel: Callable[[], None] = lambda: None
) -> Answer:
    """Await a call of vLLM. Raises EngineDied when the engine core dies first: vLLM itself leaves most calls waiting
    for ever then, and a request too whose prompt it was still preparing.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    task = asyncio.create_task(call)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=CORE_CHECK_S)
            if llm.errored and not task.done():
                raise EngineDied("vLLM's engine core has died")
        return task.result()
    except asyncio.CancelledError:
        before_cancel()
        raise
    except EngineDeadError as error:
        raise EngineDied(f"vLLM's engine core has died: {error}") from error
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _complete(
    llm: "AsyncLLM", prompt_token_ids: list[int], params: "SamplingParams", request_id: str
) -> list[GeneratedResponse]:
    prompt: Any = {"type": "token", "prompt_token_ids": prompt_token_ids}
    with _refusals():
        async for output in llm.generate(prompt, params, request_id=request_id):
            if output.finished:
                num_cached = output.num_cached_tokens or 0
                return [_to_response(completion, num_cached) for completion in output.outputs]
    raise RuntimeError("vLLM ended a request without finishing it")


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise vLLM's refusal of a request as the ValueError that `Engine` promises; other errors are defects."""
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except VLLMClientError as error:
        raise ValueError(str(error)) from error


async def _replace_weights(llm: "AsyncLLM", weights_file: Path, arrived: Arrivals) -> None:
    """Load what arrives; generation stays paused. The update is finished even if the arrivals have failed: then every
    layer is whole again, some with meaningless weights, until a later update of all tensors.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    # pause_generation would also sleep 20 ms, for outputs of requests, of which there are none.
    await llm.engine_core.pause_scheduler_async(mode="wait", clear_cache=True)
    await llm.start_weight_update()
    names: list[str] = []  # the first call prepares all layers while the first tensors are on their way
    while True:
        # The path is not resolved: a file without a name is reached through a link in /proc that only looks like one.
        update_info = {"weights_file": str(weights_file.absolute()), "names": names}  # noqa: ASYNC240, no disk involved
        await llm.update_weights(WeightTransferUpdateRequest(update_info))
        if not (names := await arrived.take()):
            break
    await llm.finish_weight_update()


def _sampling_params(sampling: Sampling, num_samples: int, end_ids: Collection[int]) -> "SamplingParams":
    """Sample as the job says, whatever the model's generation config says. `end_ids`: the model's own stop tokens.

    Response i of a request is seeded with `seed + i`.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if 0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature} is below {MIN_TEMPERATURE}")
    return SamplingParams(
        n=num_samples,
        max_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        repetition_penalty=1.0,
        stop=sorted(sampling.stop, key=len, reverse=True),  # vLLM takes the first that ends
        stop_token_ids=sorted({*sampling.stop_token_ids, *end_ids}),
        logprobs=0,  # only the sampled token's
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,  # otherwise n > 1 arrive one by one
    )


def _chat_params(sampling: ChatSampling, end_ids: Collection[int]) -> "SamplingParams":
    """Build the parameters of a chat. vLLM itself takes the likeliest token at temperature 0."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=sampling.max_response_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=sorted({*sampling.stop_token_ids, *end_ids}),
        output_kind=RequestOutputKind.DELTA,
    )


def _to_piece(completion: "CompletionOutput", expected_version: int) -> TextPiece:
    reason = completion.finish_reason
    if reason not in (None, "stop", "length"):
        raise RuntimeError(f"vLLM finished a response with {reason!r}")
    versions = {span.version for span in completion.weight_versions or ()}  # they come with the last piece
    if reason is not None and versions != {str(expected_version)}:
        raise RuntimeError(f"vLLM stamped a response with the versions {versions}, not {expected_version}")
    return TextPiece(completion.text, len(completion.token_ids), reason)


def _to_response(completion: "CompletionOutput", num_cached_tokens: int) -> GeneratedResponse:
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM finished a response with {completion.finish_reason!r}")
    token_ids = list(completion.token_ids)
    rollout_logprobs = list(completion.logprobs.logprobs)  # flat: one entry per token
    assert len(rollout_logprobs) == len(token_ids)
    return GeneratedResponse(
        token_ids=token_ids,
        rollout_logprobs=rollout_logprobs,
        finish_reason=completion.finish_reason,
        version_spans=[VersionSpan(int(span.version), span.start, span.end) for span in completion.weight_versions],
        text=completion.text,
        num_cached_tokens=num_cached_tokens,
    )
