"""Each kind of event that the code emits is in the table of docs/live.md."""

import re

from tests.docs.pages import ROOT, text_of


def test_every_kind_of_event_is_described() -> None:
    sources = [*ROOT.glob("onbeat/**/*.lua"), *ROOT.glob("onbeat/**/*.py"), *ROOT.glob("services/**/*.py")]
    calls = [call for file in sources for call in re.findall(r"(?<=emit\()(?=(.{0,100}))", file.read_text(), re.DOTALL)]
    emitted = {kind for call in calls for kind in re.findall(r"[\"']([a-z]+\.[a-z_]+)[\"']", call)}
    assert len(emitted) > 20
    table = text_of("docs/live.md").partition("### Events")[2].partition("\n## ")[0]
    assert emitted - set(re.findall(r"`([a-z]+\.[a-z_]+)`", table)) == set()
