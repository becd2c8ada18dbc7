"""Traces of a real local stack, received over OTLP."""

from collections import Counter

import pytest

from services.broker.tracing.tree import span_id, trace_id

SLACK_S = 0.5  # clocks, and how long a process may be kept from telling what it has measured
PATH = ["wait_for_rollout", "generate", "score", "wait_for_trainer", "micro_batch"]


@pytest.fixture(scope="module")
def traces(finished, receiver):
    """{iteration: {span id: span}}"""
    ids = {trace_id(finished.id, iteration): iteration for iteration in range(finished.num_iterations)}
    receiver.wait(lambda: receiver.traces.keys() >= ids.keys(), "a trace of every iteration is there")
    sent = {iteration: receiver.traces[id_] for id_, iteration in ids.items()}
    traces = {iteration: {span.id: span for span in spans} for iteration, spans in sent.items()}
    assert all(len(traces[iteration]) == len(spans) for iteration, spans in sent.items()), "a span was sent twice"
    return traces


def test_trace_says_which_process_did_what(stack, finished, traces):
    timeline = stack.client.jobs.timeline(finished.id, iterations=finished.num_iterations)
    rollouts = {lane.id for lane in timeline.lanes} - {"trainer"}
    instances = {}
    for trace in traces.values():
        for span in trace.values():
            instances.setdefault((span.service, span.name), set()).add(span.instance)
    assert instances["onbeat-rollout", "generate"] | instances["onbeat-rollout", "load"] == rollouts
    (trainer,) = instances["onbeat-trainer", "micro_batch"]
    assert trainer
    kinds = {name for service, name in instances if service == "onbeat-trainer"}
    assert kinds == {"micro_batch", "optimizer", "publish", "checkpoint"}
    assert instances["onbeat-broker", "iteration"] == {""}


def test_trace_covers_the_iteration(stack, finished, traces):
    for record in stack.client.jobs.iterations(finished.id):
        trace = traces[record.iteration]
        root = trace[span_id(finished.id, record.iteration, "iteration")]
        assert all(root.start <= span.start <= span.end <= root.end for span in trace.values())
        assert root.end == pytest.approx(record.committed_at, abs=SLACK_S)
        assert root.attributes["onbeat.reward_mean"] == pytest.approx(record.reward_mean)
        groups = {span.id for span in trace.values() if span.name == "group"}
        assert len(groups) == finished.num_prompts
        assert Counter(span.name for span in trace.values() if span.parent_id in groups) == dict.fromkeys(
            PATH, finished.num_prompts
        )
        loads = [span for span in trace.values() if span.name == "load"]
        assert len(loads) == 1
        if record.iteration > 0:
            before = traces[record.iteration - 1]
            published = before[span_id(finished.id, record.iteration - 1, "publish")]
            assert {load.links for load in loads} == {((published.trace_id, published.id),)}
            assert all(load.end >= published.start - SLACK_S for load in loads)
            assert [span.name for span in trace.values()].count("checkpoint") == 1
