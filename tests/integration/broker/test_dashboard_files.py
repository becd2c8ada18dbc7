"""The dashboard's files over the whole application: who gets them, with which headers, and that they are complete."""

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path, PurePath

import httpx
import pytest

from onbeat.config import JobConfig
from onbeat.process.api_keys import Role
from onbeat.streams.ledger import Ledger
from services.broker.api import dashboard
from tests.broker_fixtures import Keys
from tests.integration.broker.test_security import broker_with

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "services" / "broker" / "dashboard"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file())
SERVED = [name for name in FILES if "LICENSE" not in name and not name.endswith(".md")]
NAMES = [*SERVED, *dashboard.SHARED]  # the files that are served
ASSETS = [name for name in NAMES if name != "index.html"]
STYLES_AND_TABLES = ("onbeat/charts/table.json", "onbeat/charts/chart.css", "onbeat/terminal/report.css")
COMMENT = re.compile(r"/\*.*?\*/|<!--.*?-->|(?<![:\"'])//[^\n]*", re.DOTALL)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


@pytest.fixture
async def broker(keys: Keys, ledger: Ledger) -> AsyncIterator[httpx.AsyncClient]:
    async with broker_with(keys, ledger) as client:
        yield client


def path_of(name: str) -> Path:
    return dashboard.SHARED.get(name, FOLDER / name)


def text_of(name: str) -> str:
    return path_of(name).read_text(encoding="utf-8")


# ---- what is served ----------------------------------------------------------------------------------------------


async def test_page_and_assets_need_no_key_and_have_their_type(broker):
    page = await broker.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.text == text_of("index.html")
    for name in ASSETS:
        answer = await broker.get(f"/assets/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-type"] == dashboard.MEDIA_TYPES[PurePath(name).suffix]
        assert answer.content == path_of(name).read_bytes()


async def test_headers_let_a_page_do_nothing_but_talk_to_its_broker(broker):
    policy = {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self' data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    for path in ("/", "/assets/app.js", "/assets/icon.svg"):
        headers = (await broker.get(path)).headers
        directives = [part.strip().partition(" ") for part in headers["content-security-policy"].split(";")]
        assert {name: value for name, _, value in directives} == policy
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == headers["cross-origin-resource-policy"] == "same-origin"
        for once in ("x-content-type-options", "x-frame-options", "cache-control"):
            assert len(headers.get_list(once)) == 1, once


async def test_unchanged_file_is_answered_without_a_body(broker):
    first = await broker.get("/assets/app.js")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for sent in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await broker.get("/assets/app.js", headers={"If-None-Match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert "content-security-policy" in again.headers
    for sent in ('"other"', tag.strip('"'), tag[:-2] + '"'):
        assert (await broker.get("/assets/app.js", headers={"If-None-Match": sent})).status_code == 200
    tags = {(await broker.get(f"/assets/{name}")).headers["etag"] for name in ASSETS}
    assert len(tags) == len({path_of(name).read_bytes() for name in ASSETS})


async def test_head_has_the_headers_of_get(broker):
    for path in ("/", "/assets/style.css"):
        answer, head = await broker.get(path), await broker.head(path)
        assert (head.status_code, head.content) == (200, b"")
        ours = {"content-length", "content-type", "etag", "content-security-policy", "cache-control"}
        assert {name: head.headers[name] for name in ours} == {name: answer.headers[name] for name in ours}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_files_can_only_be_read(broker, keys, method):
    for path in ("/", "/assets/app.js"):
        assert (await broker.request(method, path)).status_code == 401
        answer = await broker.request(method, path, headers=keys.header(Role.ADMIN))
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


# ---- and nothing else --------------------------------------------------------------------------------------------


STRANGE_NAMES = ["vendor/app.js", "vendor/LICENSE.htm", "vendor", "nothing.js", "index.html", "%2e%2e", "%2e", "*"]
STRANGE_NAMES += ["app", "app.js%00", "app.js%0A", "APP.JS", "app.js ", "..%5c..%5capp.py", "x" * 5000]


async def test_name_of_no_asset_is_not_found(broker):
    for name in STRANGE_NAMES:
        url = httpx.URL("http://127.0.0.1").copy_with(raw_path=f"/assets/{name}".encode())
        assert (await broker.get(url)).status_code == 404, name


OUTSIDE = ["/assets/..%2fapp.py", "/assets/%2e%2e/%2e%2e/app.py", "/assets//etc/passwd", "/assets/x/app.js", "/assets/"]
OUTSIDE += ["/assets", "//", "/index.html", "/v1/job-schema", "/openapi.json"]


async def test_no_other_path_is_opened(broker, keys):
    for path in OUTSIDE:
        url = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())
        assert (await broker.get(url)).status_code == 401, path
        if not path.startswith(("/v1", "/openapi")):
            assert (await broker.get(url, headers=keys.header(Role.ADMIN))).status_code in (307, 404), path


def test_what_is_left_behind_in_the_folder_is_no_asset(tmp_path, monkeypatch):
    (tmp_path / "vendor").mkdir()
    for name in ("app.js", "app.js~", "notes.txt", ".hidden", "vendor/a.js"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".#page.js").symlink_to("nobody@nowhere")  # an editor's lock
    monkeypatch.setattr(dashboard, "FOLDER", tmp_path)
    assert sorted(dashboard.assets.__wrapped__()) == ["app.js", "charts.json", "vendor/a.js"]


async def test_schema_of_a_job_needs_a_key_and_is_that_of_the_door(broker, keys):
    assert (await broker.get("/v1/job-schema")).status_code == 401
    answer = await broker.get("/v1/job-schema", headers=keys.header(Role.READ))
    assert answer.status_code == 200
    assert answer.json() == JobConfig.model_json_schema()


async def test_page_is_no_part_of_the_api(broker, keys):
    spec = (await broker.get("/openapi.json", headers=keys.header(Role.READ))).json()
    assert not [path for path in spec["paths"] if path in ("/", "/docs") or path.startswith("/assets")]


async def test_page_of_the_api_has_all_routes_and_fields(broker, keys):
    spec = (await broker.get("/openapi.json", headers=keys.header(Role.READ))).json()
    answer = await broker.get("/docs")  # no key: it holds no data
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == dashboard.CONTENT_SECURITY_POLICY
    for path, calls in spec["paths"].items():
        for method in calls:
            assert f"{method.upper()} {path}</h3>" in answer.text
    assert "<code>num_samples_per_prompt</code>" in answer.text
    assert "Check a job as <code>POST /v1/jobs</code> does, without creating it." in answer.text
    addresses = re.findall(r'(?:src|href)="([^"]+)"', answer.text)
    allowed = {"assets/icon.svg", "assets/style.css", "assets/theme.js", "openapi.json", "./"}
    assert {address for address in addresses if not address.startswith("#")} == allowed
    anchors = {address.removeprefix("#") for address in addresses if address.startswith("#")}
    assert anchors <= set(re.findall(r'id="([^"]+)"', answer.text))


# ---- that they are complete, and ask nobody else -----------------------------------------------------------------


def test_files_of_the_dashboard_are_exactly_those_requested():
    def imports_of(name: str) -> set[str]:
        """Files that a file asks for, by their names. Modules of others ask for none."""
        text = text_of(name)
        if name.endswith(".html"):
            return {url.removeprefix("assets/") for url in re.findall(r'(?:src|href)="([^"#]+)"', text)}
        if name.endswith(".css"):
            return set(re.findall(r"url\(([^)]+)\)", text))
        modules = re.findall(r'(?:^(?:import|export)\b[\w\s{},*]*\bfrom |\bimport\()"([^"]+)"', text, re.MULTILINE)
        assert all(module.startswith("./") for module in modules), modules
        assert not (modules and name.startswith("vendor/")), f"{name} asks for {modules}"
        return {module.removeprefix("./") for module in modules} | set(re.findall(r'"assets/([^"]+)"', text))

    reached, todo = {"index.html"}, ["index.html"]
    while todo:
        name = todo.pop()
        for wanted in sorted(imports_of(name)):
            assert wanted in NAMES, f"{name} asks for {wanted}"
            if wanted not in reached:
                reached.add(wanted)
                todo.append(wanted)
    assert reached == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_file_names_no_other_host(name):
    w3 = re.compile(r"http://www\.w3\.org/[\w/]+")  # names of vocabularies; nothing is asked there
    text = w3.sub("", COMMENT.sub("", text_of(name)))
    assert not re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.\w+", text)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("vendor/")])
def test_file_has_nothing_that_the_policy_refuses(name):
    text = COMMENT.sub("", text_of(name))
    if name.endswith((".html", ".svg")):
        assert not re.findall(r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", text)
    if name.endswith(".js"):
        assert not re.findall(r"\beval\(|new Function|[iI]nnerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
        assert not re.findall(r"\bstyle:\s*[\"'`]|setAttribute\([\"']style", text)


def test_files_are_in_the_wheel(tmp_path):
    def copy_of_package(folder: Path) -> Path:
        """Copy the package without the rest of the repository: a build leaves folders behind."""
        packages = [f"{name}/__init__.py" for name in ("services", "services/broker", "onbeat", "onbeat/charts")]
        packages.append("onbeat/terminal/__init__.py")
        for name in ("pyproject.toml", "README.md", *packages, *STYLES_AND_TABLES):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
        (folder / "services/broker/dashboard/vendor").mkdir(parents=True)
        for name in FILES:
            (folder / "services/broker/dashboard" / name).write_bytes((FOLDER / name).read_bytes())
        return folder

    # in a process of its own: setuptools replaces a standard module, which fails where another package loaded it first
    build = [sys.executable, "-c", "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"]
    subprocess.run([*build, str(tmp_path)], cwd=copy_of_package(tmp_path / "source"), check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {name for name in names if name.startswith("services/broker/dashboard/")}
    assert shipped == {f"services/broker/dashboard/{name}" for name in FILES}
    assert set(names) >= set(STYLES_AND_TABLES)


def test_quick_start_of_the_editor_is_the_example():
    assert (FOLDER / "quickstart.toml").resolve() == ROOT / "examples" / "quickstart.toml", "one copy, not two"


def test_vendored_modules_are_as_their_packages_ship_them():
    # sha256 of what others wrote, as their packages on npm ship it: vendor/README.md
    vendored = {
        "htm.module.js": "ab33dd3f38059b9be4d5f5350128eefb2356639c4e0bbe9d9e8b3ba75847e9e4",
        "preact.module.js": "c30e721ebfdc6e2ad4c18c14d2dfb82667829c8aec27de1207774e3fc16858a8",
        "uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
        "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    }
    contents = {path.name: path.read_bytes() for path in (FOLDER / "vendor").iterdir()}
    readme = contents.pop("README.md").decode()
    licences = {name: contents.pop(name) for name in sorted(contents) if name.startswith("LICENSE.")}
    assert {name: hashlib.sha256(body).hexdigest() for name, body in contents.items()} == vendored
    assert all(f"`{name}`" in readme for name in [*vendored, *licences])
