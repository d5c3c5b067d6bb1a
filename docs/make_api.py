"""Write docs/api.md, the API reference, from the docstrings of the public names.

python docs/make_api.py
"""

import dataclasses
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import fxshard
from fxshard.passes.options import Options

PAGE = Path(__file__).parent / "api.md"

SECTIONS: dict[str, tuple[str, ...]] = {
    "Sharding and planning": ("compile", "shard", "plan", "explain"),
    "What a model is compiled with": (
        *("AdamW", "Muon", "NorMuon", "Split", "Precision", "Float8", "MXFP8", "Group", "Debug"),
        *("quantize_frozen", "grouped_mm"),
    ),
    "Saving and loading": ("save", "load", "latest"),
    "What comes back": ("ShardedModule", "EMA", "Schedule", "Profile"),
}
"""Public names in an order that tells a story. Errors come after these, and whatever is left after the errors."""

_ALL_DEFAULTS = (fxshard.AdamW(), fxshard.Debug())
"""Defaults that are objects with nothing but defaults."""

INTRODUCTION = """\
# API

Everything in `fxshard.__all__`. Made from the docstrings by `python docs/make_api.py`; do not edit this page.
"""


def page() -> str:
    public = [name for name in fxshard.__all__ if not name.startswith("_")]
    sections = dict(SECTIONS)
    named = {name for names in sections.values() for name in names}
    errors = tuple(name for name in public if _is_error(getattr(fxshard, name)))
    rest = tuple(name for name in public if name not in named and name not in errors)
    if rest:
        sections["More"] = rest
    parts = [INTRODUCTION]
    for title, names in sections.items():
        parts.append(f"## {title}\n")
        parts += [_entry(name, getattr(fxshard, name)) for name in names if name in public]
    parts += ["## Options\n", _markdown(inspect.getdoc(Options) or "") + "\n"]
    parts.append("## Errors\n\nWhen each is raised: [errors](design/errors.md).\n")
    parts += [f"- `fxshard.{name}`: {_first_paragraph(getattr(fxshard, name))}" for name in errors]
    return "\n".join(parts).rstrip() + "\n"


def _entry(name: str, value: Any) -> str:
    kind = "()" if callable(value) and not inspect.isclass(value) else ""
    parts = [f"### {name}{kind}\n"]
    made_by_users = callable(value) and name not in SECTIONS["What comes back"]
    if made_by_users and (not inspect.isclass(value) or dataclasses.is_dataclass(value)):
        parts.append(f"```python\n{_signature(f'fxshard.{name}', value)}\n```\n")
    parts.append(_markdown(inspect.getdoc(value) or "") + "\n")
    if inspect.isclass(value):
        parts += _members(value)
    elif not callable(value):
        parts += _members(type(value))
    return "\n".join(parts)


def _members(owner: type) -> list[str]:
    """Documented methods and properties that the class itself defines."""
    parts = []
    for name, member in vars(owner).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if name.startswith("_") or not callable(function) or inspect.isclass(function) or not function.__doc__:
            continue
        shown = name if isinstance(member, property) else _signature(name, function, method=True)
        parts.append(f"**`.{' '.join(shown.split())}`**\n\n{_markdown(inspect.getdoc(function) or '')}\n")
    return parts


def _signature(name: str, value: Any, method: bool = False) -> str:
    """As in the source; one argument to a line where it is long."""
    signature = inspect.signature(value)
    if method:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    arguments = [_argument(parameter) for parameter in signature.parameters.values()]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    keyword = inspect.Parameter.KEYWORD_ONLY
    if keyword in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(keyword), "*")
    returns = signature.return_annotation
    arrow = "" if returns in (inspect.Signature.empty, "None", None) else f" -> {_type(returns)}"
    line = f"{name}({', '.join(arguments)}){arrow}"
    if method or len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){arrow}"


def _argument(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    annotated = parameter.annotation is not inspect.Parameter.empty
    text = stars + parameter.name + (f": {_type(parameter.annotation)}" if annotated else "")
    if parameter.default is inspect.Parameter.empty:
        return text
    default = parameter.default
    shown = f"{type(default).__name__}()" if default in _ALL_DEFAULTS else repr(default).replace("'", '"')
    return f"{text} = {shown}" if annotated else f"{text}={shown}"


def _type(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _markdown(text: str) -> str:
    """Docstrings are nearly Markdown: code in double backticks, references to classes, examples after ``>>>``."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    blocks = []
    for block in text.split("\n\n"):
        if block.lstrip().startswith(">>>"):
            lines = [_example(line) for line in textwrap.dedent(block).splitlines()]
            block = "```python\n" + "\n".join(lines) + "\n```"
        blocks.append(block)
    return "\n\n".join(blocks)


def _example(line: str) -> str:
    """A line of a doctest as code, spaced as the formatter wants it; what it prints becomes a comment."""
    code = line[4:] if line.startswith((">>>", "...")) else f"# {line}"
    return re.sub(r"(\S) {3,}#", r"\1  #", code)


def _first_paragraph(value: Any) -> str:
    return _markdown((inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " "))


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Exception)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
