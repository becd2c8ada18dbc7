"""Writes docs/reference/ and a table of docs/operating.md from the code: `python -m docs.generate` in the root of the
repository."""

from docs.generate import cli, durations, job, models, rest, settings

PAGES = {  # generators by the page's place in docs/
    "reference/job.md": job.page,
    "reference/models.md": models.page,
    "reference/rest.md": rest.page,
    "reference/settings.md": settings.page,
    "reference/cli.md": cli.page,
    "operating.md": durations.page,
}
COMMAND = "python -m docs.generate"
