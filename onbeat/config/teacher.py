"""The rules between a job's teacher and its other sections."""

from collections.abc import Iterator, Sequence

from onbeat.config.data import DataConfig
from onbeat.config.sections import JobSections


def problems_of_teacher(job: JobSections, sources: Sequence[tuple[str, DataConfig]]) -> Iterator[str]:
    """Yield what does not go together with learning from a teacher: the field, what is wrong with it, and a remedy."""
    objective, rollout = job.objective, job.rollout
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
        yield from problems_of_prompts(job, sources)
    if objective.needs_reward:
        return
    if objective.signal != "reward":
        yield f"objective.signal: {objective.type} learns from every group, whatever its rewards; leave it out"
    for field, source in sources:
        if source.signal is not None:
            yield f"{field}.signal: {objective.type} learns from every group, whatever its rewards; leave it out"
        if source.chooses is not None and job.reward is None:
            yield f"{field}.order: difficulty chooses by rewards, and the job has none; use shuffled, or add [reward]"
    if rollout.max_prompts_per_iteration is not None:
        yield (
            f"rollout.max_prompts_per_iteration: objective {objective.type} learns from every group, so that none is "
            "replaced; leave it out"
        )
    if job.reward is not None or job.environment is not None:
        return
    if rollout.truncated == "zero" or rollout.overlong_cache is not None:
        key = "truncated" if rollout.truncated == "zero" else "overlong_cache"
        yield f"rollout.{key}: changes rewards, and the job has none; leave it out, or add [reward] to measure them"
    sets = job.evaluation.sets if job.evaluation is not None else []
    if job.evaluation is not None and (not sets or any(section.reward is None for section in sets)):
        yield "evaluation: held-out responses are scored by a reward; add [reward], or leave out [evaluation]"


def problems_of_prompts(job: JobSections, sources: Sequence[tuple[str, DataConfig]]) -> Iterator[str]:
    """Yield why the rows of a job have no prompts for its teacher."""
    if job.environment is not None:
        yield (
            "teacher.prompt_field: the environment begins its conversations with the policy's prompt, and there is no "
            "other one for the teacher; leave it out, or train without [environment]"
        )
    for field, source in sources:
        if source.type == "reasoning_gym":
            yield (
                f"teacher.prompt_field: {field} has generated tasks, each with one prompt only; use rows that have a "
                "second one, or leave it out"
            )
