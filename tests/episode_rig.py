"""Episodes without a model: a scripted engine, a tokenizer of bytes, and environments that run in this process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx

from onbeat.config.rollout import RolloutConfig
from onbeat.contracts.states import EpisodeFailureKind as Kind
from onbeat.engines import GeneratedResponse, Sampling, VersionSpan
from onbeat.environments import Outcome, Session, Task
from onbeat.streams.codec import Environment, Message, PromptTask, RolloutGroup, check_group
from onbeat.streams.ledger import Claim
from services.rollout.environments.child import is_of_network
from services.rollout.episodes.contract import EpisodeFailure, PlayRequest, PlayResult
from services.rollout.episodes.runner import EpisodeRunner
from services.rollout.episodes.server import SessionServer
from services.rollout.generation import Generation
from services.rollout.inflight import Flight
from services.rollout.player import Player
from services.rollout.producer import GroupProducer
from services.rollout.prompt_decoder import PromptDecoder
from services.rollout.prompts import PromptEncoder
from services.trainer.episode import turn_paths
from tests.tiny_models import build_tokenizer

VERSION = 7
Run = Callable[[Task, Session], Awaitable[Outcome]]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

QWEN_LIKE = """
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content and loop.index0 < ns.last_query %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}<|im_start|>assistant
{{ content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

WITHOUT_SYSTEM = """
{%- for message in messages %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('only user and assistant, please') }}{% endif -%}
<turn>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<turn>assistant
{% endif %}"""

# Tools, calls and results as in the templates of Llama 3, and of Mistral 7B and Nemo. They refuse the same messages.
LLAMA_LIKE = """
{%- if tools %}<|start|>system

Environment: ipython<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|start|>ipython

{{ message.content | tojson }}<|im_end|>
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time, please') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant

{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>
{%- else %}<|start|>{{ message.role }}

{% if tools and loop.first %}Respond in the format {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content | trim }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant

{% endif %}"""

MISTRAL_LIKE = """
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('nine characters, please') }}{% endif %}
{{- (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ ', ' if not loop.last }}
{%- endfor %}]<|im_end|>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {"content": {{ message.content }}, "call_id": "
{{- message.tool_call_id }}"}[/TOOL_RESULTS]
{%- else %} {{ message.content | trim }}<|im_end|>
{%- endif %}
{%- endfor %}"""


def tokenizer_of(template: str | None = None) -> Any:
    tokenizer = build_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


class ScriptedEngine:
    """Answers with given texts, in turn, each ended by the end-of-sequence token if it fits; or with text of the seed.

    It keeps what it saw: prompt, sample, sampling.
    """

    def __init__(self, tokenizer: Any, *texts: str) -> None:
        self.texts = list(texts)
        self.seen: list[tuple[list[int], list[int], Sampling]] = []
        self.errors: list[Exception] = []
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.num_running = self.num_cancelled = 0
        self._tokenizer = tokenizer

    async def generate(
        self, prompt_token_ids: list[int], num_samples: int, sampling: Sampling, expected_version: int
    ) -> list[GeneratedResponse]:
        assert (num_samples, expected_version) == (1, VERSION)
        self.num_running += 1
        try:
            await asyncio.sleep(0)
            await self.may_finish.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        if self.errors:
            raise self.errors.pop(0)
        text = self.texts.pop(0) if self.texts else f"{sampling.seed % 97}"
        return [self._response(prompt_token_ids, text, sampling)]

    def _response(self, prompt_token_ids: list[int], text: str, sampling: Sampling) -> GeneratedResponse:
        whole = [*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._tokenizer.eos_token_id]
        token_ids = whole[: sampling.max_response_tokens]
        self.seen.append((prompt_token_ids, token_ids, sampling))
        return GeneratedResponse(
            token_ids=token_ids,
            rollout_logprobs=[-0.5] * len(token_ids),
            finish_reason="stop" if len(token_ids) == len(whole) else "length",
            version_spans=[VersionSpan(VERSION, 0, len(token_ids))],
            text=self._tokenizer.decode(token_ids, skip_special_tokens=True),
        )


class OpenGate:
    """Serves every version, and counts who is inside."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_inside = 0

    @asynccontextmanager
    async def pinned(self, version: int) -> AsyncIterator[Any]:
        assert version == VERSION
        self.num_inside += 1
        try:
            yield self._engine
        finally:
            self.num_inside -= 1


class InProcess:
    """Runs an environment's function in this process, on the real HTTP server."""

    def __init__(self, run: Run, num_groups: int = 8) -> None:
        self.run = run
        self.requests: list[PlayRequest] = []
        self._num_groups = num_groups

    def num_groups(self) -> int:
        return self._num_groups

    async def play(self, request: PlayRequest) -> list[PlayResult]:
        self.requests.append(request)
        request.on_begin()
        return list(await asyncio.gather(*(self._play(request, index) for index in range(len(request.access)))))

    async def _play(self, request: PlayRequest, index: int) -> PlayResult:
        session = Session(*request.access[index])
        try:
            return await self.run(request.task, session)
        except Exception as error:
            kind = Kind.UNREACHABLE if is_of_network(error) else Kind.RAISED
            return EpisodeFailure(kind, f"{type(error).__name__}: {error}")
        finally:
            await session.close()
            request.on_end(index)

    async def close(self) -> None:
        pass


class Rig:
    """The parts of a rollout that play episodes."""

    def __init__(
        self,
        run: Run,
        *texts: str,
        template: str | None = None,
        context: int | None = None,
        engine: Any = None,
        encoder: PromptEncoder | None = None,
        max_attempts: int = 2,
    ) -> None:
        encoder = encoder or PromptEncoder(tokenizer_of(template), context)
        self.tokenizer = encoder.tokenizer
        self.engine = engine or ScriptedEngine(self.tokenizer, *texts)
        self.gate: Any = OpenGate(self.engine)
        self.environments = InProcess(run)
        self.server = SessionServer()
        self.runner = EpisodeRunner(encoder, self.environments, self.server, max_attempts)
        generation = Generation(self.gate, encoder)
        limits = RolloutConfig(num_prompts_per_iteration=1, num_samples_per_prompt=1, max_response_tokens=8)
        player, decoder = Player(generation, self.runner), PromptDecoder(self.tokenizer)
        self.producer = GroupProducer(player, decoder, generation.busy, limits)

    async def group(self, **fields: Any) -> RolloutGroup:
        """Produce a group, which keeps the promises of the wire."""
        group = await self.producer.produce(flight_of(**fields))
        check_group(group)
        return group

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def paths(self, group: RolloutGroup) -> list[list[tuple[list[int], list[int]]]]:
        """Return the prompt and the sample of each turn of each response, put together from the tree."""
        return [list(turn_paths(response, list(group.prompt_token_ids))) for response in group.responses]


@asynccontextmanager
async def playing(run: Run, *texts: str, **options: Any) -> AsyncIterator[Rig]:
    rig = Rig(run, *texts, **options)
    await rig.server.start()
    try:
        yield rig
    finally:
        await rig.server.stop()


def flight_of(num_samples: int = 1, **fields: Any) -> Flight:
    environment = {"name": "test", "options_json": "{}", "max_turns": 8, "timeout_s": 60.0, "memory_limit_mb": 512}
    environment |= {name: fields.pop(name) for name in list(fields) if name in environment}
    defaults = {
        "group_id": "3-0",
        "iteration": 3,
        "policy_version": VERSION,
        "messages": [Message(role="user", content="2+2=")],
        "num_samples": num_samples,
        "max_response_tokens": 256,
        "temperature": 0.5,
        "seed": 11,
        "deadline_s": 60.0,
        "reward_context_json": '{"question": "2+2=", "answer": "4", "metadata": {"level": 1}}',
        "environment": Environment(**environment),
    }
    return Flight(Claim("0-1", 1, PromptTask(**(defaults | fields))))


async def post(session: Session, path: str, **body: Any) -> httpx.Response:
    """Call the session without the help of its client."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.key}"}, timeout=60) as http:
        return await http.post(f"{session.url}{path}", json=body)
