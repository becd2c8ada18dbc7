"""`onbeat reward try`: a job's reward on the first rows of its data, without an engine, a broker or a trainer."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onbeat.cli.options import App, Broker, Job, Overrides
from onbeat.cli.output import say
from onbeat.cli.service import DEADLINE_S, run_service
from onbeat.contracts.answers import PROMPT_SUFFIX
from onbeat.process.stacks import resolve_data_dir
from onbeat.terminal.formatting import clip, printable

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.config import JobConfig
    from onbeat.contracts.records import GroupDetail, JobRecord, Sample
    from onbeat.contracts.rewards import RewardConfig
    from onbeat.streams.signal import Signal

DATA_MEMORY_MB = 8192
OWN_ANSWER = "own answer"
THINK = "<think>"
START_S = 60.0  # time for the scoring process to start and import the reward
MISSING = "missing"  # kind of a failure: the settings do not name the service
ENDING = 60  # characters at the end of a prompt
ROWS, REWARDS, SERVICES, PROMPTS = (
    "services.broker.datasets.child",
    "services.rollout.rewards.child",
    "services.rollout.rewards.trial",
    "services.trainer.prompt_lengths",
)

app = App("Try rewards before a job uses them.")


@app.command("try")
def try_reward(
    broker: Broker,
    job: Job,
    overrides: Overrides = None,
    num_rows: Annotated[
        int, typer.Option("--rows", min=1, max=1000, help="Number of rows to use, from the first.")
    ] = 5,
    job_id: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Show the newest recorded groups of this job instead."),
    ] = None,
) -> None:
    """Print prompts as the model gets them, responses, and the reward of each with its parts.

    Each prompt is scored with two responses: the answer in its row, which should score high, and an empty one, which
    should score low. Rewards http and judge ask their service, which has to be in ONBEAT_REWARD_SERVICES as for a
    rollout. The exit code is 1 if a reward fails on any of them.
    """
    from onbeat.config import JobConfig
    from onbeat.contracts.rewards import ZERO
    from onbeat.process.extras import require_extra

    if job_id is not None:
        show_groups(broker, job_id, num_rows)
        return
    config = JobConfig.from_file(job, overrides)
    refuse_examples(config)
    refuse_episodes(config)
    check_services(config)
    require_extra("broker", user="the data of a job")
    items = read_rows(config, job.parent, broker.data_dir, num_rows)
    prompts, problem = render_prompts(config, items)
    if problem:
        typer.echo(f"the prompts are shown without the model's template: {problem}")
    if any(item["context"].get(PROMPT_SUFFIX, "").rstrip().endswith(THINK) for item in items):
        say(f"note: prompts end with {THINK}, which is no part of a response: it has the end of the reasoning alone")
    responses = [(index, name, text) for index, item in enumerate(items) for name, text in responses_to(item)]
    scores = score_all(config, items)
    for number, (index, name, text) in enumerate(responses):
        if name == responses_to(items[index])[0][0]:  # the first response of the row
            show_prompt(items[index]["title"], prompts[index], items[index].get("ending", ""))
        for reward, answers in scores:
            if number in answers and answers[number].get("kind") != MISSING:
                show_score(name if reward.part is None else f"{name}, {reward.part}", text, answers[number])
                if name == OWN_ANSWER and answers[number].get("reward") == 0:
                    say(f"  {'':<12}remark: the reward gives a row's own answer {ZERO}")
    if any("reward" not in answer for _, answers in scores for answer in answers.values()):
        raise typer.Exit(1)


def refuse_examples(config: "JobConfig") -> None:
    """Raise ValueError for a job of examples alone."""
    if not config.prompted:
        raise ValueError(
            "objective.type: sft learns from examples, which get no reward; to try the rewards of its [evaluation], "
            "write a job of another objective with that data as its [data]"
        )


def refuse_episodes(config: "JobConfig") -> None:
    """Raise ValueError for a job of episodes alone; of other sources that an environment plays, say that they are left
    out."""
    played = [name for name, environment in config.environments_by_source.items() if environment is not None]
    remedy = "run an iteration of it (--set schedule.num_iterations=1), or use --job"
    if len(played) == len(config.sources):
        raise ValueError(f"the reward of this job comes from its environment, which plays whole episodes: {remedy}")
    for name in played:
        say(
            f"note: source {name} is left out, because its reward comes from an environment, which plays whole episodes"
        )


def check_services(config: "JobConfig") -> None:
    """Raise ValueError, naming the field, for options that are wrong for a reward that asks a service."""
    from onbeat.config.service_rewards import problems_of_service_reward
    from onbeat.contracts.rewards import SERVICE_REWARDS

    for number, (field, source) in enumerate(config.sources):
        for index, reward in enumerate(config.rewards_by_source[source.name or ""]):
            place = "reward" if source.reward is None else f"{field}.reward"
            place += "" if reward.part is None else f".{index}"
            if reward.name in SERVICE_REWARDS and (number == 0 or source.reward is not None):
                for key, message in problems_of_service_reward(reward):
                    raise ValueError(f"{place}.{key}: {message}")


def show_groups(broker: Broker, job_id: str, num_groups: int) -> None:
    """Print the newest recorded groups of the job: each response with its reward, and what the group teaches."""
    from onbeat.streams.signal import Signal

    async def read(client: "AsyncClient") -> "tuple[JobRecord, list[GroupDetail]]":
        samples = await client.jobs.samples(job_id, limit=num_groups)  # the first response of each prompt comes first
        group_ids = dict.fromkeys(sample.group_id for sample in samples)
        return await client.jobs.get(job_id), [await client.jobs.group(job_id, group_id) for group_id in group_ids]

    job, groups = broker.ask(read)
    signal = Signal.of_record(job.config)
    for group in groups:
        show_prompt(group.group_id, group.prompt)
        for sample in group.responses:
            show_score(
                f"response {sample.index}", sample.response, {"reward": sample.reward, "parts": sample.reward_parts}
            )
        say(f"  {'teaches':<12}{lesson_of(group.responses, signal)}")


def lesson_of(samples: "Sequence[Sample]", signal: "Signal") -> str:
    """Return what a group of these responses teaches, by the job's signal."""
    from onbeat.streams.codec import Response, RolloutGroup

    responses = [
        Response(reward=sample.reward or 0.0, has_no_reward=sample.reward is None, reward_parts=sample.reward_parts)
        for sample in samples
    ]
    group = RolloutGroup(responses=responses, source=samples[0].source if samples else "")
    return "which of these responses are better" if signal.is_in(group) else f"nothing: {signal.words_of(group.source)}"


def score_all(
    config: "JobConfig", items: Sequence[dict[str, Any]]
) -> "list[tuple[RewardConfig, dict[int, dict[str, Any]]]]":
    """Return each reward with its answers by the numbers of the responses, which are to prompts of its sources."""
    from onbeat.contracts.rewards import SERVICE_REWARDS

    return [
        (
            reward,
            ask_reward_service(reward, items, source, config.seed)
            if reward.name in SERVICE_REWARDS
            else score(reward, items, source),
        )
        for source, rewards in config.rewards_by_source.items()
        for reward in rewards
    ]


def responses_to(item: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the responses to score, as (name, text): the answer of the row, if it has one, and an empty response."""
    answer = item["context"].get("answer")
    return [(OWN_ANSWER, str(answer))] * (answer is not None) + [("empty", "")]


def read_rows(config: "JobConfig", folder: Path, data_dir: Path | None, count: int) -> list[dict[str, Any]]:
    """Return the first prompts of each source that rewards score, with their contexts and titles, after a look at all
    rows as at a submission.

    Raises ValueError naming the field that is wrong.
    """
    root = resolve_data_dir(data_dir)
    environments = config.environments_by_source.values()
    return [
        item
        for number, environment in enumerate(environments)
        if environment is None
        for item in read_source(config, number, folder, root, count)
    ]


def read_source(config: "JobConfig", number: int, folder: Path, root: Path, count: int) -> list[dict[str, Any]]:
    from onbeat.config import FileData

    field, source = config.sources[number]
    data = source.model_dump(mode="json") | config.rendering.template_arguments()
    if isinstance(source, FileData) and (folder / source.path).is_file():
        data["path"], root = str((folder / source.path).resolve()), Path("/")
    if "prompt_field" in data:
        data |= {"order": "in_order", "difficulty": None, "max_prompt_tokens": None}
    spec = {"data": data, "seed": config.seed, "num_items": count}
    place = "reward" if source.reward is None else f"{field}.reward"
    scored_by = config.rewards_by_source[source.name or ""]
    names = [place] if len(scored_by) == 1 else [f"{place}.{index}" for index in range(len(scored_by))]
    rewards = {name: reward.model_dump(mode="json") for name, reward in zip(names, scored_by, strict=True)}
    requests = [
        {"spec": spec, "first": 0, "count": count, "timeout_s": DEADLINE_S},
        {"sections": [{"field": field, "spec": spec, "rewards": rewards}], "timeout_s": DEADLINE_S},
    ]
    answer, survey = ask_service(ROWS, [str(root), str(DATA_MEMORY_MB)], requests)
    for blamed, message in survey["complaints"]:  # the same sentence as that of a broker
        raise ValueError(f"{blamed}: {message}")
    if "error" in answer:
        raise ValueError(f"{field}{answer['error']['field'].removeprefix('data')}: {answer['error']['message']}")
    for note in survey["notes"]:
        say(f"note: {note}")
    start = "" if source.name is None else f"{source.name}, "
    rows = enumerate(answer["items"])
    return [
        item | {"source": source.name or "", "title": f"{start}row {index}"}
        for index, item in rows
        if item["row"] in (None, index)  # a short file repeats
    ]


def render_prompts(config: "JobConfig", items: Sequence[dict[str, Any]]) -> tuple[list[str], str]:
    """Return the prompts as the model gets them, and '' or the reason why its template was not applied. Contexts of
    conversations get the ends of the prompts."""
    from onbeat.config.templates import moment_of

    arguments = config.dated(moment_of(time.time())).rendering.template_arguments()
    given = {"arguments": arguments, "chat_template": config.model.chat_template}
    requests = [given, *({"messages": item["messages"], "text": item["text"]} for item in items)]
    try:
        answers = ask_service(PROMPTS, [config.model.path, "--text"], requests)
    except ValueError as error:
        plain = [item["text"] or "\n".join(f"{m['role']}: {m['content']}" for m in item["messages"]) for item in items]
        return plain, str(error)
    for item, answer in zip(items, answers, strict=True):
        item["context"] |= {PROMPT_SUFFIX: answer["suffix"]} if item["messages"] else {}
        item["ending"] = answer["text"][-ENDING:]
    return [f"{answer['text']}  ({answer['num_tokens']} tokens)" for answer in answers], ""


def score(reward: "RewardConfig", items: Sequence[dict[str, Any]], source: str) -> dict[int, dict[str, Any]]:
    """Score the responses to prompts of this source in a scoring process like a rollout's, with the same limits. Return
    the answers by the numbers of the responses: each has a request, with all responses to its prompt as the group."""
    requests: list[dict[str, Any]] = []
    number = 0  # number of the first response to the item
    for item in items:
        texts = [text for _, text in responses_to(item)]
        fields = {"reward": reward.name, "options": reward.options, "context": item["context"], "responses": texts}
        if item["source"] == source:
            requests += [{"request": number + place, "positions": [place]} | fields for place in range(len(texts))]
        number += len(texts)
    deadline_s = START_S + reward.timeout_s * sum(len(request["responses"]) for request in requests)
    answers = ask_service(REWARDS, [str(reward.timeout_s), str(reward.memory_limit_mb)], requests, deadline_s)
    silence = f"no score: it took longer than timeout_s = {reward.timeout_s:g}, or the scoring process ended"
    scored = {answer["request"]: answer for answer in answers if answer["step"] in ("scored", "failed")}
    return {request["request"]: scored.get(request["request"], {"message": silence}) for request in requests}


def ask_reward_service(
    reward: "RewardConfig", items: Sequence[dict[str, Any]], source: str, seed: int
) -> dict[int, dict[str, Any]]:
    """Ask the service of the reward about the responses to each prompt of this source, once, as a rollout does. Return
    the answers by the numbers of the responses; of a service that is not in the settings, say so."""
    from onbeat.contracts.seeds import seed_of
    from onbeat.process.extras import require_extra

    require_extra("rollout", user=f"reward {reward.name}")
    limits = {"reward": reward.name, "options": reward.options, "timeout_s": reward.timeout_s}
    requests: list[dict[str, Any]] = []
    number = 0  # number of the first response to the item
    for index, item in enumerate(items):
        texts = [text for _, text in responses_to(item)]
        group = {"request": number, "context": item["context"], "responses": texts, "seed": seed_of(seed, 0, index)}
        requests += [limits | group] if item["source"] == source else []
        number += len(texts)
    if not requests:
        return {}
    wanted = [request["request"] + place for request in requests for place in range(len(request["responses"]))]
    lines = ask_service(SERVICES, [], requests, START_S + reward.timeout_s * len(wanted))
    answers = {answer["request"]: answer for answer in lines}
    missing = [answer["message"] for answer in lines if answer.get("kind") == MISSING]
    if missing:
        say(f"reward {reward.name} is not tried: {missing[0]}; set it here as for the rollouts")
    return {response: answers.get(response, {"message": "no answer in time"}) for response in wanted}


def ask_service(
    module: str, arguments: Sequence[str], requests: Sequence[dict[str, Any]], deadline_s: float | None = None
) -> list[dict[str, Any]]:
    """Put requests to a program that speaks JSON lines, and return its answers until the deadline."""
    text = "".join(json.dumps(request) + "\n" for request in requests)
    return [json.loads(line) for line in run_service(module, arguments, text, deadline_s).splitlines()]


def show_prompt(title: str, prompt: str, ending: str = "") -> None:
    typer.echo(f"\n{title}\n  prompt      {clip(prompt)!r}")
    if ending:
        typer.echo(f"  ends with   {ending!r}")


def show_score(name: str, response: str, answer: dict[str, Any]) -> None:
    if "reward" in answer:
        parts = "".join(f"  {part} {value:g}" for part, value in answer["parts"].items())
        reward = answer["reward"]
        outcome = ("no opinion" if reward is None else f"reward {reward:g}") + parts
    else:
        outcome = f"failed: {printable(answer.get('message', answer))}"
    typer.echo(f"  {name:<12}{clip(response)!r}\n  {'':<12}{outcome}")
