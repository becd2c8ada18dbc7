"""Watch for errors of a page: on the console, uncaught exceptions, requests to other hosts, violations of its CSP."""

import re
from urllib.parse import urlsplit

from playwright.async_api import BrowserContext, ConsoleMessage, Request, WebError

REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) => {
    console.error(`content security policy: ${event.violatedDirective} refused ${event.blockedURI}`);
});
"""


class Watch:
    """Over all contexts of a test."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.requests: list[Request] = []
        self._hosts: set[str] = set()
        self._expected: list[str] = []

    async def look_at(self, context: BrowserContext, url: str) -> None:
        """Watch a context whose pages may talk to the broker at `url`, besides those that were named before."""
        self._hosts.add(urlsplit(url).netloc)
        context.on("console", self._heard)
        context.on("weberror", self._crashed)
        context.on("request", self._sent)
        await context.add_init_script(REPORT_VIOLATIONS)

    def expect(self, pattern: str) -> None:
        """Complaints that match are right in this test: browsers note every answer of 400 and above."""
        self._expected.append(pattern)

    def check(self) -> None:
        unexpected = [said for said in self.complaints if not any(re.search(p, said) for p in self._expected)]
        assert not unexpected, "the pages complain:\n" + "\n".join(unexpected)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(f"console {message.type}: {message.text} ({message.location['url']})")

    def _crashed(self, error: WebError) -> None:
        self.complaints.append(f"uncaught: {error.error}")

    def _sent(self, request: Request) -> None:
        self.requests.append(request)
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and parts.netloc not in self._hosts:
            self.complaints.append(f"request to another host: {request.method} {request.url}")
