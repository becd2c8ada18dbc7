"""The rules between the sections of a job. Each problem names the field, what is wrong with it, and a remedy."""

from collections.abc import Iterator

from onbeat.config.data import KEYS_OF_SEVERAL
from onbeat.config.derived import DerivedConfig
from onbeat.config.rollout import MAX_PROMPTS, OVERLONG
from onbeat.config.scoring import problems_of_scoring
from onbeat.config.teacher import problems_of_teacher
from onbeat.config.warm_start import problems_of_warm_start
from onbeat.objectives.base.gdpo import problems_of_parts
from onbeat.objectives.base.objective import PART


def problems_of(job: DerivedConfig) -> Iterator[str]:
    """Yield all problems of a job."""
    yield from problems_of_scoring(job)
    if job.model.adapter is not None and job.lora is None:
        yield "model.adapter: adapters are trained with [lora]; add that section with the adapter's rank and alpha"
    longest, min_tokens = job.rollout.max_response_tokens, job.evaluation.min_tokens if job.evaluation else 0
    if min_tokens > longest:
        yield (
            f"evaluation.min_tokens: {min_tokens} are more than a response may have; lower it to "
            f"rollout.max_response_tokens, which is {longest}, or less"
        )
    yield from problems_of_sources(job)
    yield from problems_of_signal(job)
    yield from problems_of_long_responses(job)
    yield from problems_of_teacher(job)
    yield from problems_of_warm_start(job)
    objective, schedule, num_prompts = job.objective, job.schedule, job.rollout.num_prompts_per_iteration
    if job.rollout.num_samples_per_prompt < 2 and objective.needs_reward:
        yield (
            f"rollout.num_samples_per_prompt: the group advantage of {objective.type} needs at least 2 responses per "
            f"prompt, got {job.rollout.num_samples_per_prompt}; set it to 2 or more (8 is usual)"
        )
    if schedule.mode not in objective.modes:
        reason = "needs statistics of the whole iteration and " if objective.needs_whole_iteration else ""
        yield (
            f"schedule.mode: objective {objective.type} {reason}cannot run in {schedule.mode}; "
            f"use {' or '.join(objective.modes)}, or another objective"
        )
    advantages_from = getattr(objective, "advantages_from", "reward")
    num_rewards = min(map(len, job.rewards_by_source.values()))
    has_penalty = job.rollout.overlong_cache is not None
    yield from problems_of_parts(advantages_from, num_rewards, schedule.mode, job.rollout.truncated, has_penalty)
    if schedule.ends != sorted(set(schedule.ends)):
        yield (
            f"schedule.earlier_ends: {schedule.earlier_ends} must ascend and stay below the "
            f"{schedule.num_iterations} iterations of the job; leave it out"
        )
    if (num_updates := job.training.num_updates_per_iteration) > num_prompts:
        yield (
            f"training.num_updates_per_iteration: {num_updates} updates share {num_prompts} prompts, so that some "
            f"would have none; use at most {num_prompts}"
        )
    yield from problems_of_replacements(job)
    if objective.old_policy == "proximal" and (job.max_staleness == 0 or objective.importance is None):
        yield (
            "objective.old_policy: proximal needs schedule.mode = 'bounded' and objective.importance, which corrects "
            "for the policy that generated; elsewhere use behaviour"
        )


def problems_of_sources(job: DerivedConfig) -> Iterator[str]:
    """Yield what is wrong with keys that only several sources have."""
    for held_out in job.held_out:
        if held_out.data.chooses is not None:
            yield f"{held_out.field}.data.order: difficulty is for training; held-out prompts are the same each time"
        if held_out.data.is_one_of_several:
            keys = ", ".join(KEYS_OF_SEVERAL)
            yield f"{held_out.field}.data: {keys} are keys of several training sources; leave them out"
    for field, source in job.sources:
        if (tokens := source.max_response_tokens or 0) > job.rollout.max_response_tokens:
            yield (
                f"{field}.max_response_tokens: {tokens} are more than rollout.max_response_tokens, which is the most "
                f"of all sources; raise that to {tokens}, or lower this"
            )


def problems_of_replacements(job: DerivedConfig) -> Iterator[str]:
    """Yield what does not go together with dynamic sampling."""
    num_prompts, num_updates = job.rollout.num_prompts_per_iteration, job.training.num_updates_per_iteration
    most = job.rollout.max_prompts_per_iteration
    if most is not None and most <= num_prompts:
        example = min(3 * num_prompts, MAX_PROMPTS)
        remedy = f"use more, {example} say" if example > num_prompts else "lower rollout.num_prompts_per_iteration"
        yield (
            f"rollout.max_prompts_per_iteration: {most} leaves nothing to replace groups of the first {num_prompts} "
            f"prompts with; {remedy}, or leave it out"
        )
    if most is not None and job.schedule.mode == "bounded":
        yield (
            "rollout.max_prompts_per_iteration: rollouts of a bounded schedule would have to return to older weights "
            "for it; use schedule.mode = 'periodic', or leave it out"
        )
    if most is not None and num_updates > 1:
        yield (
            f"training.num_updates_per_iteration: {num_updates} updates cannot share an iteration whose groups are "
            "known at its end only; use 1, or leave out rollout.max_prompts_per_iteration"
        )


def problems_of_signal(job: DerivedConfig) -> Iterator[str]:
    """Yield what is wrong with `objective.signal`, or a source's own, for the rewards that it compares."""
    kl = job.objective.kl
    for field, source in job.sources:
        if source.signal not in (None, "reward") and kl.coef > 0 and kl.placement == "reward":
            yield (
                f"{field}.signal: a KL term in the reward gives advantages to groups without signal; use "
                "objective.kl.placement = 'loss', or signal = 'reward'"
            )
        key = "objective.signal" if source.signal is None else f"{field}.signal"
        signal = source.signal or job.objective.signal
        if signal == "solved" and source.solved_at is None and "solved_at" not in job.model_fields_set:
            yield (
                f"{key}: solved compares rewards with solved_at, which is not given; set solved_at to the reward from "
                "which a response is solved"
            )
        if isinstance(signal, str) and signal.startswith(PART):
            where = f" of source {source.name}" if source.name else ""
            parts = [reward.part for reward in job.rewards_by_source[source.name or ""] if reward.part is not None]
            if not parts and source.environment is not None:
                yield (
                    f"{key}: {signal} is a part of several rewards, and the environment{where} gives one; set "
                    f"{field}.signal to solved or reward"
                )
            elif not parts:
                yield (
                    f"{key}: {signal} is a part of several rewards, and the job has none under [[reward]]{where}; use "
                    "solved or reward, or write the rewards under [[reward]]"
                )
            elif signal.removeprefix(PART) not in parts:
                yield (
                    f"{key}: no reward{where} is called {signal.removeprefix(PART)}; use part:NAME with one of "
                    f"{', '.join(parts)}"
                )


def problems_of_long_responses(job: DerivedConfig) -> Iterator[str]:
    """Yield what is wrong with the job's rules for responses that were cut, or nearly were."""
    rollout, objective = job.rollout, job.objective
    rewards = [reward for rewards in job.rewards_by_source.values() for reward in rewards]
    negative = [reward.part for reward in rewards if reward.weight < 0]
    if rollout.truncated == "zero" and negative and rollout.truncated_reward >= 0:
        yield (
            "rollout.truncated: zero pays a response that was cut more than a wrong one where rewards are negative, "
            f"and the weight of reward {negative[0]} is; set rollout.truncated_reward to the worst reward there is, "
            "make that weight positive, or use truncated = 'score'"
        )
    if rollout.truncated != "zero" and rollout.truncated_reward != 0:
        yield (
            f"rollout.truncated_reward: {rollout.truncated_reward:g} has no effect with truncated = "
            f"'{rollout.truncated}'; use truncated = 'zero', or leave it out"
        )
    if rollout.truncated == "mask" and objective.needs_whole_group:
        reason = "a KL term in the reward" if objective.has_advantages else f"objective {objective.type}"
        yield (
            f"rollout.truncated: mask takes responses out of their group, which {reason} needs as a whole; use zero or "
            "score"
        )
    cache = rollout.overlong_cache
    if cache is not None and None not in job.environments_by_source.values():
        yield (
            "rollout.overlong_cache: an episode has the limit of tokens in each turn, so there is no one length to "
            "punish; leave it out, and let the environment's reward punish long episodes"
        )
    limits = [(field, source.max_response_tokens) for field, source in job.sources]
    for field, limit in [("rollout", rollout.max_response_tokens), *limits]:
        if cache is not None and limit is not None and cache > limit:
            yield (
                f"rollout.overlong_cache: {cache} tokens are more than a response may have; lower it to "
                f"{field}.max_response_tokens, which is {limit}, or less"
            )
    if cache is None and rollout.overlong_penalty != 1:
        yield (
            f"rollout.overlong_penalty: {rollout.overlong_penalty:g} has no effect without overlong_cache; set "
            "overlong_cache, or leave it out"
        )
    if cache is not None and OVERLONG in [reward.part for reward in rewards]:
        yield (
            f"reward.part: {OVERLONG} is the part of the penalty of rollout.overlong_cache; give the reward another "
            "part, or leave overlong_cache out"
        )
