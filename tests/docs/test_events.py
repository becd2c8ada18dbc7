"""Each kind of event that the code emits is in the table of docs/observability.md."""

import re

from tests.docs.pages import ROOT, text_of


def test_every_kind_of_event_is_described() -> None:
    sources = [*ROOT.glob("onbeat/**/*.lua"), *ROOT.glob("onbeat/**/*.py"), *ROOT.glob("services/**/*.py")]
    calls = [call for file in sources for call in re.findall(r"(?<=emit\()(?=(.{0,100}))", file.read_text(), re.DOTALL)]
    emitted = {kind for call in calls for kind in re.findall(r"[\"']([a-z]+\.[a-z_]+)[\"']", call)}
    of_both = {name for file in sources for name in re.findall(r"emit\(kind \.\. '(\.[a-z]+)'", file.read_text())}
    emitted |= {kind + name for kind in ("iteration", "evaluation") for name in of_both}
    assert {"iteration.opened", "job.state", "worker.joined"} <= emitted
    table = text_of("docs/observability.md").partition("### Events")[2].partition("\n## ")[0]
    assert emitted - set(re.findall(r"`([a-z]+\.[a-z_]+)`", table)) == set()
