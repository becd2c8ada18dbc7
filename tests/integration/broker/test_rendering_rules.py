"""A job records the number of the rules that rendered its prompts, and goes on by no other ones."""

import json

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.model import RENDERING_RULES
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.states import JobState
from onbeat.streams import keys
from tests.world import job_body


async def test_job_rendered_by_other_rules_is_not_resumed(broker, ledger):
    for rules, reason in ((None, "rendered without the rules 1 of this version"), (99, "here, not by rules 99")):
        job_id = (await broker.post("/v1/jobs", json=job_body())).json()["id"]
        config = json.loads((await ledger.jobs.fields(job_id))["config"])
        assert config["model"].pop("rendering_rules") == RENDERING_RULES
        config["model"] |= {"rendering_rules": rules} if rules else {}
        await ledger.jobs.move(job_id, JobState.FAILED, "the disk is full")
        await ledger.redis.hset(keys.JobKeys(job_id).job, "config", json.dumps(config))
        answer = await broker.post(f"/v1/jobs/{job_id}:resume")
        assert answer.status_code == 409
        assert reason in answer.json()["detail"]


def test_other_rules_are_read_but_not_accepted():
    body = job_body()
    body |= {"model": body["model"] | {"rendering_rules": 99}}
    with pytest.raises(ValidationError, match="leave rendering_rules out to render by these"):
        JobConfig.model_validate(body)
    assert JobConfig.model_validate(body, context=IS_ACCEPTED).model.rendering_rules == 99
