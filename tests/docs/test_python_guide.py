"""Tests that the Python of the guide fits the interface: its names are promised, and its calls have valid arguments."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Iterator

import pytest

from fugaku_gpt import api
from tests.docs.pages import DOCS

BLOCKS = re.findall(r"^```python\n(.*?)^```", (DOCS / "guide" / "api.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)


def calls(block: str) -> Iterator[ast.Call]:
    """The calls of functions and classes of the interface."""
    for node in ast.walk(ast.parse(block)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "api"
        ):
            yield node


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_every_name_is_promised_and_every_call_is_valid(block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "api":
            assert node.attr in api.__all__
    for call in calls(block):
        assert isinstance(call.func, ast.Attribute)
        signature = inspect.signature(getattr(api, call.func.attr))
        keywords = {str(keyword.arg): keyword.value for keyword in call.keywords}
        signature.bind(*call.args, **keywords)  # raises TypeError


def test_the_guide_shows_every_function_and_class_that_begins_something() -> None:
    shown = {call.func.attr for block in BLOCKS for call in calls(block) if isinstance(call.func, ast.Attribute)}
    functions = {name for name in api.__all__ if inspect.isfunction(getattr(api, name))}
    assert functions - shown == {"json_schema"}, "which the text names"
    assert shown >= {"Checkpoint", "Runs", "Sweep"}
