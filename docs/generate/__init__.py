"""Writes docs/reference/ from the code: `python -m docs.generate` in the root of the repository."""

from docs.generate import cli, job, models, rest, settings

PAGES = {
    "job.md": job.page,
    "models.md": models.page,
    "rest.md": rest.page,
    "settings.md": settings.page,
    "cli.md": cli.page,
}
COMMAND = "python -m docs.generate"
