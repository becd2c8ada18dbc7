"""The first prompts of a job as its model gets them, and what its rewards give two responses to each.

Tokenizer and rewards run in processes of their own, and import there what the broker does without.
"""

import importlib.util
import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from onbeat.config import JobConfig
from onbeat.config.warm_start import SFT
from onbeat.contracts.answers import PROMPT_SUFFIX
from onbeat.contracts.rewards import SERVICE_REWARDS, RewardConfig
from onbeat.process.children import ChildDied, ChildProcess
from services.broker.admission.memory import describe_memory
from services.broker.admission.rewards import CHILD as SCORER
from services.broker.admission.rewards import TRIAL_S
from services.broker.datasets import PromptItem
from services.broker.datasets.lengths import COUNTER

MAX_PROMPTS = 10
RENDER_S = 60.0  # time for starting Python, loading the tokenizer and all prompts
RENDER_MEMORY_MB = 8192
OWN_ANSWER, EMPTY = "own answer", "empty"
NO_TRANSFORMERS = "the package transformers is not installed where the broker runs"
OF_ENVIRONMENT = "rewards are not tried{where}: they come from an environment, which plays whole episodes"
OF_EXAMPLES = "the examples are shown as messages; the trainer makes texts and tokens of them"
OF_SERVICE = "rewards http and judge are not tried: they ask a service that the rollouts know by name"

Case = tuple[dict[str, Any], list[str], int]  # context of a prompt, responses to it, place of the one that is meant


class Trial(BaseModel):
    """A reward of a response. `response` says which: the answer in the row, or an empty one."""

    response: str  # "own answer" or "empty"
    text: str
    reward_name: str
    reward: float | None  # None: it failed, or has no opinion
    parts: dict[str, float] = {}
    message: str = ""  # reason why it failed; empty if it did not


class PreviewedPrompt(BaseModel):
    """A prompt, decoded from the token ids that the model gets; `num_tokens` None: without the model's template.

    `teacher_text`: the prompt that the teacher reads in its place; None: the same, or there is no teacher.
    """

    text: str
    num_tokens: int | None
    trials: list[Trial]
    teacher_text: str | None = None


class Preview(BaseModel):
    """The first prompts of a job that does not exist yet. `notes` say how much memory it would take, and what
    could not be shown, and why."""

    prompts: list[PreviewedPrompt]
    notes: list[str]


async def preview_prompts(config: JobConfig, items: Sequence[PromptItem]) -> Preview:
    """Show prompts and try the job's rewards on them. What cannot be done here becomes a note."""
    if config.objective.type == SFT:
        examples = [PreviewedPrompt(text=plain_text(item), num_tokens=None, trials=[]) for item in items]
        return Preview(prompts=examples, notes=[OF_EXAMPLES, await describe_memory(config, None)])
    teacher_items = [(number, item) for number, item in enumerate(map(teacher_item, items)) if item is not None]
    rendered, problem = await render(config, [*items, *(item for _, item in teacher_items)])
    rendered, of_teacher = rendered[: len(items)], rendered[len(items) :]
    teacher_texts = {number: prompt["text"] for (number, _), prompt in zip(teacher_items, of_teacher, strict=True)}
    notes = [f"the prompts are shown without the model's template: {problem}"] if problem else []
    cases: list[tuple[int, str, Case]] = []  # number of the prompt, name of the response
    for number, item in enumerate(items):
        answer = item.context.get("answer")
        context = item.context | ({PROMPT_SUFFIX: rendered[number]["suffix"]} if item.messages and not problem else {})
        given = {EMPTY: ""} if answer is None else {OWN_ANSWER: str(answer), EMPTY: ""}
        cases += [(number, name, (context, list(given.values()), place)) for place, name in enumerate(given)]
    trials: list[list[Trial]] = [[] for _ in items]
    for source, environment in config.environments_by_source.items():
        if environment is not None:
            notes.append(OF_ENVIRONMENT.format(where=f" for source {source}" if source else ""))
    for source, rewards in config.rewards_by_source.items():
        chosen = [case for case in cases if items[case[0]].source == source]
        for reward in rewards if chosen else ():
            if reward.name in SERVICE_REWARDS:
                notes += [OF_SERVICE] if OF_SERVICE not in notes else []
                continue
            answers = await score(reward, [case for _, _, case in chosen])
            for (number, response, (_, texts, place)), answer in zip(chosen, answers, strict=True):
                trials[number].append(trial_of(reward, response, texts[place], answer))
    prompts = [
        PreviewedPrompt(
            text=prompt["text"],
            num_tokens=prompt["num_tokens"],
            trials=tried,
            teacher_text=teacher_texts.get(number),
        )
        for number, (prompt, tried) in enumerate(zip(rendered, trials, strict=True))
    ]
    counts = [prompt["num_tokens"] for prompt in [*rendered, *of_teacher] if prompt["num_tokens"] is not None]
    return Preview(prompts=prompts, notes=[*notes, await describe_memory(config, max(counts, default=None))])


def teacher_item(item: PromptItem) -> PromptItem | None:
    """Return the prompt that the teacher reads in place of the policy's, if there is one."""
    if not item.teacher_messages and not item.teacher_text:
        return None
    return PromptItem(messages=item.teacher_messages, text=item.teacher_text, context={})


def trial_of(reward: RewardConfig, response: str, text: str, answer: dict[str, Any]) -> Trial:
    name = reward.name if reward.part is None else reward.part
    values = {"reward": answer.get("reward"), "parts": answer.get("parts", {}), "message": answer.get("message", "")}
    return Trial(response=response, text=text, reward_name=name, **values)


def plain_text(item: PromptItem) -> str:
    return item.text or "\n".join(f"{message.role}: {message.content}" for message in item.messages)


async def render(config: JobConfig, items: Sequence[PromptItem]) -> tuple[list[dict[str, Any]], str]:
    """Return {text, num_tokens, suffix} of each prompt, and '' or the reason why the template was not applied."""
    plain = [{"text": plain_text(item), "num_tokens": None} for item in items]
    if importlib.util.find_spec("transformers") is None:
        return plain, NO_TRANSFORMERS
    arguments = config.rendering.template_arguments()
    given = {
        "arguments": arguments,
        "chat_template": config.model.chat_template,
        "memory_mb": RENDER_MEMORY_MB,
    }
    child = await ChildProcess.start("the process that renders them", COUNTER, config.model.path, "--text")
    try:
        await child.send(given, RENDER_S)
        rendered = []
        for item in items:
            await child.send(item.model_dump(include={"messages", "text"}), RENDER_S)
            rendered.append(json.loads(await child.receive(RENDER_S)))
        return rendered, ""
    except TimeoutError:
        return plain, f"the tokenizer of {config.model.path} did not load within {RENDER_S:g} s"
    except ChildDied as error:
        return plain, error.last_words or str(error)
    finally:
        await child.kill()


async def score(reward: RewardConfig, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Score each response in a process like a rollout's, with the same limits; the responses to a prompt are a group.
    Return its answers, in order; once the process has ended or taken too long, the rest have the reason as message."""
    answers: list[dict[str, Any]] = []
    limits = str(reward.timeout_s), str(reward.memory_limit_mb)
    child = await ChildProcess.start("the scoring process", SCORER, *limits)
    message = f"it took longer than timeout_s = {reward.timeout_s:g}"
    try:
        for number, (context, responses, place) in enumerate(cases):
            request = {"request": number, "reward": reward.name, "options": reward.options, "context": context}
            await child.send(request | {"responses": responses, "positions": [place]}, TRIAL_S)
            step = json.loads(await child.receive(TRIAL_S))
            if step["step"] == "loaded":
                num_at_once = len(responses) if step["takes_group"] else 1
                step = json.loads(await child.receive(reward.timeout_s * num_at_once))
            answers.append(step)
    except ChildDied as error:
        message = str(error)
    except TimeoutError:
        pass
    finally:
        await child.kill()
    return answers + [{"message": message}] * (len(cases) - len(answers))
