"""`training.max_tokens_per_micro_batch = "auto"`: the rule, and the real loop with the number that is chosen."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from onbeat.contracts.errors import LeaseLost
from services.trainer.job import row_tokens
from services.trainer.job.row_tokens import choose_row_tokens, passes_of, row_for, still_to_come
from services.trainer.memory_plan import DELTAS, Placement, Sizes, count_pass, empty_model, pass_parts
from services.trainer.policy import Policy
from services.trainer.row_length import (
    LEAST_RESERVE,
    LEAST_TOKENS,
    LONGEST_COUNTED,
    STEP,
    Bounds,
    beyond_counted,
    bounds_of,
    longest_row,
    reserve_of,
)
from services.trainer.teacher import Teacher
from services.trainer.world import World
from tests.trainer_fixtures import (
    VOCAB,
    RecordedJob,
    job_config,
    make_rows,
    model_of,
    moved_model,
    recorded_iterations,
    tiny_model,
    train,
)

MB = 1_000_000
AUTO = {"max_tokens_per_micro_batch": "auto"}
START = {"num_rows_per_iteration": 3, "num_iterations": 1, "data": {"type": "jsonl", "path": "examples.jsonl"}}


class WaitingJob(RecordedJob):
    """A job whose groups are accepted before its trainer takes them, and that notes what is recorded in which order."""

    recorded_tokens: int | None = None  # a number that another trainer was faster to record
    num_engines = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.order, self.reasons = [], []

    def accepted(self, iteration, known=()):
        return [group for group in self._waiting if group.iteration == iteration and group.group_id not in known][:1]

    def num_engines_to_come(self):
        return self.num_engines

    def record_row_tokens(self, num_tokens, reason):
        self.order.append("row tokens")
        self.reasons.append(reason)
        return num_tokens if self.recorded_tokens is None else self.recorded_tokens

    def record_micro_batch(self, iteration, group_ids):
        self.order.append(f"micro-batch of {iteration}")
        return super().record_micro_batch(iteration, group_ids)


def with_memory(monkeypatch, available_bytes):
    monkeypatch.setattr(row_tokens, "read_available", lambda world: available_bytes)


# ---- the rule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "num_ranks", "least", "most"),
    [
        # 4 prompts of 40 tokens with 3 responses of up to 300
        ({}, 1, 512, 4 * 940),
        ({"rollout": {"max_response_tokens": 600}}, 1, 640, 4 * (40 + 3 * 600)),
        ({}, 2, 512, 2 * 940),
        ({}, 3, 512, 2 * 940),
        ({"training": AUTO | {"num_updates_per_iteration": 2}}, 1, 512, 2 * 940),
        ({"rollout": {"max_prompts_per_iteration": 10}}, 1, 512, 10 * 940),
        ({"objective": {"type": "online_dpo"}}, 1, 940, 4 * 940),
        ({"rollout": {"max_response_tokens": 20}}, 1, 400, 400),  # a whole iteration is less than the usual least
        ({"model": {"max_context_tokens": 100}}, 1, 512, 4 * (40 + 3 * 60)),
        ({"warm_start": START}, 1, 512, 4 * 940),
        ({"warm_start": START | {"num_rows_per_iteration": 8}}, 2, 512, 4 * 1000),
    ],
)
def test_a_row_is_no_longer_than_a_share_of_an_update(sections, num_ranks, least, most):
    sections = {"rollout": {}, "training": AUTO} | sections
    sections["rollout"] = {"max_response_tokens": 300} | sections["rollout"]
    config = job_config(**sections)
    assert bounds_of(config, 40, {"max_position_embeddings": 1000}, num_ranks) == Bounds(least, most)


def test_episodes_and_unknown_prompts_may_fill_the_context():
    played = job_config(environment={"name": "x"}, reward=None, training=AUTO)
    assert bounds_of(played, 40, {"max_position_embeddings": 1000}) == Bounds(512, 4 * (40 + 3 * 960))
    config = job_config(rollout={"max_response_tokens": 300}, training=AUTO)
    assert bounds_of(config, None, {"max_position_embeddings": 1000}) == Bounds(512, 4 * (700 + 3 * 300))
    long = {"max_position_embeddings": 131_072}
    start = job_config(rollout={"max_response_tokens": 300}, training=AUTO, warm_start=START)
    assert [bounds_of(job, None, long).least for job in (played, config, start)] == [512, 512, 512]


def test_the_reserve_is_a_fifth_and_half_a_gb_at_least():
    assert (reserve_of(10_000 * MB), reserve_of(1000 * MB)) == (2000 * MB, LEAST_RESERVE)


@pytest.mark.parametrize("bytes_of_row", [lambda n: n * MB, lambda n: 50 * MB + n * MB + (n > 2000) * 80 * MB])
@pytest.mark.parametrize("limit_mb", [700, 4_321, 9_999])
def test_the_longest_row_that_fits_is_found(bytes_of_row, limit_mb):
    num_tokens = longest_row(bytes_of_row, limit_mb * MB, Bounds(512, 20_000))
    assert num_tokens % STEP == 0
    assert bytes_of_row(num_tokens) <= limit_mb * MB
    assert bytes_of_row(num_tokens + 4 * STEP) > limit_mb * MB


def test_too_little_memory_gives_the_least_and_much_the_most():
    assert longest_row(lambda n: n * MB, 100 * MB, Bounds(512, 20_001)) == 512
    assert longest_row(lambda n: n * MB, -MB, Bounds(300, 300)) == 300
    assert longest_row(lambda n: n * MB, 20_001 * MB, Bounds(512, 20_001)) == 20_001


def test_long_rows_are_not_counted_but_follow_from_shorter_ones():
    counted = []
    bytes_of_row = beyond_counted(lambda n: counted.append(n) or 7 * MB + n * 1000, 512)
    assert bytes_of_row(1000) == bytes_of_row(1000) == 8 * MB
    assert bytes_of_row(LONGEST_COUNTED * 10) == 70 * MB + LONGEST_COUNTED * 10_000
    assert sorted(counted) == [1000, LONGEST_COUNTED]


# ---- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_to_come_is_what_step_and_next_pass_allocate(dtype):
    config = job_config(model={"dtype": dtype}, gac={"mode": "metric"})
    policy = Policy.create(model_of(config), config)
    before = still_to_come(config, policy, Placement())
    optimizer = policy.optimizer
    optimizer.rescale(1.0)
    gradients = optimizer.gradients()
    policy.control.apply(gradients)
    gradient_bytes = sum(tensor.nbytes for tensor in gradients.values())
    optimizer.step()
    moments = [tensor for name, tensor in optimizer.state_tensors().items() if not name.startswith("master.")]
    deltas = 0 if dtype == "float32" else DELTAS * sum(parameter.nbytes for parameter in policy.model.parameters())
    expected = 2 * gradient_bytes + sum(tensor.nbytes for tensor in moments) + deltas
    assert before == pytest.approx(expected, rel=1e-6)
    assert still_to_come(config, policy, Placement()) == pytest.approx(gradient_bytes + deltas, rel=1e-6)


def chosen(config, available_bytes, for_engines=0, **options):
    policy = Policy.create(model_of(config), config)
    for name, value in options.items():
        setattr(policy, name, value)
    return row_for(config, policy, 40, available_bytes, for_engines)


@pytest.mark.slow
def test_more_memory_gives_longer_rows_and_the_reason_says_so():
    config = job_config(rollout={"max_response_tokens": 300, "num_prompts_per_iteration": 64}, training=AUTO)
    least, some, more, most = (chosen(config, LEAST_RESERVE + size_mb * MB) for size_mb in (1, 20, 40, 10_000))
    assert least[0] == LEAST_TOKENS < some[0] < more[0] < most[0] == 64 * 940
    assert some[0] % STEP == more[0] % STEP == 0
    assert least[1].endswith("that may be too much: set training.has_gradient_checkpointing, or train with [lora]")
    assert some[1].startswith(
        f"rows of up to {some[0]} tokens: 0.5 GB of memory are free, the pass over one takes 0.0 GB"
    )
    assert most[1].startswith(f"rows of up to {most[0]} tokens, as many as an update has: 10.5 GB of memory are free")


@pytest.mark.slow
def test_engines_that_are_still_to_start_get_their_memory():
    config = job_config(rollout={"max_response_tokens": 300, "num_prompts_per_iteration": 64}, training=AUTO)
    beside, alone = chosen(config, LEAST_RESERVE + 60 * MB, 20 * MB), chosen(config, LEAST_RESERVE + 40 * MB)
    assert beside[0] == alone[0]
    assert "engines that are still to start take 0.0 GB" in beside[1]
    assert "engines" not in alone[1]


@pytest.mark.slow
def test_checkpointing_gives_longer_rows_and_lora_leaves_more():
    rollout = {"max_response_tokens": 300, "num_prompts_per_iteration": 64}
    plain = job_config(rollout=rollout, training=AUTO)
    checkpointed = job_config(rollout=rollout, training=AUTO | {"has_gradient_checkpointing": True})
    adapted = job_config(rollout=rollout, training=AUTO, lora={"rank": 2})
    size = LEAST_RESERVE + 20 * MB
    assert chosen(checkpointed, size)[0] > 1.3 * chosen(plain, size)[0]
    policies = [Policy.create(model_of(config), config) for config in (plain, adapted)]
    full, lora = (still_to_come(c, p, Placement()) for c, p in zip((plain, adapted), policies, strict=True))
    assert lora < full / 2


@pytest.mark.slow
def test_a_teacher_with_full_vocabulary_takes_some_of_the_row():
    sections = {"objective": {"type": "distill"}, "reward": None, "training": AUTO}
    config = job_config(
        teacher={"path": "t", "divergence": "full_vocabulary"},
        rollout={"max_response_tokens": 300, "num_prompts_per_iteration": 64},
        **sections,
    )
    model = moved_model(7, torch.float32).requires_grad_(False)
    teacher = Teacher(model, config.teacher, torch.ones(VOCAB, dtype=torch.bool), is_complete=True)
    size = LEAST_RESERVE + 20 * MB
    assert chosen(config, size, teacher=teacher)[0] < chosen(config, size)[0]


@dataclass(frozen=True)
class SecondOfTwo(World):
    """Two ranks on machines with different memory, as the first one sees them."""

    other_bytes: int = 0

    def all_gather_bytes(self, content):
        return [content, str(self.other_bytes).encode()]

    def broadcast_bytes(self, content):
        return content


@pytest.mark.slow
@pytest.mark.parametrize(("here_mb", "there_mb"), [(20, 9999), (9999, 20)])
def test_the_rank_with_the_least_memory_decides(here_mb, there_mb, monkeypatch):
    config = job_config(rollout={"max_response_tokens": 300, "num_prompts_per_iteration": 64}, training=AUTO)
    with_memory(monkeypatch, LEAST_RESERVE + here_mb * MB)
    policy = Policy.create(model_of(config), config)
    expected = row_for(config, policy, 40, LEAST_RESERVE + 20 * MB, 0)[0]
    world = SecondOfTwo(size=2, other_bytes=LEAST_RESERVE + there_mb * MB)
    policy = replace(policy, world=world)
    assert choose_row_tokens(WaitingJob(config, []), config, policy, 40).training.row_tokens == expected


def test_ranks_of_a_machine_share_what_it_has(monkeypatch):
    monkeypatch.setattr(row_tokens, "read_memory", lambda: SimpleNamespace(available_bytes=4_000 * MB))
    assert [row_tokens.read_available(World(local_size=size)) for size in (1, 4)] == [4_000 * MB, 1_000 * MB]


def test_a_row_with_one_long_response_is_counted_as_it_is():
    """Shorter rows hold that response, too: what one of them takes is not that of so few tokens."""
    config = job_config(training=AUTO, rollout={"max_response_tokens": 2 * LONGEST_COUNTED})
    policy, least = Policy.create(model_of(config), config), 40 + 2 * LONGEST_COUNTED
    counted = passes_of(config, policy, 40, Placement(), least)
    model = empty_model(config, policy.model.config, policy.model.passes)
    sizes = Sizes.of(model, count_pass(model, config.with_row_tokens(least), 40, False, None))
    assert counted(least) == pass_parts(config, sizes, Placement())["activations"]


def test_random_numbers_of_the_training_stay_as_they_were():
    config = job_config(training=AUTO)
    policy = Policy.create(tiny_model(dtype=torch.float32), config)
    before = torch.get_rng_state()
    row_for(config, policy, 40, 10_000 * MB, 0)
    assert torch.equal(torch.get_rng_state(), before)


# ---- the loop ----------------------------------------------------------------------------------------------------


def test_the_number_is_recorded_before_the_first_micro_batch(tmp_path):
    config = job_config(training=AUTO)
    job = train(config, [], tmp_path, job=WaitingJob(config, recorded_iterations())).job
    assert job.order[:2] == ["row tokens", "micro-batch of 0"]
    assert job.order.count("row tokens") == 1
    assert job.iterations == [0, 1, 2]


@pytest.mark.parametrize("mode", ["periodic", "sync"])
def test_rows_are_those_of_a_job_with_the_recorded_number(mode, tmp_path):
    """Also where another trainer has recorded one that does not fit this machine."""
    schedule = {"mode": mode, "num_iterations": 3}
    config = job_config(training=AUTO, schedule=schedule)
    job = WaitingJob(config, recorded_iterations(), is_steady=True)
    job.recorded_tokens = 40
    chosen_rows = train(config, [], tmp_path / "auto", job=job).job
    given = job_config(training={"max_tokens_per_micro_batch": 40}, schedule=schedule)
    expected = train(given, recorded_iterations(), tmp_path / "given", is_steady=True).job
    assert chosen_rows.recorded == expected.recorded
    assert chosen_rows.version_digests == expected.version_digests


def test_a_job_with_a_number_asks_for_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(row_tokens, "read_available", None)
    config = job_config()
    job = train(config, [], tmp_path, job=WaitingJob(config, recorded_iterations())).job
    assert "row tokens" not in job.order


def test_a_trainer_that_has_lost_the_job_trains_nothing(tmp_path):
    class LostJob(WaitingJob):
        def record_row_tokens(self, num_tokens, reason):
            raise LeaseLost("job")

    config = job_config(training=AUTO)
    job = LostJob(config, recorded_iterations())
    with pytest.raises(LeaseLost):
        train(config, [], tmp_path, job=job)
    assert job.order == []


def test_examples_wait_for_no_engine_but_leave_it_memory(tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr(row_tokens, "engine_bytes", lambda *given: planned.append(given) or 123 * MB)
    config = job_config(warm_start=START, training=AUTO, schedule={"num_iterations": 2})
    groups = make_rows(0) + [group for group in recorded_iterations() if group.iteration == 1]
    job = WaitingJob(config, groups)
    job.num_engines = 2
    job = train(config, [], tmp_path, job=job).job
    assert job.order[:2] == ["row tokens", "micro-batch of 0"]
    assert job.order.count("row tokens") == len(planned) == 1
    assert "engines that are still to start take 0.2 GB" in job.reasons[0]


def test_an_engine_is_planned_by_the_program_of_the_rollout():
    config = job_config()
    policy = Policy.create(model_of(config), config)
    assert row_tokens.engine_bytes(config, policy) > 900 * MB  # two programs


def test_a_model_that_cannot_be_counted_is_refused_with_a_remedy(tmp_path, monkeypatch):
    def fail(*arguments):
        raise AttributeError("no layers")

    monkeypatch.setattr(row_tokens, "count_pass", fail)
    config = job_config(training=AUTO)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot be planned .*no layers.*a number in a new job"):
        train(config, [], tmp_path, job=WaitingJob(config, recorded_iterations()))
