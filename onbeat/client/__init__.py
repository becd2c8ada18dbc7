"""The Python client: `AsyncClient` speaks to a broker over REST; `Client` is the same for code without an event loop.

with Client() as client:
    job = client.jobs.create(JobConfig.from_file(Path("examples/quickstart.toml")))
    print(client.jobs.wait(job.id).state)
"""

from onbeat.client.asynchronous import AsyncClient
from onbeat.client.blocking import Client, Datasets, Jobs
from onbeat.client.datasets import AsyncDatasets
from onbeat.client.jobs import AsyncJobs, Series, Update
from onbeat.client.transport import BrokerUnreachable
from onbeat.contracts.errors import ApiError, UnnamedBroker
from onbeat.process.brokers import DEFAULT_URL

__all__ = [
    "DEFAULT_URL",
    "ApiError",
    "AsyncClient",
    "AsyncDatasets",
    "AsyncJobs",
    "BrokerUnreachable",
    "Client",
    "Datasets",
    "Jobs",
    "Series",
    "UnnamedBroker",
    "Update",
]
