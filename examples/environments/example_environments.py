"""Three environments that others serve: tools over MCP, a game over OpenEnv, a taskset of verifiers."""

import os
import sys
from pathlib import Path

from onbeat.environments.mcp import McpEnvironment
from onbeat.environments.messages import MessageEnvironment
from onbeat.environments.openenv import openenv_environment
from onbeat.environments.verifiers import VerifiersEnvironment

# The operator says where servers and programs are, never a job.
WORDS_URL = os.environ.get("WORDS_URL", "ws://127.0.0.1:8000")
VERIFIERS_PYTHON = os.environ.get("VERIFIERS_PYTHON", "/opt/verifiers/bin/python")
DOUBLES = {
    "taskset": {"id": "doubles"},
    "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
}


def calculator() -> McpEnvironment:
    server = Path(__file__).with_name("calculator_server.py")
    return McpEnvironment([sys.executable, str(server)], reward="regex", reward_options={"pattern": r"(\d+)"})


def words() -> MessageEnvironment:
    return openenv_environment(WORDS_URL, to_text=lambda observation: observation["text"])


def doubles() -> VerifiersEnvironment:
    return VerifiersEnvironment(VERIFIERS_PYTHON, DOUBLES)
