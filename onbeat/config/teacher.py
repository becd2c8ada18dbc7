"""The rules between a job's teacher and its other sections."""

from collections.abc import Iterator

from onbeat.config.scoring import environment_of, unscored_in
from onbeat.config.sections import JobSections
from onbeat.config.warm_start import SFT


def problems_of_teacher(job: JobSections) -> Iterator[str]:
    """Yield what does not go together with learning from a teacher: the field, what is wrong with it, and a remedy."""
    objective, rollout, unscored = job.objective, job.rollout, unscored_in(job)
    if objective.type == SFT:
        return
    if job.teacher is None:
        if not objective.needs_reward:
            yield f"teacher: objective {objective.type} learns from one; add a section [teacher] with its path"
        return
    if not objective.has_advantages:
        yield (
            f"teacher: its gap is added to advantages, which objective {objective.type} does not have; use grpo, dapo, "
            "dr_grpo, rloo, gspo or cispo, or distill"
        )
    if job.teacher.prompt_field is not None:
        yield from problems_of_prompts(job)
    if objective.needs_reward:
        return
    if objective.signal != "reward":
        yield f"objective.signal: {objective.type} learns from every group, whatever its rewards; leave it out"
    for field, source in job.sources:
        if source.signal is not None:
            yield f"{field}.signal: {objective.type} learns from every group, whatever its rewards; leave it out"
        if source.chooses is not None and field in unscored:
            yield f"{field}.order: difficulty chooses by rewards, and the job has none; use shuffled, or add [reward]"
    if rollout.max_prompts_per_iteration is not None:
        yield (
            f"rollout.max_prompts_per_iteration: objective {objective.type} learns from every group, so that none is "
            "replaced; leave it out"
        )
    changes_rewards = rollout.truncated == "zero" or rollout.overlong_cache is not None
    if changes_rewards and all(field in unscored for field, _ in job.sources):
        key = "truncated" if rollout.truncated == "zero" else "overlong_cache"
        yield f"rollout.{key}: changes rewards, and the job has none; leave it out, or add [reward] to measure them"


def problems_of_prompts(job: JobSections) -> Iterator[str]:
    """Yield why the rows of a job have no prompts for its teacher."""
    for field, source in job.sources:
        if environment_of(job, source) is not None:
            yield (
                f"teacher.prompt_field: the environment of {field} begins its conversations with the policy's prompt, "
                "and there is no other one for the teacher; leave it out, or train without an environment"
            )
        if source.type == "reasoning_gym":
            yield (
                f"teacher.prompt_field: {field} has generated tasks, each with one prompt only; use rows that have a "
                "second one, or leave it out"
            )
