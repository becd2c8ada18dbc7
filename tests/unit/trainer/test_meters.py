"""Metrics for Prometheus: worked numbers of the trainer, and a documented table that equals the registries."""

import re
from pathlib import Path

from prometheus_client import REGISTRY, ProcessCollector

import services.rollout.meters  # noqa: F401  (it registers)
from services.broker.metrics import Meters
from services.trainer.job.meters import CommitMeter
from services.trainer.spans import Span

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "observability.md"
ROW = re.compile(r"^\| `(onbeat_\w+)` \| (counter|gauge|histogram|summary) \|([^|]*)\|", re.MULTILINE)


def test_commits_add_up_and_the_time_between_spans_is_waiting():
    def value(name, **labels):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    def seconds():
        activities = ("wait", "micro_batch", "optimizer")
        return {activity: value("onbeat_trainer_seconds_total", activity=activity) for activity in activities}

    meter, report = CommitMeter(), {"train/micro_batches": 3.0, "train/trained_tokens": 40.0, "reward_mean": 0.25}
    meter.record(1, 1, report, [Span("optimizer", 1.0, 2.0)])
    before, tokens, updates = seconds(), value("onbeat_trainer_trained_tokens_total"), "onbeat_trainer_updates_total"
    num_updates = value(updates)
    spans = [Span("micro_batch", 8.0, 9.0), Span("micro_batch", 5.0, 6.0), Span("optimizer", 9.0, 10.0)]
    meter.record(2, 2, report | {"train/grad_norm": 0.5}, spans)
    after = seconds()
    assert {name: after[name] - before[name] for name in after} == {"wait": 5.0, "micro_batch": 2.0, "optimizer": 1.0}
    assert value("onbeat_trainer_trained_tokens_total") - tokens == 40.0
    assert value(updates) - num_updates == 2
    assert value("onbeat_trainer_policy_version") == 2
    assert (value("onbeat_trainer_reward_mean"), value("onbeat_trainer_grad_norm")) == (0.25, 0.5)


async def test_documented_table_is_complete_and_true(ledger):
    def process_families():
        """Return the metrics that trainer and rollout have registered in this process."""
        collectors = set(REGISTRY._collector_to_names)
        return {
            (meter._name, meter._type, tuple(meter._labelnames))
            for meter in collectors
            if getattr(meter, "_name", "").startswith("onbeat_")
        }

    async def broker_families(ledger):
        meters = Meters()
        families = (await meters._read_jobs(ledger)).collect()
        labels = {family.name: family._labelnames for family in families}
        return {(family.name, family.type, labels[family.name]) for family in families} | {
            (meter._name, meter._type, tuple(meter._labelnames))
            for meter in set(meters._registry._collector_to_names)
            if not isinstance(meter, ProcessCollector)
        }

    registered = {
        (f"{name}_total" if kind == "counter" else name, kind, tuple(sorted(labels)))
        for name, kind, labels in await broker_families(ledger) | process_families()
    }
    documented = {
        (name, kind, tuple(sorted(re.findall(r"`(\w+)`", labels))))
        for name, kind, labels in ROW.findall(DOCUMENT.read_text())
    }
    assert documented == registered


def test_dashboards_ask_for_metrics_that_exist():
    ends = {"counter": [""], "gauge": [""], "histogram": ["_bucket", "_count", "_sum"], "summary": ["_count", "_sum"]}
    exported = {name + end for name, kind, _ in ROW.findall(DOCUMENT.read_text()) for end in ends[kind]}
    dashboards = "".join(path.read_text() for path in (ROOT / "deploy").rglob("dashboards/*.json"))
    asked = set(re.findall(r"(?:onbeat|process)_\w+", dashboards))
    assert asked <= exported | {"process_resident_memory_bytes", "process_cpu_seconds_total"}
    assert len(asked) > 20
