"""The other tests here fail for what their pages complain of: that they would."""

import re

import pytest

from tests.browser.conftest import Visitor
from tests.browser.gallery import Gallery

OFFENCES = {
    "console.error('an error')": "console error: an error",
    "setTimeout(() => { throw new Error('nobody caught it'); })": "uncaught: .*nobody caught it",
    "Promise.reject(new Error('nobody waited for it')) && null": "uncaught: .*nobody waited for it",
    "fetch('http://127.0.0.2:9/').catch(() => null)": "connect-src.* refused http://127.0.0.2:9/",
    "const s = document.createElement('script'); s.text = '1'; document.body.append(s)": "script-src.* refused inline",
    "document.body.setAttribute('style', 'color: red')": "style-src.* refused inline",
    "new Image().src = 'http://127.0.0.2:9/x.png'": "img-src.* refused http://127.0.0.2:9/x.png",
}


async def test_every_offence_is_noticed(visit: Visitor, gallery: Gallery) -> None:
    page = await visit(gallery.url)
    for script, complaint in OFFENCES.items():
        await page.evaluate(f"() => {{ {script} }}")
        await page.evaluate("new Promise((resolve) => setTimeout(resolve))")  # postponed tasks run before it
        assert any(re.search(complaint, said) for said in visit.watch.complaints), script
        with pytest.raises(AssertionError, match="the pages complain"):
            visit.watch.check()
        visit.watch.complaints.clear()


async def test_request_to_another_host_is_noticed_without_a_policy(visit: Visitor, gallery: Gallery) -> None:
    page = await visit(gallery.url, bypass_csp=True)
    await page.evaluate("fetch('http://127.0.0.2:9/', {mode: 'no-cors'}).catch(() => null)")
    with pytest.raises(AssertionError, match="request to another host: GET http://127"):
        visit.watch.check()
    visit.watch.complaints.clear()
