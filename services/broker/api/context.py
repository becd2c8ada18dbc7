"""The context that `create_app` hands to every route."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, cast

from fastapi import Depends, Request

from onbeat.streams.ledger import Ledger
from services.broker.admission.quota import Quota
from services.broker.admission.review import Admission
from services.broker.metrics import Meters
from services.broker.uploads import Uploads
from services.broker.views.live import JobStreams
from services.broker.views.timeline import Timelines


@dataclass
class Context:
    ledger: Ledger
    admission: Admission
    quota: Quota
    meters: Meters
    is_conducting: Callable[[], bool]  # the control loop is alive, or there should be none: is_read_only
    is_read_only: bool
    streams: JobStreams
    timelines: Timelines
    uploads: Uploads
    data_dir: Path


def context_of(request: Request) -> Context:
    return cast(Context, request.app.state.context)


Broker = Annotated[Context, Depends(context_of)]
