"""`python -m services.trainer.memory_plan JOB.json` estimates the memory of a job's trainer before it runs.

Most of it is a number of bytes for each parameter. The memory of a pass is counted on tensors that have a shape and no
memory (the meta device). Nothing of the model is read but its configuration.

The peak is in one of two moments:

    pass      gradients, activations, and the versions that rollouts may still ask for
    publish   after the step: no gradients or activations, and one more version

A version that is served in place takes no memory of its own.
"""

import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onbeat.config import JobConfig
from onbeat.config.training import TrainingConfig
from onbeat.streams.codec import Response, RolloutGroup
from services.trainer.attention import no_mask
from services.trainer.batch import MicroBatch, Part, pack
from services.trainer.checkpoints.saver import state_bytes
from services.trainer.model.bundled import resolve_model
from services.trainer.model.errors import TRIAL_ERRORS
from services.trainer.model.lean_layers import MASTER
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import (
    DTYPES,
    Passes,
    Prepared,
    enable_gradient_checkpointing,
    load_config,
    separate_inputs,
    set_up,
    target_logprobs,
)
from services.trainer.passes.choice import choose_passes
from services.trainer.passes.trial import architecture_name
from services.trainer.policy import has_old_policies, is_served_in_place
from services.trainer.row_length import Bounds, beyond_counted, bounds_of, longest_row, reserve_of
from services.trainer.settings import Settings
from services.trainer.supervised import SupervisedRow
from services.trainer.teacher import Teacher
from services.trainer.weights.store import num_served

META = "meta"
SIZES_ALONE = "onbeat_sizes_alone"  # transformers' name for the attention of the plan
PROGRAM_BYTES = 450_000_000  # memory of a process that has imported PyTorch and transformers; measured
MASTER_BYTES, MOMENTS_BYTES, GRADIENT_BYTES = 4, 8, 4  # float32, for each trained parameter
# On a CPU a pass takes more than its tensors: kernels' own memory, and gaps that the allocator keeps. For a row of the
# quick start in float32 500 MB of tensors took 740 MB.
PASS_ON_HOST = 1.5
DELTAS, DELTAS_OF_LORA = 0.5, 0.1  # shares of a bfloat16 version's bytes, for all deltas; they change from job to job

Parts = dict[str, int]  # bytes by what they are


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model's parameters, and the memory that one pass over the largest row takes besides them."""

    num_parameters: int  # number without adapters
    num_trained: int
    num_outside_layers: int  # embeddings and head
    pass_bytes: int
    num_layers: int
    num_teacher: int = 0  # number of the teacher's parameters

    @classmethod
    def of(cls, model: Any, pass_bytes: int, teacher: Teacher | None = None) -> "Sizes":
        parameters = list(model.parameters())
        return cls(
            num_parameters=sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name),
            num_trained=sum(p.numel() for p in parameters if p.requires_grad),
            num_outside_layers=sum(p.numel() for p in set(parameters) - set(model.get_decoder().layers.parameters())),
            pass_bytes=pass_bytes,
            num_layers=model.config.get_text_config().num_hidden_layers,
            num_teacher=0 if teacher is None else sum(p.numel() for p in teacher.model.parameters()),
        )


@dataclass(frozen=True)
class Placement:
    """The distribution of a job: FSDP2 over the ranks of one job, or one rank that holds everything."""

    num_ranks: int = 1  # ranks that share one model
    is_on_host: bool = True  # the device is the CPU, so that all parts are in one memory


def plan_trainer(config: JobConfig, sizes: Sizes, placement: Placement) -> dict[str, Parts]:
    """Return the parts of one rank, by the memory they are in, at the moment when that memory holds most."""
    held, in_pass = held_parts(config, sizes, placement), pass_parts(config, sizes, placement)
    served, published = (version_parts(config, sizes, placement, is_publishing) for is_publishing in (False, True))
    program = {"program": PROGRAM_BYTES}
    if placement.is_on_host:
        moments = [held | in_pass | served | program, held | published | program]
        return {"host": max(moments, key=lambda parts: sum(parts.values()))}
    # On a CPU a checkpoint is written from the tensors themselves; from a device their state is copied.
    checkpoint = {"checkpoint while it is written": state_bytes(config, sizes.num_trained) // placement.num_ranks}
    return {"device": held | in_pass, "host": published | checkpoint | program}


def held_parts(config: JobConfig, sizes: Sizes, placement: Placement) -> Parts:
    """Return the parts that a rank holds from the first step to the last."""
    item, shared = DTYPES[config.model.dtype].itemsize, placement.num_ranks
    whole, trained = sizes.num_parameters, sizes.num_trained
    frozen = whole - trained if config.lora is None else whole
    has_masters_beside = item < MASTER_BYTES and shared == 1  # shards are float32 and are the masters themselves
    held: Parts = {
        "weights": (frozen * item + trained * (item if shared == 1 else MASTER_BYTES)) // shared,
        "optimizer": trained * (MOMENTS_BYTES + MASTER_BYTES * has_masters_beside) // shared,
    }
    if config.objective.needs_reference and (config.lora is None or config.has_started_reference):
        held["reference model"] = whole * item // shared
    if sizes.num_teacher:
        held["teacher"] = sizes.num_teacher * item // shared
    if has_old_policies(config):
        held["older policies"] = whole * item // shared
    if config.gac.mode != "off":
        held["last gradient"] = trained * GRADIENT_BYTES // shared
    return held


def pass_parts(config: JobConfig, sizes: Sizes, placement: Placement) -> Parts:
    """Return the parts that a rank holds during passes alone."""
    item, shared, trained = DTYPES[config.model.dtype].itemsize, placement.num_ranks, sizes.num_trained
    one_layer = (sizes.num_parameters - sizes.num_outside_layers) // sizes.num_layers
    gathered = (sizes.num_outside_layers * 2 + one_layer * 2) * item if shared > 1 else 0  # and the root's gradient
    return {
        "gradients": trained * GRADIENT_BYTES // shared,
        "activations": int(sizes.pass_bytes * (PASS_ON_HOST if placement.is_on_host else 1.0)),
        **({"gathered layers": gathered} if gathered else {}),
    }


def version_parts(config: JobConfig, sizes: Sizes, placement: Placement, is_publishing: bool) -> Parts:
    """Return the parts that a rank serves from the host's memory. `is_publishing`: the next version is made."""
    item, shared = DTYPES[config.model.dtype].itemsize, placement.num_ranks
    version = sizes.num_parameters * item // shared
    is_in_place = placement.is_on_host and shared == 1 and is_served_in_place(config)
    num_versions = 0 if is_in_place else num_served(config) + is_publishing
    num_versions += config.has_started_reference  # the version at the end of the warm start is kept
    # Deltas of float32 take no memory: they are parts of the version that they lead to.
    deltas = 0 if item == MASTER_BYTES else int(version * (DELTAS_OF_LORA if config.lora else DELTAS))
    return {"published versions": num_versions * version, "deltas": deltas}


def measure_sizes(
    config: JobConfig,
    model_config: Any,
    passes: Passes,
    prompt_tokens: int,
    num_ranks: int = 1,
    teacher: Teacher | None = None,
) -> Sizes:
    """Measure a model, and its teacher, without building them in memory. Raises ValueError as `add_adapters` does."""
    model = empty_model(config, model_config, passes)
    return Sizes.of(model, count_pass(model, config, prompt_tokens, num_ranks > 1, teacher), teacher)


def count_pass(
    model: Any, config: JobConfig, prompt_tokens: int, is_sharded: bool, teacher: Teacher | None = None
) -> int:
    """Return the bytes of the pass over the job's largest row, on a model without memory: see `tracked_pass`."""
    batch = largest_row(config, prompt_tokens)
    if config.warm_start is not None:
        batch = max(batch, row_of_examples(config), key=lambda row: row.layout.num_places)
    return tracked_pass(model, batch, is_sharded, teacher)


def empty_teacher(config: JobConfig, teacher_config: Any, passes: Passes, num_tokens: int) -> Teacher:
    """Return the job's teacher without memory. `num_tokens`: the policy's rows of tokens."""
    assert config.teacher is not None
    plain = config.model_copy(update={"lora": None, "training": TrainingConfig()})
    model = empty_model(plain, teacher_config, passes).requires_grad_(False)
    return Teacher(model, config.teacher, torch.ones(num_tokens, dtype=torch.bool, device=META), is_complete=True)


def empty_model(config: JobConfig, model_config: Any, passes: Passes) -> Any:
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    AttentionInterface.register(SIZES_ALONE, keep_inputs)
    AttentionMaskInterface.register(SIZES_ALONE, no_mask)
    dtype = DTYPES[config.model.dtype]
    with torch.device(META):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=SIZES_ALONE)
    set_up(model, passes, torch.device(META))
    if config.training.has_gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if config.lora:
        add_adapters(model, config.lora, config.seed)
    return model


def tracked_pass(model: Any, batch: MicroBatch, is_sharded: bool, teacher: Teacher | None = None) -> int:
    """Return the most bytes that a forward and a backward pass, with a teacher's pass before them, hold besides the
    models and the sum of gradients.

    The sum is there before the pass, which adds to it. A sharded parameter, and most of those in bfloat16, get a
    gradient of their own in each pass, which is added to the sum as soon as it is made.
    """
    for parameter in [parameter for parameter in model.parameters() if parameter.requires_grad]:
        if is_sharded:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        elif parameter.dtype == torch.float32:
            parameter.grad = torch.zeros_like(parameter)
        else:
            parameter.register_post_accumulate_grad_hook(drop_gradient)
            master = torch.zeros_like(parameter, dtype=torch.float32)
            master.grad = torch.zeros_like(master)
            setattr(parameter, MASTER, master)
    live = LiveBytes()
    with live:
        compare = None
        if teacher is not None:
            compare = teacher.read(batch, 1.0, inputs_without_values(teacher.model, batch)).compare
        logprobs, _, *divergence = target_logprobs(model, inputs_without_values(model, batch), batch, 1.0, compare)
        sum(divergence, logprobs).sum().backward()
    return live.peak


def drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


class LiveBytes(TorchDispatchMode):
    """A counter of the bytes of all storages that operations of its block make, while they are held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(tensor.untyped_storage()) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if id(storage) not in before and storage not in self._seen:
                self._seen.add(storage)
                self._change(storage.nbytes())
                weakref.finalize(storage, self._change, -storage.nbytes())
        return result

    def _change(self, size_bytes: int) -> None:
        self.now += size_bytes
        self.peak = max(self.peak, self.now)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def inputs_without_values(model: Any, batch: MicroBatch) -> Prepared:
    """Prepare inputs as `prepare_inputs` does, but without a plan, which reads the layout's values."""
    if model.passes.is_packed:
        rows, select = batch.token_ids[None], lambda outputs: outputs[0][0].index_select(0, batch.layout.logit_index)
    else:
        (inputs,), select = separate_inputs(batch, is_padded=False)  # all responses have one length
        rows = inputs["input_ids"]
    mask = torch.ones_like(rows)  # else the model looks for packed sequences in the values
    return [{"input_ids": rows, "attention_mask": mask, "use_cache": False}], select


def keep_inputs(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Attend in transformers' signature, as `packed_attention`, to the sizes alone."""
    return KeptInputs.apply(query, key, value), None


class KeptInputs(torch.autograd.Function):
    """An attention that keeps what all kernels do: queries, keys, values and its output."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output_BTHD = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, output_BTHD)
        return output_BTHD

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def largest_row(config: JobConfig, prompt_tokens: int) -> MicroBatch:
    """Pack as many whole groups as the token budget takes, with responses of full length, or one more where shorter
    responses fill the budget better; of a larger group, a part.

    An episode may sample the tokens of all of its turns, and no more than the context takes. How many it will observe
    is not known: they count within the budget only.
    """
    rollout, budget = config.rollout, config.training.row_tokens
    size = len(config.objective.trained_members(torch.zeros(rollout.num_samples_per_prompt)))
    longest = config.longest_response
    if config.model.max_context_tokens and any(config.environments_by_source.values()):
        longest = min(longest, config.model.max_context_tokens - prompt_tokens)
    response_places = max(1, longest - 1)
    places = prompt_tokens + size * response_places
    if places > budget and not config.objective.needs_whole_group:
        size, num_groups = max(1, (budget - prompt_tokens) // response_places), 1
    else:
        num_groups = max(1, min(rollout.num_prompts_per_iteration, budget // places))
        shorter = (budget // (num_groups + 1) - prompt_tokens) // size
        longer_row = (num_groups + 1) * (prompt_tokens + size * shorter)
        if num_groups < rollout.num_prompts_per_iteration and shorter > 0 and longer_row > num_groups * places:
            num_groups, response_places = num_groups + 1, shorter
    response = Response(token_ids=[0] * (response_places + 1), rollout_logprobs=[0.0] * (response_places + 1))
    group = RolloutGroup(group_id="0-0", prompt_token_ids=[0] * prompt_tokens, responses=[response] * size)
    return pack([Part.whole(group)] * num_groups, torch.device(META), is_prefix_shared=False)


def row_of_examples(config: JobConfig) -> MicroBatch:
    """Pack examples that fill the token budget, as far as the context lets them, and all of whose tokens are learned:
    how long the rows of a warm start are is not known. One that is longer than the budget takes more."""
    assert config.warm_start is not None
    budget = config.training.row_tokens
    context = config.model.max_context_tokens or budget
    num_tokens = max(2, min(budget, config.warm_start.num_rows_per_iteration * context))
    row = SupervisedRow([0] * num_tokens, [False] + [True] * (num_tokens - 1))
    return pack([row.as_group()], torch.device(META))


def choose_rows(
    config: JobConfig,
    sizes_of_row: Callable[[int], Sizes],
    placement: Placement,
    bounds: Bounds,
    available_bytes: int | None,
) -> int:
    """Return the tokens of a row that the rest of a trainer leaves memory for; None: the most that are of use."""
    if available_bytes is None:
        return bounds.most

    def planned_bytes(num_tokens: int) -> int:
        parts = plan_trainer(config, sizes_of_row(num_tokens), placement)
        return sum(parts["host" if placement.is_on_host else "device"].values())

    return longest_row(planned_bytes, available_bytes - reserve_of(available_bytes), bounds)


def tried_passes(config: JobConfig, model_config: Any, is_sharded: bool = False) -> Passes:
    dtype, limit = DTYPES[config.model.dtype], config.model.max_context_tokens
    return choose_passes(model_config, limit, torch.device("cpu"), dtype, is_sharded)[0]


def plan(config: JobConfig, model_config: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return the parts, the tokens of a row, the number of parameters, and the model's configuration, which an engine's
    plan needs. Raises ValueError, and TRIAL_ERRORS for a model that cannot be planned without building it."""
    placement, prompt_tokens = Placement(request["num_ranks"], request["is_on_host"]), request["prompt_tokens"]
    is_sharded, teacher = placement.num_ranks > 1, None
    model = empty_model(config, model_config, tried_passes(config, model_config))
    if config.teacher is not None:
        teacher_config = load_config(resolve_model(config.teacher.path, Settings().cache_dir))
        passes = tried_passes(config, teacher_config, is_sharded)
        teacher = empty_teacher(config, teacher_config, passes, model_config.get_text_config().vocab_size)

    def count(num_tokens: int) -> int:
        return count_pass(model, config.with_row_tokens(num_tokens), prompt_tokens, is_sharded, teacher)

    row_tokens = config.training.max_tokens_per_micro_batch
    bounds = bounds_of(config, prompt_tokens, model_config.to_dict(), placement.num_ranks)
    bytes_of_row = beyond_counted(count, bounds.least) if row_tokens == "auto" else count

    def sizes_of_row(num_tokens: int) -> Sizes:
        return Sizes.of(model, bytes_of_row(num_tokens), teacher)

    if row_tokens == "auto":
        row_tokens = choose_rows(config, sizes_of_row, placement, bounds, request["available_bytes"])
    sizes = sizes_of_row(row_tokens)
    return {
        "parts": plan_trainer(config, sizes, placement),
        "row_tokens": row_tokens,
        "num_parameters": sizes.num_parameters,
        "num_trained": sizes.num_trained,
        "model": model_config.get_text_config().to_dict(),
    }


def main() -> None:
    """Print JSON: see `plan`."""
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    config = JobConfig.model_validate(request["job"]).with_warm_start(1)  # `epochs` are not counted yet
    try:
        model_config = load_config(resolve_model(config.model.path, Settings().cache_dir))
        report = plan(config, model_config, request)
    except ValueError as error:
        sys.exit(str(error))
    except TRIAL_ERRORS as error:
        name = architecture_name(model_config)
        sys.exit(f"the memory of {name} cannot be planned without building it ({type(error).__name__}: {error})")
    sys.stdout.write(json.dumps(report, default=str) + "\n")


if __name__ == "__main__":
    main()
