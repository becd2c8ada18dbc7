"""A job in a notebook: its curves, drawn as in the report."""

import copy
import pickle

from onbeat.client import Client
from tests.broker_thread import BrokerThread


def test_job_is_shown_with_its_curves(broker: BrokerThread, trainer: None) -> None:
    with Client(broker.url) as client:
        job_id = broker.create_job()
        client.jobs.wait(job_id, timeout_s=30)
        job = client.jobs.get(job_id)
        html = job._repr_html_()
        assert html is not None
        assert "Reward by iteration: mean 0 → 0.2" in html
        assert "<script" not in html
        assert client.jobs.wait(job_id)._repr_html_() == html
    assert job._repr_html_() is None  # the client is closed: notebooks show the text


def test_job_is_still_a_plain_value(broker: BrokerThread) -> None:
    with Client(broker.url) as client:
        job = client.jobs.get(broker.create_job())
        assert "No iteration is committed yet." in (job._repr_html_() or "")
        hostile = job.model_copy(update={"name": "</p><script>"})
        assert "<script" not in (hostile._repr_html_() or "<script")
        for twin in (client.jobs.get(job.id), client.jobs.list()[0], copy.deepcopy(job)):
            assert twin == job
        assert pickle.dumps(job)
        assert copy.deepcopy(job)._repr_html_() is None
