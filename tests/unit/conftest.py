"""Unit tests compute on tensors too small to share: one thread, so that parallel work on the machine costs little."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.broker_fixtures import write_prompts
from tests.broker_thread import BrokerThread
from tests.conftest import own_redis
from tests.scripted_trainer import train_jobs
from tests.world import job_body


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """Return the tokenizer of the bundled model."""
    from transformers import AutoTokenizer

    from services.trainer.model.bundled import BUNDLED_MODELS, find_gguf

    package, file_name = BUNDLED_MODELS["smollm2-135m-instruct"]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the package {package} is not installed")
    gguf = find_gguf(Path(spec.origin).parent, file_name)
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)


@pytest.fixture(scope="session")
def one_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerThread]:
    folder = tmp_path_factory.mktemp("broker")
    with own_redis(folder / "redis") as redis_url:
        broker = BrokerThread(redis_url, folder)
        with broker.serve() as broker.url:
            yield broker
        broker.close()


@pytest.fixture
def broker(one_broker: BrokerThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerThread]:
    """Run a whole broker without jobs, which the commands and clients of all tests share."""
    monkeypatch.setenv("ONBEAT_URL", one_broker.url)
    yield one_broker
    one_broker.reset()


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """Write a job beside its prompts and return its path."""
    write_prompts(tmp_path)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_body(schedule={"num_iterations": 25})))
    return str(path)


@pytest.fixture
def trainer(broker: BrokerThread) -> Iterator[None]:
    """Trains the jobs of the broker, without a model."""
    with broker.meanwhile(train_jobs(broker.ledger)):
        yield
