"""`onbeat export JOB`: the model that a job has left, as a folder to give away."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.options import Broker, JobId
from onbeat.cli.service import run_service
from onbeat.contracts.errors import OnbeatError
from onbeat.process.stacks import resolve_data_dir

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.config import JobConfig
    from onbeat.terminal.model_card import Export
    from onbeat.terminal.run_report import RunReport

ADAPTER_DEADLINE_S = 3600.0  # two loads of the model, and a pass over some responses with each


def export(
    broker: Broker,
    job_id: JobId,
    number: Annotated[
        int | None,
        typer.Option(
            "--checkpoint", min=1, metavar="N", help="The checkpoint after N iterations. Default: the newest."
        ),
    ] = None,
    is_adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter alone, in PEFT's format.")
    ] = False,
    is_merged: Annotated[
        bool, typer.Option("--merged", help="Write the whole model, with adapters merged into it. The default.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The folder to write, a new one. Default: named after job and checkpoint."),
    ] = None,
    repository: Annotated[
        str | None,
        typer.Option(
            "--push",
            metavar="ORG/NAME",
            help="Push it to a model repository on the Hugging Face hub, with the token in HF_TOKEN, in one commit. A "
            "new one is private. Without --to no folder stays here.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a model folder with a model card, for use elsewhere. The checkpoint is on this machine."""
    from onbeat.local import export as exporting
    from onbeat.local.push import check_push, push_folder
    from onbeat.terminal.model_card import Export
    from onbeat.terminal.run_report import read_run_report

    if is_adapter and is_merged:
        raise ValueError("--adapter and --merged ask for two exports; run the command for each of them")
    if repository is not None:
        check_push(repository)
    run = broker.ask(lambda client: read_run_report(client, job_id))
    number, folder = exporting.kept_checkpoint(resolve_data_dir(broker.data_dir), run.job, number)
    job = job_of(folder, job_id, is_adapter)
    base_files = exporting.files_of_base(job.model.path)
    with ExitStack() as stack:
        name = f"{job_id}-{folder.name}{'-adapter' if is_adapter else ''}"
        to_push = Path(name)
        if to is None and repository is not None:
            to_push = stack.enter_context(exporting.passing_folder(name)) / name
        target = to or to_push
        audit_head = broker.ask(lambda client: read_audit_head(client, job_id))
        licence = exporting.licence_of_base(job.model.path, base_files)
        card = Export(number, job.model.dtype, is_adapter, audit_head, licence)
        write_folder(run, folder, target, card, base_files)
        if to is not None or repository is None:
            typer.echo(f"{target} is written: its README.md is the model card; read it before you give it away")
        if repository is not None:
            url = push_folder(target, repository, f"Onbeat job {job_id} after {number} iterations")
            typer.echo(f"{url} has the files; its README.md is the model card")


def job_of(checkpoint: Path, job_id: str, is_adapter: bool) -> "JobConfig":
    """Return the job that wrote a checkpoint. Raise OnbeatError where it cannot be exported so."""
    from onbeat.local.checkpoints import read_checkpoint

    job = read_checkpoint(checkpoint).job
    if job is None:
        raise OnbeatError(f"{checkpoint} is of another version of Onbeat; export it with the version that wrote it")
    if is_adapter and job.lora is None:
        raise OnbeatError(f"job {job_id} trained all parameters, so it has no adapter; leave --adapter out")
    return job


def write_folder(run: "RunReport", checkpoint: Path, target: Path, card: "Export", base_files: dict[str, Path]) -> None:
    """Write the export of a checkpoint, whole or not at all. `base_files`: of the model that the job began with."""
    from onbeat.local.export import copy_files, copy_legal, whole_folder
    from onbeat.terminal.model_card import card_of

    with whole_folder(target) as draft:
        copy_files(checkpoint, draft, is_adapter=card.is_adapter)
        copy_legal(base_files, draft)
        gap = write_adapter(run, checkpoint, draft) if card.is_adapter else {}
        (draft / "README.md").write_text(card_of(run, replace(card, gap=gap)), encoding="utf-8")


async def read_audit_head(client: "AsyncClient", job_id: str) -> str:
    """Return the newest link of the audit log; '' where it cannot be audited."""
    try:
        return (await client.jobs.audit(job_id)).head
    except OnbeatError:
        return ""


def write_adapter(run: "RunReport", checkpoint: Path, draft: Path) -> dict[str, float]:
    """Write the adapter of a checkpoint, and return the gap of PEFT's log-probabilities on the job's last responses."""
    from onbeat.contracts.data_folder import JOB_FILE
    from onbeat.local.export import check_kept
    from onbeat.process.extras import require_extra
    from onbeat.terminal.model_card import base_of

    require_extra("trainer", user="an export of an adapter")
    pairs = run.before_after.pairs if run.before_after is not None else []
    samples = [answer.sample for pair in pairs if (answer := pair.after or pair.before) is not None]
    request = {
        "checkpoint": str(checkpoint.resolve()),
        "folder": str(draft.resolve()),
        "job": json.loads((checkpoint / JOB_FILE).read_text("utf-8"))["config"],
        "base": base_of(run),
        "texts": [(sample.decoded_prompt or sample.prompt) + sample.response for sample in samples],
    }
    measured = run_service("services.trainer.export", [], json.dumps(request), deadline_s=ADAPTER_DEADLINE_S)
    check_kept(checkpoint)
    gap: dict[str, float] = json.loads(measured)
    return gap
