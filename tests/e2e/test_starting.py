"""The doctor about a stack whose trainer and rollouts are not ready yet."""

import sys
from dataclasses import replace
from pathlib import Path

from onbeat.local.supervisor import ServiceSpec
from tests.e2e.stack import running, tiny_job


def test_stack_that_starts_is_no_problem_from_its_first_second(tmp_path: Path) -> None:
    def never_ready(spec: ServiceSpec) -> ServiceSpec:
        return replace(spec, command=[sys.executable, "-c", "import time; time.sleep(600)"])

    with running(tmp_path, change=lambda specs: [specs[0], *map(never_ready, specs[1:])]) as stack:
        stack.client.jobs.create(tiny_job(tmp_path))
        diagnosis = stack.client.doctor()
    assert [finding.sentence for finding in diagnosis.findings if finding.is_problem] == []
    (starting,) = [finding for finding in diagnosis.findings if finding.sentence.startswith("starting: ")]
    assert starting.who == "trainer-0, rollout-0"
