"""The same prompts before and after training: the recorded answers of the first and the last evaluation, side by side.

An evaluation asks the same prompts each time and keeps a few answers. A job without a held-out set has the responses
of its first and its last iteration; there the prompts are mostly different ones.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from onbeat.client import AsyncClient
from onbeat.config import JobConfig
from onbeat.contracts.errors import ApiError
from onbeat.contracts.records import JobRecord, Sample
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.states import EvaluationState, IterationState
from onbeat.terminal.answers import above, short_text_of, without_shared_lines
from onbeat.terminal.formatting import PIPE_WIDTH, clip, number, wrapped
from onbeat.terminal.live import can_redraw

NUM_RESPONSES = 200  # responses of an iteration that are looked through
GONE = 410  # status of a request for groups that are no longer kept


@dataclass(frozen=True)
class Answer:
    """A response, and whether its reward solves the prompt (`solved_at` of the job or of the held-out set)."""

    sample: Sample
    is_right: bool

    @property
    def judgement(self) -> str:
        cut = ", cut at the limit" if self.sample.finish_reason == "length" else ""
        return f"{'✓ right' if self.is_right else '✗ wrong'}, reward {number(self.sample.reward, 'g')}{cut}"


@dataclass(frozen=True)
class Pair:
    """A prompt with an answer before and one after training; None: that side has no answer to this prompt."""

    prompt: str
    before: Answer | None
    after: Answer | None

    @property
    def change(self) -> tuple[bool | None, bool | None]:
        """Tell whether the answer before is right, and the one after."""
        before, after = (answer.is_right if answer is not None else None for answer in (self.before, self.after))
        return before, after


@dataclass(frozen=True)
class BeforeAfter:
    """Recorded answers before and after. Both numbers are iterations; those of evaluations lie before them."""

    before: int
    after: int
    is_held_out: bool
    pairs: list[Pair] = field(default_factory=list)

    @property
    def is_same_prompts(self) -> bool:
        return bool(self.pairs) and all(pair.before and pair.after for pair in self.pairs)

    def telling(self, num_pairs: int) -> list[Pair]:
        """Return a few pairs that differ in what became of the answer: mended, still wrong, spoiled, right all along.

        The first pair of each kind comes first, then the second one of each.
        """
        kinds = [(False, True), (False, False), (True, False), (True, True)]
        by_kind = [[pair for pair in self.pairs if pair.change == kind] for kind in kinds]
        others = [pair for pair in self.pairs if pair.change not in kinds]
        turns = [pair for turn in zip_longest(*by_kind) for pair in turn if pair is not None]
        return [*turns, *others][:num_pairs]

    def sentence(self) -> str:
        """Return what is compared, and how many of the recorded answers are right.

        >>> BeforeAfter(0, 25, is_held_out=True).sentence()
        'No answers with a reward were recorded.'
        """
        if not self.pairs:
            return "No answers with a reward were recorded."
        right_before, right_after = (sum(pair.change[side] is True for pair in self.pairs) for side in (0, 1))
        verb = "is" if right_before == 1 else "are"
        right = f"{right_before} of {len(self.pairs)} answers {verb} right before, {right_after} after."
        iterations = f"Responses of iteration {self.before} and of iteration {self.after}"
        if not self.is_held_out and not self.is_same_prompts:
            remark = "one that is right and one that is wrong, where there are both"
            return f"{iterations}, {remark}. The prompts differ, as the job has no held-out set."
        if not self.is_held_out:
            return f"{iterations} to the same prompts: {right}"
        if not self.is_same_prompts:
            return f"Held-out prompts, answered once so far: {right_before} of {len(self.pairs)} answers {verb} right."
        return f"The same held-out prompts before and after {self.after - self.before} iterations: {right}"

    def as_json(self) -> dict[str, Any]:
        def side(answer: Answer | None) -> dict[str, Any] | None:
            if answer is None:
                return None
            return {"is_right": answer.is_right, **answer.sample.model_dump(mode="json", exclude={"prompt"})}

        pairs = [{"prompt": pair.prompt, "before": side(pair.before), "after": side(pair.after)} for pair in self.pairs]
        return {"before": self.before, "after": self.after, "is_held_out": self.is_held_out, "pairs": pairs}


async def read_before_after(client: AsyncClient, job: JobRecord) -> BeforeAfter | None:
    """Read the answers of a job before and after; None of a job that has none. Raises what the client raises."""
    evaluations = await client.jobs.evaluations(job.id)
    done = [record.evaluation for record in evaluations if record.state is EvaluationState.DONE]
    for first, last in [(done[0], done[-1])] if done else []:
        before = await client.jobs.evaluation_samples(job.id, first)
        after = await client.jobs.evaluation_samples(job.id, last) if last != first else []
        if before:
            return BeforeAfter(first, last, True, pair_held_out(job, before, after))
    iterations = await client.jobs.iterations(job.id)
    committed = [record.iteration for record in iterations if record.state is IterationState.COMMITTED]
    if len(committed) < 2:
        return None
    before, after = [await responses(client, job.id, number) for number in (committed[0], committed[-1])]
    pairs = pair_training(job, before, after)
    return BeforeAfter(committed[0], committed[-1], False, pairs) if pairs else None


async def responses(client: AsyncClient, job_id: str, iteration: int) -> list[Sample]:
    """Read responses of an iteration; none where they are no longer kept."""
    try:
        return await client.jobs.samples(job_id, iteration=iteration, limit=NUM_RESPONSES)
    except ApiError as error:
        if error.status != GONE:
            raise
        return []


def pair_held_out(job: JobRecord, before: Iterable[Sample], after: Iterable[Sample]) -> list[Pair]:
    """Return the answers to the same prompt and of the same place in the group, as pairs.

    A group that failed in one of the evaluations has no pair there, unless there is one evaluation only; neither has a
    response without a reward, which is neither right nor wrong.
    """
    before, after = rewarded(before), rewarded(after)
    newest = {key_of(sample): sample for sample in after}
    solved_at = solved_at_of_prompts(job)

    def judged(sample: Sample | None) -> Answer | None:
        return judge(sample, solved_at(key_of(sample)[0])) if sample is not None else None

    pairs = [Pair(sample.prompt, judged(sample), judged(newest.get(key_of(sample)))) for sample in before]
    return [pair for pair in pairs if pair.after or not newest]


def rewarded(samples: Iterable[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.reward is not None]


def judge(sample: Sample, solved_at: float) -> Answer:
    return Answer(sample, sample.reward is not None and sample.reward >= solved_at)


def key_of(sample: Sample) -> tuple[int, int]:
    """Return the prompt's place among those of an evaluation, and the response's place in its group."""
    return int(sample.group_id.rpartition("-")[2]), sample.index


def solved_at_of_prompts(job: JobRecord) -> Callable[[int], float]:
    """Return a function of a prompt's place that gives the reward from which a response to it is right."""
    default = float(job.config.get("solved_at", 1.0))
    try:
        sets = JobConfig.model_validate(job.config, context=IS_ACCEPTED).held_out
    except ValidationError:  # the job is of another version of Onbeat
        sets = []
    ends = list(accumulate(held_out.num_prompts for held_out in sets))

    def solved_at(place: int) -> float:
        return next((held_out.solved_at for held_out, end in zip(sets, ends, strict=True) if place < end), default)

    return solved_at


def pair_training(job: JobRecord, before: Sequence[Sample], after: Sequence[Sample]) -> list[Pair]:
    """Return responses of two iterations: pairs of equal prompts where there are any, else a few of each side.

    Of different prompts, a right and a wrong response of each side are shown. Responses without a reward are left out.
    """
    default = float(job.config.get("solved_at", 1.0))
    try:
        solved_at = JobConfig.model_validate(job.config, context=IS_ACCEPTED).solved_at_by_source
    except ValidationError:  # the job is of another version of Onbeat
        solved_at = {}

    def judged(sample: Sample) -> Answer:
        return judge(sample, solved_at.get(sample.source, default))

    before, after = rewarded(before), rewarded(after)
    first, last = ({sample.prompt: sample for sample in reversed(side)} for side in (before, after))
    if same := [prompt for prompt in first if prompt in last]:
        return [Pair(prompt, judged(first[prompt]), judged(last[prompt])) for prompt in reversed(same)]
    chosen: list[Pair] = []
    for side, is_before in ((before, True), (after, False)):
        answers = [judged(sample) for sample in side]
        for is_right in (True, False):
            shown = next((answer for answer in answers if answer.is_right is is_right), None)
            if shown is not None:
                sides = (shown, None) if is_before else (None, shown)
                chosen.append(Pair(shown.sample.prompt, *sides))
    return chosen


# ---- in a terminal -----------------------------------------------------------------------------------------------


def print_before_after(console: Console, before_after: BeforeAfter, num_pairs: int) -> None:
    """Print a few pairs below what they are: a table on a terminal, else a line for each answer."""
    pairs = before_after.telling(num_pairs)
    if not can_redraw(console):
        lines = [before_after.sentence()]
        for pair in pairs:
            lines.append(f"prompt: {one_line(clip(pair.prompt))}")
            for name, answer in (("before", pair.before), ("after", pair.after)):
                if answer is not None:
                    lines.append(f"{name}: {answer.judgement}: {one_line(short_text_of(answer.sample))}")
        for line in lines:
            for part in wrapped(line, PIPE_WIDTH):
                console.out(part)
        return
    columns = [Column(name, overflow="fold", ratio=1) for name in ("prompt", "before", "after")]
    shared, prompts = without_shared_lines([pair.prompt for pair in pairs])
    title = above(before_after.sentence(), shared)
    table = Table(*columns, title=Text(title, "table.title"), title_justify="left", expand=True, show_lines=True)
    for pair, prompt in zip(pairs, prompts, strict=True):
        table.add_row(Text(clip(prompt)), cell_of(pair.before), cell_of(pair.after))
    console.print(table)


def cell_of(answer: Answer | None) -> Text:
    if answer is None:
        return Text("")
    style = "green" if answer.is_right else "red"
    return Text.assemble((f"{answer.judgement}\n", style), short_text_of(answer.sample))


def one_line(text: str) -> str:
    return text.replace("\n", "\\n")
