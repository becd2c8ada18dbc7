"""The checks of a new job beyond its schema. Every refusal names a field and a remedy."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import zip_longest
from typing import Any

from onbeat.config import DataConfig, JobConfig, RowData
from onbeat.config.explain import MAX_SHOWN, show
from onbeat.config.service_rewards import problems_of_service_reward
from onbeat.config.templates import repeated_arguments
from onbeat.config.warm_start import EXAMPLES
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.installed import ENVIRONMENTS, REWARDS
from onbeat.contracts.records import RowCounts
from onbeat.contracts.rewards import (
    JUDGE_REWARD,
    PAIRS,
    RANKING,
    SERVICE_REWARDS,
    RewardConfig,
    compares_with_answer,
)
from onbeat.contracts.suggestions import close_names, suggest
from services.broker.admission.adapter import review_adapter_to_train
from services.broker.admission.model_files import Complaint
from services.broker.admission.models import is_folder_path, review_model
from services.broker.admission.preview import Preview, preview_prompts
from services.broker.admission.rewards import review_on_data
from services.broker.admission.teacher import review_teacher, review_vocabulary
from services.broker.admission.tokenizer import review_tokenizer
from services.broker.datasets import DatasetError, DatasetSpec, PromptItem, Section, Survey
from services.broker.datasets.process import DatasetPool, DatasetProcess, hold
from services.broker.datasets.sources import move_error, name_source, place_of, read_places
from services.broker.tasks import read_set

PATTERN_OPTIONS = {"regex": "pattern", "reasoning_gym": "answer_pattern"}
REWARD_OPTIONS = {
    "exact": ("ignore_case", "as_number"),
    "regex": ("pattern", "as_number"),
    "math": (),
    "reasoning_gym": ("answer_pattern",),
}

MAX_TRIALS = 2  # trials of rewards at a time, each of which is a process, and of models
MAX_RESPONSES_PER_ITERATION = 1_000_000
MAX_PROMPTS_PER_JOB = 2**31 - 1


@dataclass(frozen=True)
class RewardUse:
    """A reward, the field of the job that it is in, and the data that it scores, by their fields."""

    field: str
    reward: RewardConfig
    data: Sequence[tuple[str, DataConfig]]


@dataclass
class Remarks:
    """Remarks about a job's data: notes for its events, and how many rows can be used."""

    notes: list[str] = dataclasses.field(default_factory=list)
    rows: list[RowCounts] = dataclasses.field(default_factory=list)


class JobRefused(OnbeatError):
    """The job cannot run as it is; nothing was created."""

    def __init__(self, complaints: list[Complaint], rows: Sequence[RowCounts] = ()) -> None:
        super().__init__("; ".join(f"{field}: {message}" for field, message in complaints))
        self.complaints, self.rows = complaints, list(rows)


class Admission:
    """A review of jobs. `patterns`: one more process, with a short deadline: a slow pattern cannot delay data."""

    def __init__(self, data: DatasetPool, patterns: DatasetProcess, has_model_folders: bool) -> None:
        self._process, self._patterns, self._has_model_folders = data, patterns, has_model_folders
        self._trials, self._pattern = asyncio.Semaphore(MAX_TRIALS), asyncio.Lock()
        self._tasks: list[str] | None = None  # read once: what is installed does not change under a broker

    async def examine(self, config: JobConfig) -> tuple[list[Complaint], Remarks]:
        """Return everything that is wrong, and remarks about the job's data. The data is not opened while numbers or
        options are impossible. Raises TooBusy."""
        complaints, remarks = await self._examine(config)
        return name_sources(config, complaints), remarks

    async def _examine(self, config: JobConfig) -> tuple[list[Complaint], Remarks]:
        unusable = review_numbers(config) + review_free_values(config)
        complaints = unusable + review_environments(config) + review_held_out_judges(config)
        uses, checked = reward_uses(config), []
        to_try: list[tuple[RewardUse, int]] = []  # rewards with the number of capture groups in their patterns
        for use in uses:
            pattern_complaints, num_groups = await self._review_pattern(use)
            reward_complaints = review_reward(use, num_groups)
            complaints += reward_complaints + pattern_complaints
            checked += [] if pattern_complaints else [use]  # a slow pattern must not hold up the data
            if (
                not use.field.startswith("evaluation")
                and use.reward.name not in SERVICE_REWARDS
                and not reward_complaints
            ):
                to_try.append((use, num_groups))
        async with hold(self._trials):  # the hub may take its time
            model_complaints = await asyncio.to_thread(review_model, config, self._has_model_folders)
            if not model_complaints and self._has_model_folders and is_folder_path(config.model.path):
                model_complaints = await review_tokenizer(config)
            adapter_complaints = []
            if not model_complaints:
                adapter_complaints = await asyncio.to_thread(review_adapter_to_train, config, self._has_model_folders)
            teacher_complaints = await asyncio.to_thread(review_teacher, config, self._has_model_folders)
            if not model_complaints + teacher_complaints and self._has_model_folders:
                teacher_complaints = await review_vocabulary(config)
            complaints += model_complaints + adapter_complaints + teacher_complaints
        if unusable:
            return complaints, Remarks()
        data_complaints, firsts, remarks = await self._review_data(config, checked)
        complaints += data_complaints
        is_refused = bool(firsts and data_complaints)  # the rows are wrong, so there is no answer to try
        for use, num_groups in [] if is_refused else to_try:
            tried: list[PromptItem | None] = [firsts[field] for field, _ in use.data if field in firsts]
            for first in tried or [None]:
                async with hold(self._trials):
                    trial_complaints, more_notes = await review_on_data(use.field, use.reward, first, num_groups)
                complaints += [complaint for complaint in trial_complaints if complaint not in complaints]
                remarks.notes += [note for note in more_notes if note not in remarks.notes]
        return complaints, remarks

    async def tasks(self) -> list[str]:
        """Return the names of the procedural tasks; none where they cannot be listed. Raises TooBusy."""
        if self._tasks is None:
            try:
                self._tasks = await self._process.tasks()
            except DatasetError:
                return []
        return self._tasks

    async def preview(self, config: JobConfig, count: int) -> Preview:
        """Show up to `count` first prompts, with trials of the rewards; with the objective sft, examples. Raises
        JobRefused, TooBusy."""
        if unusable := review_numbers(config) + review_free_values(config):
            raise JobRefused(name_sources(config, unusable))
        spec = DatasetSpec.of_job(config) if config.prompted else DatasetSpec.of_examples(config)
        count = min(count, spec.num_items)
        try:
            if isinstance(config.data, list):
                places = [place_of(config, slot) for slot in range(count)]
                items = await read_places(config, places, self._process)
            else:
                items, _ = await self._process.read(spec, 0, count)
        except DatasetError as error:
            moved = error if isinstance(config.data, list) else move_error(error, config.rendering_field)
            raise JobRefused([(moved.field, moved.message)]) from error
        async with hold(self._trials):
            return await preview_prompts(config, items)

    async def _review_data(
        self, config: JobConfig, uses: Sequence[RewardUse]
    ) -> tuple[list[Complaint], dict[str, PromptItem], Remarks]:
        """Look at all data. Return the first thing that is wrong with each, the first prompt of each source by its
        field (none if one cannot be read), and remarks."""
        remarks, survey = Remarks(), Survey()
        try:
            if sections := [section for section in sections_of(config, uses) if isinstance(section.spec.data, RowData)]:
                survey = await self._process.survey(sections)
        except DatasetError as error:
            survey.complaints.append((error.field, error.message))
        remarks.rows, remarks.notes, complaints = survey.counts, survey.notes, survey.complaints
        for held_out in [] if complaints else config.held_out:
            try:
                await read_set(held_out, config.seed, self._process, num_prompts=1)
            except DatasetError as error:
                complaints.append((error.field, error.message))
        firsts: dict[str, PromptItem] = {}
        for number, (field, _) in enumerate(config.prompted):
            try:
                (firsts[field],), note = await self._process.read(DatasetSpec.of_job(config, number), 0, 1)
            except DatasetError as error:
                moved = move_error(error, field)
                return complaints or [(moved.field, moved.message)], {}, remarks
            remarks.notes += [note] if note else []
        return complaints, firsts, remarks

    async def _review_pattern(self, use: RewardUse) -> tuple[list[Complaint], int]:
        """Return what is wrong with the reward's pattern, and its number of groups; 0 without one."""
        option, options = PATTERN_OPTIONS.get(use.reward.name), use.reward.options
        if option is None or (option not in options and option != "pattern"):
            return [], 0
        pattern, problem, num_groups = options.get(option), "is not a string", 0
        if isinstance(pattern, str):
            async with hold(self._pattern):
                problem, num_groups = await self._patterns.check_pattern(pattern)
        if not problem:
            return [], num_groups
        message = f"reward {use.reward.name} needs a regular expression here; {show(pattern)} {problem}"
        return [(f"{use.field}.options.{option}", message)], 0


def review_numbers(config: JobConfig) -> list[Complaint]:
    complaints, rollout = [], config.rollout
    num_responses = rollout.num_reserved_prompts * rollout.num_samples_per_prompt
    if num_responses > MAX_RESPONSES_PER_ITERATION:
        name = "num" if rollout.max_prompts_per_iteration is None else "max"
        limit = f"at most {MAX_RESPONSES_PER_ITERATION} are allowed, lower it"
        complaints.append(
            (f"rollout.{name}_prompts_per_iteration", f"{num_responses} responses in one iteration; {limit}")
        )
    evaluation, num_prompts = config.evaluation, sum(held_out.num_prompts for held_out in config.held_out)
    if evaluation and (num_responses := num_prompts * evaluation.num_samples_per_prompt) > MAX_RESPONSES_PER_ITERATION:
        message = f"{num_responses} responses in one evaluation; at most {MAX_RESPONSES_PER_ITERATION} are allowed, "
        complaints.append(("evaluation.num_samples_per_prompt", message + "lower it or the prompts"))
    if config.lora is not None and not config.lora.target_modules:
        message = "names no layer, so that nothing would be trained; name some, or leave it out for all linear layers"
        complaints.append(("lora.target_modules", message))
    if DatasetSpec.of_job(config).num_items > MAX_PROMPTS_PER_JOB:
        message = f"at most {MAX_PROMPTS_PER_JOB} prompts in all iterations together; "
        complaints.append(("schedule.num_iterations", message + "lower it or the prompts per iteration"))
    return complaints


def review_free_values(config: JobConfig) -> list[Complaint]:
    """Check that the options, which are free-form, are at least JSON that every service can read; and the limits of
    prompts, which not all data can have."""
    complaints = []
    options: dict[str, Any] = {f"{use.field}.options": use.reward.options for use in reward_uses(config)}
    options |= {f"{field}.options": environment.options for field, environment in config.environments}
    training = [field for field, _ in config.sources]
    for field, data in [
        *config.sources,
        *((f"{held_out.field}.data", held_out.data) for held_out in config.held_out),
    ]:
        options[f"{field}.template_options"] = data.template_options
        for name, message in repeated_arguments(data, training[0]) if field != training[0] else ():
            complaints.append((f"{field}.{name}", message))
        if data.template_options and not config.environments and not getattr(data, "as_chat", True):
            complaints.append((f"{field}.template_options", "needs as_chat = true; plain prompts have no template"))
        if data.control_tokens == "text" and getattr(data, "as_chat", True):
            complaints.append((f"{field}.control_tokens", "needs as_chat = false; in messages they are always text"))
        if data.type == "reasoning_gym":
            options |= {f"{field}.options": data.options, f"{field}.levels": data.levels}
        elif field not in training and data.max_prompt_tokens is not None:
            complaints.append((f"{field}.max_prompt_tokens", "only training data has this; leave it out"))
        elif data.on_too_long == "refuse" and data.max_prompt_tokens is None:
            message = "refuse needs max_prompt_tokens, the length that it allows"
            complaints.append((f"{field}.on_too_long", message))
    for field, value in options.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, TypeError) as error:
            complaints.append((field, f"not plain JSON ({error}); use finite numbers and valid text"))
    return complaints


def reward_uses(config: JobConfig) -> list[RewardUse]:
    """Return each reward of the job by its field, with the data that it scores."""
    sets = config.evaluation.sets if config.evaluation is not None else []
    environments = config.environments_by_source
    shared = [
        (field, source)
        for field, source in config.prompted
        if source.reward is None and environments[source.name or ""] is None
    ]
    uses = []
    for field, source in config.prompted:
        if source.reward is not None:
            uses += uses_in(f"{field}.reward", source.reward, [(field, source)])
    for held_out, section in zip_longest(config.held_out, [held_out_set.reward for held_out_set in sets]):
        place = (f"{held_out.field}.data", held_out.data)
        if section is not None:
            uses += uses_in(f"{held_out.field}.reward", section, [place])
        elif held_out.environment is None:
            shared.append(place)
    return (uses_in("reward", config.reward, shared) if config.reward is not None else []) + uses


def sections_of(config: JobConfig, uses: Sequence[RewardUse]) -> list[Section]:
    """Return the data sets of the job with the rewards that score each, those for training first."""
    specs = {field: DatasetSpec.of_job(config, number) for number, (field, _) in enumerate(config.prompted)}
    if config.warm_start is not None:
        specs[EXAMPLES] = DatasetSpec.of_examples(config)
        if (held_out_rows := DatasetSpec.of_held_out_examples(config)) is not None:
            specs["warm_start.held_out.data"] = held_out_rows
    specs |= {
        f"{held_out.field}.data": DatasetSpec.of_evaluation(held_out, config.seed) for held_out in config.held_out
    }
    rewards: dict[str, dict[str, RewardConfig]] = {field: {} for field in specs}
    for use in uses:
        for field, _ in use.data:
            rewards[field][use.field] = use.reward
    return [Section(field=field, spec=spec, rewards=rewards[field]) for field, spec in specs.items()]


def name_sources(config: JobConfig, complaints: list[Complaint]) -> list[Complaint]:
    errors = [name_source(config, DatasetError(field, message)) for field, message in complaints]
    return [(error.field, error.message) for error in errors]


def uses_in(
    field: str, section: RewardConfig | list[RewardConfig], data: Sequence[tuple[str, DataConfig]]
) -> list[RewardUse]:
    if isinstance(section, RewardConfig):
        return [RewardUse(field, section, data)]
    return [RewardUse(f"{field}.{index}", reward, data) for index, reward in enumerate(section)]


def review_environments(config: JobConfig) -> list[Complaint]:
    installed = entry_points(group=ENVIRONMENTS).names
    unknown = [(field, section.name) for field, section in config.environments if section.name not in installed]
    return [
        (f"{field}.name", f"no environment {name!r} is installed; {suggest(close_names(name, installed), installed)}")
        for field, name in unknown
    ]


def review_reward(use: RewardUse, num_groups: int = 0) -> list[Complaint]:
    """Check the reward without its data's content. `num_groups`: capture groups in the reward's pattern."""
    name, installed = use.reward.name, entry_points(group=REWARDS).names
    if name in SERVICE_REWARDS:
        return [(f"{use.field}.{key}", message) for key, message in problems_of_service_reward(use.reward)]
    if name not in installed:
        known = {*installed, *SERVICE_REWARDS}
        message = f"no reward {name!r} is installed; {suggest(close_names(name, known), known)}"
        return [(f"{use.field}.name", message)]
    for field, data in use.data:
        if name == "reasoning_gym" and isinstance(data, RowData):
            message = f"scores only data of type reasoning_gym, {field} has rows; use exact, regex or math with rows"
            return [(f"{use.field}.name", message)]
        if compares_with_answer(use.reward, num_groups) and isinstance(data, RowData) and not data.answer_field:
            message = f"reward {name} compares with an answer; name the field that holds it, or take another reward"
            return [(f"{field}.answer_field", message)]
    return review_options(use)


def review_options(use: RewardUse) -> list[Complaint]:
    """Check the options of a reward that comes with Onbeat; the broker cannot know the options of others."""
    name = use.reward.name
    known = REWARD_OPTIONS.get(name, use.reward.options)
    remedy = f"it has: {', '.join(known)}" if known else "it has none"
    return [
        (f"{use.field}.options", f"reward {name} has no option {option[:MAX_SHOWN]!r}; {remedy}")
        for option in use.reward.options
        if option not in known
    ]


def review_held_out_judges(config: JobConfig) -> list[Complaint]:
    """Check that a judge that compares responses gets more than one to each held-out prompt."""
    if config.evaluation is None or config.evaluation.num_samples_per_prompt > 1:
        return []
    rewards = [reward for held_out in config.held_out for reward in held_out.rewards if reward.name == JUDGE_REWARD]
    modes = [mode for reward in rewards if (mode := reward.options.get("mode")) in (RANKING, PAIRS)]
    message = "compares the responses to a prompt, and a held-out prompt has one; use 2 or more, or give the held-out "
    message += "sets another reward (evaluation.sets.reward)"
    return [("evaluation.num_samples_per_prompt", f"mode = '{mode}' of reward judge {message}") for mode in modes[:1]]
