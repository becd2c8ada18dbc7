"""Findings about learning, from a job's recorded metrics: does it learn, and which key should change if it does not.

The doctor, the dashboard and the summary of `onbeat run` show them. They describe the last iterations of a job. A job
with fewer than MIN_ITERATIONS iterations has a note on truncated responses at most: anything may look odd at the start.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.contracts.records import EvaluationRecord, Finding, IterationRecord
from onbeat.contracts.response_stats import part_name, parts_of
from onbeat.contracts.states import EvaluationState, IterationState
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, read_evaluations, read_iterations
from onbeat.streams.signal import Signal
from services.broker.doctor.course import (
    MOSTLY,
    NUM_RECENT,
    STEADY,
    Course,
    best_of,
    gaps_of,
    is_below,
    rewards_of,
    rises,
    varies,
)

MIN_ITERATIONS = 5
MIN_TO_LOOK = 2  # iterations of a young job that are looked at
TRUNCATED = 0.5  # share of truncated responses above which there is a finding
COLLAPSED, NO_ENTROPY = 0.05, 0.05  # an entropy below both is too low: share of the first one; nats per token
MISMATCH = {"float32": 0.03, "bfloat16": 0.3}  # nats per token; usual values are 1e-6, and 0.01 to 0.13
NUM_SAMPLES = "rollout.num_samples_per_prompt"
LEARNED = 0.5  # standard deviations among the first responses, by which a part must have risen to be learned


async def explain_learning(ledger: Ledger, fields: Fields) -> list[Finding]:
    """Explain how a job learns, problems first. A job that is too young, or of another version of Onbeat, has none."""
    try:
        config = JobConfig.of_job(fields)
    except ValidationError:
        return []
    start, done = config.first_generated, int(fields["next_iteration"])
    job_id = fields["id"]
    if done - start < MIN_ITERATIONS:
        return look_at_young(job_id, config, await read_iterations(ledger, job_id, start - 1, MIN_ITERATIONS))

    async def committed(begin: int) -> list[IterationRecord]:
        records = await read_iterations(ledger, job_id, max(start, begin) - 1, NUM_RECENT)
        return [record for record in records if record.state is IterationState.COMMITTED]

    evaluations: list[EvaluationRecord] = []
    if config.evaluation is not None:
        since = int(fields.get("next_evaluation", "0")) - (NUM_RECENT + 1) * config.evaluation.every_iterations
        records = await read_evaluations(ledger, job_id, since)
        evaluations = [record for record in records if record.state is EvaluationState.DONE][-NUM_RECENT:]
    best = best_of(evaluations)
    course = Course(
        job_id=job_id,
        config=config,
        num_committed=done - start,
        first=await committed(start),
        recent=await committed(done - NUM_RECENT),
        evaluations=evaluations,
        around_best=await committed(best.evaluation) if best is not None else [],
    )
    return findings_of(course)


def findings_of(course: Course) -> list[Finding]:
    """Return the findings, problems first; at least one, on how the reward went, where nothing is wrong."""
    if len(course.recent) < MIN_ITERATIONS:
        return []
    findings = [finding for look in LOOKS if (finding := look(course)) is not None]
    if not any(finding.is_problem for finding in findings):
        findings.insert(0, sum_up(course))
    return sorted(findings, key=lambda finding: not finding.is_problem)


def look_at_young(job_id: str, config: JobConfig, records: Sequence[IterationRecord]) -> list[Finding]:
    """Look at the truncated responses of a young job, from its second iteration on. It may learn to stop: a note."""
    known = [record.metrics for record in records if record.state is IterationState.COMMITTED]
    shares = [metrics["rollout/truncated_frac"] for metrics in known if "rollout/truncated_frac" in metrics]
    if len(shares) < MIN_TO_LOOK or fmean(shares) <= TRUNCATED:
        return []
    sentence = f"{fmean(shares):.0%} of the responses of {job_id} were truncated so far: if that stays, raise "
    sentence += f"rollout.max_response_tokens above {config.rollout.max_response_tokens}, or ask for short answers in "
    sentence += "data.system_prompt"
    return [Finding(sentence=sentence, job_id=job_id, who=job_id, key="rollout.max_response_tokens")]


# ---- one thing each ----------------------------------------------------------------------------------------------


def sum_up(c: Course) -> Finding:
    count = min(5, c.num_committed // 2)  # no iteration is in both means, as in the verdict
    before, now = fmean(rewards_of(c.first)[:count] or [0.0]), fmean(rewards_of(c.recent)[-count:] or [0.0])
    quantity = "a mean reward"
    if c.config.teacher is not None:
        quantity = "a mean gap to its teacher (train/teacher_gap, nats per token)"
        before, now = (fmean(gaps_of(records) or [0.0]) for records in (c.first[:count], c.recent[-count:]))
    sentence = f"{c.job_id} has {quantity} of {now:.3f}, and had {before:.3f} at first, "
    sentence += f"{c.num_committed} iterations ago"
    if (truncated := c.mean("rollout/truncated_frac")) is not None:
        sentence += f"; {c.lately} {truncated:.0%} of the responses were truncated"
        sentence += f", and {1 - c.equal_share:.0%} of the groups had something to teach"
    return c.find(sentence, "", is_problem=False)


def look_at_truncation(c: Course) -> Finding | None:
    """Look for responses that are cut: a problem, unless the reward is good or rises all the same."""
    truncated, limit = c.mean("rollout/truncated_frac") or 0.0, c.config.rollout.max_response_tokens
    if truncated <= TRUNCATED:
        return None
    sentence = f"{truncated:.0%} of the responses of {c.job_id} were truncated {c.lately}: raise "
    sentence += f"rollout.max_response_tokens above {limit}, or ask for short answers in data.system_prompt"
    return c.find(sentence, "rollout.max_response_tokens", is_problem=not (c.has_risen or c.is_good))


def look_at_reward_of_cut(c: Course) -> Finding | None:
    """Look for cut responses that get more than the others do, which teaches the policy to go on for ever."""
    rollout, mean = c.config.rollout, fmean(rewards_of(c.recent) or [0.0])
    reward = rollout.truncated_reward - (rollout.overlong_penalty if rollout.overlong_cache else 0.0)
    if rollout.truncated != "zero" or mean >= reward or not c.mean("rollout/truncated_frac"):
        return None
    sentence = f"being cut pays more than answering in {c.job_id}: {c.lately} the mean reward was {mean:.3g}, and a "
    sentence += f"response that is cut gets {reward:g}: set rollout.truncated_reward to the worst "
    return c.find(
        f"{sentence}reward there is, or rollout.truncated to score", "rollout.truncated_reward", is_problem=True
    )


def look_at_signal(c: Course) -> Finding | None:
    """Look at groups without signal, which have no gradient without a teacher: is the task too hard, too easy, or
    solved by now?"""
    share, more = c.equal_share, f"raise {NUM_SAMPLES} above {c.config.rollout.num_samples_per_prompt}"
    if c.config.teacher is not None or share < MOSTLY or (share < 1 and c.has_risen):
        return None
    signal = Signal.of(c.config)
    if share < 1:
        sentence = f"{share:.0%} of the groups of {c.job_id} had {signal.words} {c.lately} and taught nothing: {more}, "
        return c.find(f"{sentence}or take prompts of another difficulty (data)", NUM_SAMPLES, is_problem=False)
    if c.mean("rollout/solved_all_frac") == 1:
        return explain_solved(c)
    if signal.rule != "reward" or signal.rules:
        return explain_no_signal(c, signal)
    mean = fmean(rewards_of(c.recent) or [0.0])
    sentence = f"{c.job_id} learns nothing: {c.lately} the responses of each group had equal rewards, "
    sentence += f"{mean:g} on average"
    if c.mean("rollout/solved_none_frac") in (None, 1):
        sentence += f", and none reached {c.wanted}: read samples, then let the reward pay for parts of an answer "
        sentence += f"(reward), {more}, or take easier prompts (data)"
        return c.find(sentence, "reward", is_problem=not c.has_risen)
    return c.find(f"{sentence}: {more}, or raise rollout.temperature", NUM_SAMPLES, is_problem=not c.has_risen)


def explain_no_signal(c: Course, signal: Signal) -> Finding:
    """Explain a job whose responses never differ in what its `objective.signal` compares."""
    main, sentence = c.main_part, f"{c.job_id} learns nothing: {c.lately} "
    is_solved_everywhere = signal.rule == "solved" and not signal.rules
    if is_solved_everywhere and main and c.mean("rollout/solved_none_frac") == 1 and varies(c.recent, main):
        sentence += f"no response reached {c.wanted}, although part {main} of the reward varies; "
        sentence += f'another part may keep every sum below: set objective.signal = "part:{main}", or lower solved_at'
        return c.find(sentence, "objective.signal", is_problem=True)
    sentence += f"its groups had {signal.words}: raise {NUM_SAMPLES} above {c.config.rollout.num_samples_per_prompt}, "
    return c.find(f"{sentence}or take easier prompts (data)", "data", is_problem=True)


def look_at_unsolved(c: Course) -> Finding | None:
    """Look for groups that teach a lesser part alone: no response is solved, and the main part is equal in all of them.
    A normalised advantage makes a small part as large as an outcome. A problem once the main part stands still."""
    main, num_groups = c.main_part, c.total("rollout/mixed_unsolved_groups")
    rule, num_by_reward = c.config.objective.signal, num_groups_by_reward(c)
    if main is None or rule != "reward" or num_groups < MOSTLY * num_by_reward:
        return None
    parts = [part_name(reward.part or "") for reward in c.config.rewards]
    differing = [name for name in parts if c.total(f"rollout/mixed_unsolved_{name}")]
    if main in differing or not differing:
        return None
    noun = "part" if len(differing) == 1 else "parts"
    sentence = (
        f"in {num_groups:.0f} of {num_by_reward} groups of {c.job_id} no answer is solved {c.lately}; they differ "
    )
    sentence += f"only in {noun} {', '.join(differing)}, which is all that they teach: set objective.signal = "
    sentence += f'"part:{main}", so that only groups whose responses differ in {main} teach'
    return c.find(sentence, "objective.signal", is_problem=not varies(c.recent, main))


def num_groups_by_reward(c: Course) -> int:
    """Count the groups of the last iterations that teach by their rewards: not those of a source with a signal of its
    own."""
    sources = [source for _, source in c.config.sources]
    if all(source.signal is None for source in sources):
        return c.num_groups
    return round(sum(c.total(f"source/{s.name}/groups") for s in sources if s.signal in (None, "reward")))


def look_at_lesser_parts(c: Course) -> Finding | None:
    """Look for lesser parts that were learned in place of the main one. Then groups do not differ any more, the reward
    has risen, and nothing else shows what has been displaced."""
    main, (first, *_), (_, now) = c.main_part, c.first, c.ends
    is_unsolved = (c.mean("rollout/solved_none_frac", now) or 0.0) >= MOSTLY
    if main is None or c.config.objective.signal != "reward" or not is_unsolved or look_at_unsolved(c) is not None:
        return None

    def went(part: str) -> tuple[float, float]:
        return first.metrics.get(f"reward/{part}_mean", 0.0), c.mean(f"reward/{part}_mean", now) or 0.0

    names = [part_name(reward.part or "") for reward in c.config.rewards if reward.weight > 0]
    spreads = {name: first.metrics.get(f"reward/{name}_std", 0.0) for name in names}
    risen = [name for name in names if went(name)[1] - went(name)[0] > LEARNED * max(spreads[name], STEADY)]
    if not risen or went(main)[1] > went(main)[0]:
        return None
    shown = [f"reward/{name}_mean went from {went(name)[0]:.3f} to {went(name)[1]:.3f}" for name in (*risen, main)]
    noun = "part" if len(risen) == 1 else "parts"
    sentence = f"{c.job_id} learns {noun} {', '.join(risen)} of the reward in place of {main}, the largest one: "
    sentence += f'{", ".join(shown)}; begin again with objective.signal = "part:{main}", so that only groups whose '
    return c.find(f"{sentence}responses differ in {main} teach", "objective.signal", is_problem=True)


def look_at_sources(c: Course) -> Finding | None:
    """Look for sources, of several, that have nothing more to teach."""
    if c.equal_share == 1:
        return None
    idle, signal = [], Signal.of(c.config)
    for _, source in c.config.sources:
        groups, uniform = (
            sum(record.metrics.get(f"source/{source.name}/{name}", 0.0) for record in c.recent)
            for name in ("groups", "uniform_groups")
        )
        if groups >= MIN_ITERATIONS and uniform == groups:
            solved = c.mean(f"source/{source.name}/solved_frac") or 0.0
            idle.append(f"{source.name} ({signal.words_of(source.name or '')}, solved {solved:.0%})")
    if not idle:
        return None
    sources = "source" if len(idle) == 1 else "sources"
    sentence = f"{c.lately} of {c.job_id}, all groups of {sources} {', '.join(idle)} taught nothing: lower the weight, "
    sentence += "or take prompts of another difficulty (data)"
    return c.find(sentence, "data", is_problem=False)


def look_at_missing_groups(c: Course) -> Finding | None:
    """Look for dynamic sampling that nearly always runs out of prompts."""
    num_short = sum(record.num_not_replaced > 0 for record in c.recent)
    if num_short < MOSTLY * len(c.recent) or c.equal_share == 1:
        return None
    rollout, missing = c.config.rollout, fmean(record.num_not_replaced for record in c.recent)
    used = "prompts of a source" if len(c.config.sources) > 1 else f"{rollout.max_prompts_per_iteration} prompts"
    sentence = f"{c.lately} of {c.job_id}, {num_short} used all {used}, and "
    sentence += f"{missing:.2g} of {rollout.num_prompts_per_iteration} groups with signal were missing on "
    sentence += "average: raise rollout.max_prompts_per_iteration, or take prompts of another difficulty (data)"
    return c.find(sentence, "rollout.max_prompts_per_iteration", is_problem=False)


def explain_solved(c: Course) -> Finding:
    sentence = f"{c.lately} every response reached {c.wanted}"
    if c.has_risen:
        sentence = f"{c.job_id} has solved its task, {sentence}: it may end (schedule.num_iterations), or needs harder "
        return c.find(f"{sentence}prompts (data)", "schedule.num_iterations", is_problem=False)
    sentence = f"{c.job_id} learns nothing, as its task is too easy: {sentence}; take harder prompts (data)"
    return c.find(sentence, "data", is_problem=True)


def look_at_held_out(c: Course) -> Finding | None:
    """Look for a held-out reward that falls, twice in a row, while that of training rises."""
    best, newest = best_of(c.evaluations), c.evaluations[-2:]
    num_prompts = c.config.held_out[0].num_prompts if c.config.held_out else 1  # the scores are those of the first set
    if best is None or best in newest or not all(is_below(score, best, num_prompts) for score in newest):
        return None
    if not rises(rewards_of(c.around_best), rewards_of(c.recent)):
        return None
    was, now = (f"{score.reward_mean:.3f} after {score.evaluation}" for score in (best, newest[-1]))
    sentence = f"the held-out reward of {c.job_id} fell from {was} iterations to {now}, while its training reward "
    sentence += "rose: it memorizes its prompts, or exploits a weakness of the reward. End it at that best point "
    sentence += f"(schedule.num_iterations = {best.evaluation}), raise objective.kl.coef, or take more prompts (data)"
    return c.find(sentence, "schedule.num_iterations", is_problem=True)


def look_at_entropy(c: Course) -> Finding | None:
    """Look for a policy that has stopped exploring before it has solved its task."""
    before, now = c.mean("train/entropy", c.first), c.mean("train/entropy")
    if before is None or now is None or now > min(COLLAPSED * before, NO_ENTROPY):
        return None
    half = len(c.recent) // 2
    is_solved = (c.mean("rollout/solved_all_frac") or 0.0) >= 0.5
    if is_solved or rises(rewards_of(c.recent[:half]), rewards_of(c.recent[half:])):
        return None
    sentence = f"the entropy of {c.job_id} has collapsed, from {before:.3g} to {now:.2g} nats per token, and its "
    sentence += f"reward does not rise: lower optimizer.learning_rate below {c.config.optimizer.learning_rate:g}, or "
    return c.find(f"{sentence}raise objective.kl.coef", "optimizer.learning_rate", is_problem=True)


def look_at_mismatch(c: Course) -> Finding | None:
    known = [record.mismatch_mean for record in c.recent if record.mismatch_mean is not None]
    dtype = c.config.model.dtype
    bound = MISMATCH.get(dtype, max(MISMATCH.values()))
    if not known or fmean(known) <= bound:
        return None
    sentence = f"engine and trainer of {c.job_id} differ by {fmean(known):.2g} nats per token {c.lately}, more than "
    sentence += f"{bound:g}: "
    if dtype == "bfloat16":
        return c.find(f'{sentence}set model.dtype = "float32", or objective.importance', "model.dtype", is_problem=True)
    return c.find(f"{sentence}set objective.importance, or try another engine", "objective.importance", is_problem=True)


def look_at_skips(c: Course) -> Finding | None:
    """Look for GAC that skips nearly all steps. A skipped step changes no weights, so the next gradient may be nearly
    the same and be skipped, too."""
    share = (c.mean("train/gac_skip") or 0.0) / c.config.training.num_updates_per_iteration
    if share < MOSTLY:
        return None
    sentence = f"GAC skipped {share:.0%} of the steps of {c.job_id} {c.lately}, as each gradient was nearly the one "
    sentence += f"before: raise gac.c_high above {c.config.gac.c_high:g}, or set gac.mode to metric"
    return c.find(sentence, "gac.c_high", is_problem=True)


def look_at_parts(c: Course) -> Finding | None:
    """Look for parts that never vary. The main one is the task itself: `look_at_unsolved` looks at that."""
    names = [name for name in parts_of(c.recent[-1].metrics) if name != c.main_part]
    steady = [name for name in names if not varies(c.recent, name)]
    if not steady:
        return None
    parts, teaches = ("part", "it teaches") if len(steady) == 1 else ("parts", "they teach")
    sentence = (
        f"{c.lately} of {c.job_id}, {parts} {', '.join(steady)} of the reward gave every response the same value, "
    )
    sentence += f"so {teaches} nothing: read samples, then correct or leave out (reward)"
    return c.find(sentence, "reward", is_problem=False)


def look_at_opinions(c: Course) -> Finding | None:
    """Look for parts of the reward that judge only some responses to a prompt: the others are compared without them."""
    counts: Counter[str] = Counter()
    for record in c.recent:
        matches = ((re.fullmatch(r"reward/(.+)_mixed_groups", name), value) for name, value in record.metrics.items())
        counts.update({match[1]: round(value) for match, value in matches if match})
    if not counts:
        return None
    named = ", ".join(f"{part} (in {number} groups)" for part, number in sorted(counts.items()))
    sentence = f"{c.lately} of {c.job_id}, some responses to a prompt were compared with others without an opinion of "
    sentence += f"{named}: let that part of the reward judge all responses to a prompt, or none (reward)"
    return c.find(sentence, "reward", is_problem=False)


LOOKS: tuple[Callable[[Course], Finding | None], ...] = (
    look_at_lesser_parts,
    look_at_truncation,
    look_at_reward_of_cut,
    look_at_signal,
    look_at_unsolved,
    look_at_sources,
    look_at_missing_groups,
    look_at_held_out,
    look_at_entropy,
    look_at_mismatch,
    look_at_skips,
    look_at_parts,
    look_at_opinions,
)
