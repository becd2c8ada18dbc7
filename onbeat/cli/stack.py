"""`onbeat run`, `up`, `down` and `view`: the local stack."""

import os
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.options import DataDir, Engine, Job, NumRollouts, Overrides, RolloutCores, TrainerCores
from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.process.stacks import VIEW, resolve_data_dir, running_stack

if TYPE_CHECKING:
    from onbeat.local.stack import StackOptions


def run(
    job: Job,
    overrides: Overrides = None,
    num_rollouts: NumRollouts = 1,
    engine: Engine = "vllm",
    report: Annotated[Path | None, typer.Option(help="Write the numbers of the run to this JSON file.")] = None,
    is_fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Start over: cancel the unfinished job of this file, and the jobs queued before it."
        ),
    ] = False,
    rollout_cores: RolloutCores = None,
    trainer_cores: TrainerCores = None,
    data_dir: DataDir = None,
) -> None:
    """Start everything on this machine, train, show progress, stop everything.

    The exit code is 0 only if the job SUCCEEDED. Ctrl-C, SIGTERM and a closed terminal keep the work: the same command
    continues the job. If a stack of `onbeat up` is running, the job runs there.
    """
    from onbeat.config import JobConfig
    from onbeat.local.run import run_job

    options = make_options(data_dir, num_rollouts, engine, rollout_cores, trainer_cores)
    config = JobConfig.from_file(job, overrides)
    raise typer.Exit(run_job(config, job.parent, options, report, is_fresh))


def up(
    num_rollouts: NumRollouts = 1,
    engine: Engine = "vllm",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the broker. Default: 8800 if it is free.")
    ] = None,
    rollout_cores: RolloutCores = None,
    trainer_cores: TrainerCores = None,
    data_dir: DataDir = None,
) -> None:
    """Start the local stack in the background."""
    from dataclasses import replace

    from onbeat.local.daemon import start_in_background
    from onbeat.local.redis_choice import choose_server
    from onbeat.local.redis_server import checked_port

    options = make_options(data_dir, num_rollouts, engine, rollout_cores, trainer_cores)
    state = running_stack(options.data_dir)
    where = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir is not None else ""
    if state is not None and state.command != "up":
        raise ValueError(
            f"`onbeat {state.command}` uses the data folder {options.data_dir}: wait for its end or stop it "
            f"(`onbeat down{where}`), then try again"
        )
    if state is not None:
        typer.echo(
            f"already up at {state.url} (data folder {options.data_dir}), with its own rollouts, engine, cores and "
            f"port: to change them, stop it first (`onbeat down{where}`)"
        )
        return
    if port is not None:
        options = replace(options, port=checked_port(port))
    typer.echo(f"using {choose_server(options.data_dir / REDIS_FOLDER)}")
    state = start_in_background(options)
    typer.echo(f"up at {state.url} (data folder {options.data_dir}); `onbeat down{where}` stops it")
    if (named := os.environ.get("ONBEAT_URL")) and named.rstrip("/") != state.url:
        typer.echo(f"commands ask ONBEAT_URL={named} all the same: unset it, and they ask this stack")


def down(data_dir: DataDir = None) -> None:
    """Stop the local stack. Unfinished jobs continue with the next `onbeat up`."""
    from onbeat.local.daemon import stop_in_background

    folder = resolve_data_dir(data_dir)
    typer.echo("stopped" if stop_in_background(folder) else f"no stack runs in {folder}")


def view(
    folder: Annotated[
        Path | None, typer.Argument(help="The data folder of a run. Default: ONBEAT_DATA_DIR, else ./.onbeat")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8800 if it is free.")] = None,
) -> None:
    """Show the dashboard for the jobs of a data folder, read-only, until Ctrl-C."""
    from onbeat.local.redis_server import checked_port
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.local.stack import StackOptions, stack_at_usual_port
    from onbeat.process.extras import require_extra

    folder = resolve_data_dir(folder)
    state = running_stack(folder)
    if state is not None:
        typer.echo(f"a stack runs on {folder} already: open {state.url}")
        return
    if not (folder / "redis").is_dir():
        raise ValueError(f"{folder} is no data folder of a run: it has no folder redis")
    require_extra("broker", user="the dashboard")
    options = StackOptions(folder, port=checked_port(port) if port else None, is_view=True)
    with terminations_as_interrupts():
        try:
            with stack_at_usual_port(options, VIEW, report=typer.echo) as (url, supervisor):
                typer.echo(f"open {url}; Ctrl-C ends it")
                while True:
                    supervisor.check()
                    time.sleep(0.5)
        except KeyboardInterrupt:
            typer.echo("ended")


def make_options(
    data_dir: Path | None, num_rollouts: int, engine: str, rollout_cores: str | None, trainer_cores: str | None
) -> "StackOptions":
    from onbeat.local.stack import StackOptions, check_engine_name, plan_of
    from onbeat.machine.cores import parse_cores
    from onbeat.process.extras import require_extra

    require_extra("broker", "trainer", "rollout", user="a stack on this machine", install="local")
    check_engine_name(engine)
    options = StackOptions(
        data_dir=resolve_data_dir(data_dir),
        num_rollouts=num_rollouts,
        engine=engine,
        rollout_cores=parse_cores(rollout_cores) if rollout_cores else None,
        trainer_cores=parse_cores(trainer_cores) if trainer_cores else None,
    )
    plan_of(options)  # refuses wrong lists
    return options
