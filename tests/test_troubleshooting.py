"""The messages that docs/howto/troubleshooting.md explains are messages that fxshard gives."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", PAGE)


@pytest.fixture(scope="module")
def texts() -> str:
    """Every string of the source, those in pieces put together, with what is filled in left out."""
    found = []
    for path in [*(ROOT / "fxshard").rglob("*.py"), *(ROOT / "passes").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_there_are_messages() -> None:
    assert len(QUOTED) > 20


@pytest.mark.parametrize("message", QUOTED)
def test_message_is_in_the_source(message: str, texts: str) -> None:
    assert message in texts
