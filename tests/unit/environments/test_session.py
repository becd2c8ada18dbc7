"""The session of an episode, as an environment holds it."""

import ssl

from onbeat.environments.session import Session


async def test_a_session_reads_no_certificates(monkeypatch):
    """Its URL is one of this machine, and reading them takes longer than a call."""
    monkeypatch.setattr(ssl, "create_default_context", lambda *_, **__: 1 / 0)
    await Session("http://127.0.0.1:1/v1", "key").close()
