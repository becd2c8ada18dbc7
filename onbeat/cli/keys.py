"""`onbeat keys`: the API keys that a broker lets in. Its commands edit the keys file; they call no broker."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from onbeat.cli.options import App
from onbeat.cli.output import print_table

app = App("Make, list and revoke the API keys of a broker.")

KeysPath = Annotated[
    Path,
    typer.Option(
        "--file",
        envvar="ONBEAT_API_KEYS_FILE",
        help="The broker's keys file; it holds hashes only.",
        show_default=False,
    ),
]


@app.command()
def new(
    path: KeysPath,
    role: Annotated[
        Literal["read", "submit", "admin"],
        typer.Option(help="read: look only; submit: also create, pause, resume and cancel jobs; admin: do anything."),
    ],
    name: Annotated[str, typer.Option(help="Name of its owner, such as ci.")],
    expires_days: Annotated[
        int | None, typer.Option(min=1, max=36500, help="Days until the key expires. Default: it never does.")
    ] = None,
) -> None:
    """Make a key and print it once: the file keeps only its hash. Brokers accept it within a second or two."""
    from datetime import timedelta

    from onbeat.process.api_keys import Role, keys_to_edit, new_key

    key, entry = new_key(name, Role(role), timedelta(days=expires_days) if expires_days else None)
    with keys_to_edit(path) as keys:
        keys.append(entry)
    typer.echo(key)


@app.command("list")
def list_keys(path: KeysPath) -> None:
    """List the keys with their ids."""
    from datetime import UTC, datetime

    from onbeat.process.api_keys import read_keys

    now = datetime.now(UTC)
    rows = []
    for key in read_keys(path):
        expiry = f"{key.expires_at:%Y-%m-%d %H:%M} UTC" if key.expires_at else "never"
        rows.append((key.id, key.name, key.role.value, f"{expiry} (has expired)" if key.has_expired(now) else expiry))
    print_table(["id", "name", "role", "expires"], rows)


@app.command()
def revoke(
    path: KeysPath,
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="Id of the key, as `onbeat keys list` shows it.", show_default=False)
    ],
) -> None:
    """Remove a key from the file. Brokers refuse it within a second or two."""
    from onbeat.process.api_keys import keys_to_edit

    with keys_to_edit(path) as keys:
        left = [key for key in keys if key.id != key_id]
        if len(left) == len(keys):
            raise ValueError(f"there is no key {key_id!r} in {path}; `onbeat keys list` shows the ids")
        keys[:] = left
    typer.echo(f"revoked {key_id}")
