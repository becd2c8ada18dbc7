"""Settings of services: a wrong one is named in one line, and a misspelt one is not ignored in silence."""

import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from onbeat.contracts.suggestions import close_names
from onbeat.process.settings import LIKENESS, warn_of_misspelt
from services.broker.__main__ import main as run_broker
from services.broker.settings import Settings as BrokerSettings
from services.rollout.__main__ import main as run_rollout
from services.rollout.settings import Settings as RolloutSettings
from services.trainer.__main__ import main as run_trainer
from services.trainer.settings import Settings as TrainerSettings

COMPOSE = Path(__file__).parents[3] / "compose.yaml"


@pytest.mark.parametrize(
    ("run", "service", "name", "value", "message"),
    [
        (run_broker, "broker", "ONBEAT_PORT", "http", "ONBEAT_PORT: Input should be a valid integer"),
        (run_trainer, "trainer", "ONBEAT_LEASE_S", "soon", "ONBEAT_LEASE_S: Input should be a valid number"),
        (run_rollout, "rollout", "ONBEAT_LEASE_S", "-1", "ONBEAT_LEASE_S: Input should be greater than 0"),
        (run_rollout, "rollout", "ONBEAT_REWARD_SERVICES", "{judge", 'field "reward_services"'),
    ],
)
def test_wrong_setting_is_named_in_one_line(run, service, name, value, message, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"the {service}'s settings are wrong: ")
    assert message in line


def test_misspelt_setting_is_named(monkeypatch, caplog):
    monkeypatch.setenv("ONBEAT_LEASE", "5")
    monkeypatch.setenv("ONBEAT_POOL", "default")
    warn_of_misspelt(TrainerSettings(), "trainer")
    (record,) = [record for record in caplog.records if record.name == "onbeat.process.settings"]
    assert record.message.startswith("ONBEAT_LEASE is no setting of the trainer")
    assert record.message.endswith("did you mean ONBEAT_LEASE_S?")


def test_settings_of_other_services_look_not_misspelt():
    kinds: list[type[BaseSettings]] = [BrokerSettings, TrainerSettings, RolloutSettings]
    names = [{f"ONBEAT_{name.upper()}" for name in kind.model_fields} for kind in kinds]
    others = set().union(*names, re.findall(r"ONBEAT_[A-Z_]+", COMPOSE.read_text()))
    for known in names:
        assert not [other for other in others - known if close_names(other, known, likeness=LIKENESS)]


def test_variables_of_compose_are_documented():
    named = set(re.findall(r"\$\{(ONBEAT_[A-Z_]+)", COMPOSE.read_text()))
    page = (COMPOSE.parent / "docs" / "deploy.md").read_text()
    assert len(named) > 10
    assert not {name for name in named if f"`{name}`" not in page}
