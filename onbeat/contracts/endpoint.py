"""The order that `onbeat chat` gives to the process that serves models from local folders, as a JSON file."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class ServedModel(BaseModel):
    """A model under a name. `source`: a folder in Hugging Face layout or an id on the hub."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    source: str
    policy_version: int = 0


class EndpointOrder(BaseModel):
    """The models to serve. The first one has the tokenizer and the chat template for all of them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    port: int
    instance_id: str  # answer of /readyz
    models: list[ServedModel]
    job: dict[str, Any] | None = None  # configuration of the job that wrote the first one
