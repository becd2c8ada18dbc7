"""The access rules, which limit who may call what and how often: required roles, keys in force, token buckets."""

import hmac
import logging
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from starlette.datastructures import Headers

from onbeat.process.api_keys import ApiKey, Role, digest_of, id_of, read_keys
from onbeat.process.network import is_loopback

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/livez", "/readyz"})  # paths of probes: they reveal only whether the broker works
# The dashboard's files and the page of the API are the same for every caller; their data are requested with a key.
DASHBOARD = re.compile(r"/|/docs|/assets/(?:vendor/)?[^/]+")
READING = frozenset({"GET", "HEAD"})
# POST requests
SUBMITTING = re.compile(r"/v1/(jobs(:validate|:preview|/[^/]+:(cancel|pause|resume))?|chat/completions)")
UPLOADING = re.compile(r"/v1/datasets/[^/]+")  # PUT requests

CALLER = "onbeat.caller"  # key of the ApiKey in the scope, once it is known
RELOAD_S = 1.0
MAX_BUCKETS = 10_000
NO_DIGEST = "0" * 64


def required_role(method: str, path: str) -> Role | None:
    """Return the role that a call requires; None: no key is needed. Unlisted (and future) routes are for admins."""
    if method in READING:
        return None if path in OPEN_PATHS or DASHBOARD.fullmatch(path) else Role.READ
    if method == "POST" and SUBMITTING.fullmatch(path):
        return Role.SUBMIT
    if is_upload(method, path):
        return Role.SUBMIT
    return Role.ADMIN


def is_upload(method: str, path: str) -> bool:
    return method == "PUT" and UPLOADING.fullmatch(path) is not None


def is_from_here(headers: Headers) -> bool:
    """Return whether the request is neither from another site's page nor to another site's name that points here."""
    host = headers.get("host", "")
    name = re.sub(r":\d*$", "", host)  # the host without the port
    is_own_page = headers.get("origin") in (None, f"http://{host}", f"https://{host}")
    return is_own_page and is_loopback(name.strip("[]"))


class KeyRing:
    """The current keys of a file, which is read at most once per second. Raises ValueError if it is broken at first.

    If the file is broken or missing later, an error is logged and the previous keys stay in force.
    """

    def __init__(self, path: Path, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._path, self._now = path, now
        self._looked_at, self._problem = time.monotonic(), ""
        self._keys = {key.id: key for key in read_keys(path)}

    def find(self, sent: str) -> ApiKey | None:
        """Return the entry of a key that is known, not revoked and not expired.

        A key with an unknown id takes as long to refuse as one with a known id, so timing does not reveal ids.
        """
        self._refresh()
        entry = self._keys.get(id_of(sent))
        is_right = hmac.compare_digest(digest_of(sent), entry.sha256 if entry else NO_DIGEST)
        return entry if entry and is_right and not entry.has_expired(self._now()) else None

    def _refresh(self) -> None:
        if time.monotonic() - self._looked_at < RELOAD_S:
            return
        self._looked_at = time.monotonic()
        try:
            keys, problem = {key.id: key for key in read_keys(self._path)}, ""
        except ValueError as error:
            keys, problem = self._keys, str(error)
        if keys != self._keys or (self._problem and not problem):
            logger.info("read %d API keys from %s", len(keys), self._path)
        if problem not in ("", self._problem):  # complain once about each
            logger.error("%s. The %d keys read before stay in force; repair the file", problem, len(keys))
        self._keys, self._problem = keys, problem


class RateLimit:
    """A token bucket for each name: `burst` calls at once, `rate_per_s` in the long run.

    It remembers the MAX_BUCKETS names that called last; a forgotten name starts with a full bucket.
    """

    def __init__(self, rate_per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, float(burst), clock
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, and when; the last caller is last

    def wait_s(self, name: str) -> float:
        """Take a token. Returns 0 if there was one, else the seconds until there is."""
        now = self._clock()
        tokens, since = self._buckets.pop(name, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate_per_s)
        is_allowed = tokens >= 1
        self._buckets[name] = (tokens - is_allowed, now)
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return 0.0 if is_allowed else (1 - tokens) / self._rate_per_s
