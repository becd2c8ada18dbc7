"""The reward of each prompt: from the rewards that score responses, or from an environment that plays episodes.

A source, or one of several held-out sets, may have its own `reward` or `environment`; either takes the place of what
the job has, so that a job may train on episodes and on responses of one turn together.
"""

from collections.abc import Iterator

from onbeat.config.data import SourceData
from onbeat.config.evaluation import EvaluationSet
from onbeat.config.rollout import EnvironmentConfig
from onbeat.config.sections import JobSections
from onbeat.contracts.rewards import RewardConfig, rewards_in

Prompts = SourceData | EvaluationSet


def rewards_of(job: JobSections, prompts: Prompts) -> list[RewardConfig]:
    """Return the rewards of the responses to these prompts; none where an environment plays them."""
    if prompts.reward is not None:
        return rewards_in(prompts.reward)
    if prompts.environment is not None or job.reward is None:
        return []
    return rewards_in(job.reward)


def environment_of(job: JobSections, prompts: Prompts) -> EnvironmentConfig | None:
    """Return the environment that plays these prompts; None where they are answered in one turn."""
    return prompts.environment or (job.environment if prompts.reward is None else None)


def unscored_in(job: JobSections) -> list[str]:
    """Return the fields of the sources and held-out sets whose responses get no reward."""
    has_default = job.reward is not None or job.environment is not None
    unscored = [field for field, prompts in prompts_of(job) if not (has_default or has_own(prompts))]
    return unscored + (["evaluation"] if has_one_set(job) and not has_default else [])


def has_own(prompts: Prompts) -> bool:
    return prompts.reward is not None or prompts.environment is not None


def has_one_set(job: JobSections) -> bool:
    return job.evaluation is not None and job.evaluation.data is not None


def environments_of(job: JobSections) -> list[tuple[str, EnvironmentConfig]]:
    """Return the environments of the job by their fields, such as `environment` and `data.1.environment`."""
    named = [("environment", job.environment)]
    named += [(f"{field}.environment", prompts.environment) for field, prompts in prompts_of(job)]
    return [(field, environment) for field, environment in named if environment is not None]


def prompts_of(job: JobSections) -> list[tuple[str, Prompts]]:
    """Return the sources, and the held-out sets if there are several, by their fields."""
    sets = job.evaluation.sets if job.evaluation is not None else []
    return [*job.sources, *((f"evaluation.sets.{place}", held_out) for place, held_out in enumerate(sets))]


def problems_of_scoring(job: JobSections) -> Iterator[str]:
    """Yield what is wrong with rewards and environments: the field, what is wrong with it, and a remedy."""
    prompts_by_field = prompts_of(job)
    if job.reward is not None and job.environment is not None:
        yield (
            "reward: the environment gives the reward; leave out [reward] or [environment], or write one of them under "
            "the sources that it is for"
        )
    for field, prompts in prompts_by_field:
        if prompts.reward is not None and prompts.environment is not None:
            yield f"{field}.reward: the environment of this source gives the reward; leave out one of the two"
    is_own = [has_own(prompts) for _, prompts in prompts_by_field]
    if job.environment is not None and all(is_own) and not has_one_set(job):
        yield (
            "environment: plays nothing, because every source and held-out set has its own reward or environment; "
            "leave it out"
        )
    unscored = unscored_in(job)
    if job.objective.needs_reward and unscored:
        where = f" for {', '.join(unscored)}" if any(is_own) else ""
        yield f"reward: missing{where}; name one, or an [environment], which gives the reward itself"
    elif any(field.startswith("evaluation") for field in unscored):
        yield "evaluation: held-out responses are scored by a reward; add [reward], or leave out [evaluation]"
