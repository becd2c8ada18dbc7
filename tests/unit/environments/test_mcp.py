"""Answers of an MCP server reach the policy whole, whatever their content is. The server runs in this process."""

import pytest
from mcp import Client
from mcp.server.lowlevel import Server
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
    Tool,
)

from onbeat.environments.mcp import tools_of


def text(words: str) -> TextContent:
    return TextContent(text=words)


IMAGE = ImageContent(data="aGk=", mime_type="image/png")
PAGE = TextResourceContents(uri="file:///a.md", mime_type="text/markdown", text="# A\nwhole")
LONG = "x" * 200_000


async def answer_of(result: CallToolResult) -> str:
    async def list_tools(context, params):
        return ListToolsResult(tools=[Tool(name="look", input_schema={"type": "object"})])

    async def call_tool(context, params):
        return result

    async with Client(Server("test", on_list_tools=list_tools, on_call_tool=call_tool)) as client:
        return await (await tools_of(client))["look"].call({})


@pytest.mark.parametrize(
    ("content", "structured", "said"),
    [
        ([], {"rows": [1, 2], "name": "é"}, '{"rows": [1, 2], "name": "é"}'),
        ([], {"result": None}, '{"result": null}'),
        ([], {"result": []}, '{"result": []}'),
        ([], None, ""),
        ([IMAGE], {"width": 2}, '(image, image/png: not shown)\n{"width": 2}'),
        ([text("2 rows")], {"rows": [1, 2]}, '2 rows\n{"rows": [1, 2]}'),
        ([text('{"rows":[1,2]}')], {"rows": [1, 2]}, '{"rows":[1,2]}'),
        ([text("5")], {"result": 5}, "5"),
        ([text("5")], {"result": "5"}, "5"),
        ([text("a"), text("b")], {"result": ["a", "b"]}, "a\nb"),
        ([text("1"), text("2")], {"result": [1, 2]}, "1\n2"),
    ],
)
async def test_structured_content_is_read_as_its_json(content, structured, said):
    assert await answer_of(CallToolResult(content=content, structured_content=structured)) == said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (text(LONG), LONG),
        (IMAGE, "(image, image/png: not shown)"),
        (AudioContent(data="aGk=", mime_type="audio/wav"), "(audio, audio/wav: not shown)"),
        (EmbeddedResource(resource=PAGE), "(resource file:///a.md, text/markdown)\n# A\nwhole"),
        (
            EmbeddedResource(resource=BlobResourceContents(uri="file:///a.zip", blob="aGk=")),
            "(resource file:///a.zip: not shown)",
        ),
        (
            ResourceLink(name="a", uri="file:///a.md", description="All about A", mime_type="text/markdown"),
            "(link to the resource file:///a.md: a, text/markdown, All about A)",
        ),
    ],
)
async def test_other_kinds_of_content_say_what_they_are(content, said):
    answer = CallToolResult(content=[text("before"), content, text("after")])
    assert await answer_of(answer) == f"before\n{said}\nafter"


async def test_error_of_a_tool_says_all_that_it_holds():
    wrong = CallToolResult(content=[text("no")], structured_content={"code": 7}, is_error=True)
    assert await answer_of(wrong) == 'Error:\nno\n{"code": 7}'
