"""Answers to arbitrary requests of strangers: they are as the broker's OpenAPI document promises."""

import zlib
from typing import Any

import pytest
import schemathesis
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks

from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.broker.app import create_app
from services.broker.settings import Settings
from tests.fuzz import fuzzed
from tests.fuzz.conftest import JOB_IDS, LiveBroker

pytestmark = pytest.mark.slow

load_all_checks()
app = create_app(Settings(), Ledger(connect("redis://127.0.0.1:1", retry_s=1)))  # only for its schema
# Each limit of each field of a job is tried where jobs are created, 3,000 cases; these read the same body.
once = [
    {"include-name": f"POST /v1/jobs:{verb}", "phases": {"coverage": {"enabled": False}}}
    for verb in ("validate", "preview")
]
api = schemathesis.openapi.from_dict(app.openapi(), config=schemathesis.Config.from_dict({"operations": once}))


def unfit_checks(operation: str) -> list[Any]:
    """Return the checks that would report correct behaviour of the broker as wrong."""
    unfit: list[Any] = []
    if operation in ("POST /v1/jobs", "POST /v1/jobs:validate", "POST /v1/jobs:preview", "PUT /v1/datasets/{name}"):
        unfit.append(checks.positive_data_acceptance)  # a schema cannot say all that is asked of a job, or of a digest
    if operation.endswith("{job_id}/samples"):
        unfit.append(checks.positive_data_acceptance)  # nor can it say that one reward is not above another
    if ":" in operation:  # GET of it is that of a job whose id has a colon: 422
        unfit += [checks.unsupported_method, checks.allow_header_conformance]
    if operation.endswith("/metrics"):
        unfit.append(checks.response_schema_conformance)  # this schemathesis misreads `prefixItems`
    return unfit


@api.exclude(path_regex="/stream$").parametrize()  # it does not end
@fuzzed(20)
def test_every_answer_is_as_the_schema_says(case: schemathesis.Case, live_broker: LiveBroker) -> None:
    """All checks of schemathesis, with malformed requests and with well-formed ones, which are for jobs that exist."""
    group_ids = ("0-0", "0-1", "1-0", "9-9", "eval-0-0")  # accepted, waiting, of no iteration, of an evaluation
    if "job_id" in case.path_parameters and case.method != "DELETE" and case.meta.generation.mode.is_positive:
        choice = zlib.crc32(repr(case).encode())
        case.path_parameters["job_id"] = JOB_IDS[choice % len(JOB_IDS)]
        if "group_id" in case.path_parameters:
            case.path_parameters["group_id"] = group_ids[choice // len(JOB_IDS) % len(group_ids)]
    case.call_and_validate(live_broker.url, excluded_checks=unfit_checks(case.operation.label), timeout=60)


def test_answers_to_a_chain_of_requests_match_the_schema(live_broker: LiveBroker) -> None:
    """A request asks for the objects that the answer before it named; long waits and deletions are left out."""

    class Stranger(api.exclude(path_regex="(events|stream)$").exclude(method="DELETE").as_state_machine()):  # type: ignore[misc]
        def get_call_kwargs(self, case: schemathesis.Case) -> dict[str, Any]:
            return {"base_url": live_broker.url, "timeout": 60}

        def validate_response(self, response: Any, case: schemathesis.Case, **kwargs: Any) -> None:
            case.validate_response(response, excluded_checks=unfit_checks(case.operation.label))

    run_state_machine_as_test(Stranger, settings=settings(fuzzed(20), backend="stateful-server"))


def test_it_is_unharmed(live_broker: LiveBroker) -> None:
    live_broker.assert_unharmed()
