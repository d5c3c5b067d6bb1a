"""Hooks of MkDocs: the site's navigation is docs/index.md, and files of the repository that pages link to are pages."""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s#]+)()\)")
PAGES = (".md", ".png", ".svg")
SOURCE = "source/"
"""Where on the site the pages of such files are."""
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"
CODE = """# {name}

````{language}
{text}
````
"""


def on_config(config: Any) -> Any:
    config.nav = [{"Overview": "index.md"}, *contents(Path(config.docs_dir, "index.md").read_text())]
    return config


def contents(index: str) -> list[dict[str, list[dict[str, str]]]]:
    """Sections of the index and the pages they list, as MkDocs wants them."""
    sections: list[dict[str, list[dict[str, str]]]] = []
    for line in index.splitlines():
        if line.startswith("## "):
            sections.append({line[3:]: []})
        elif (found := re.match(r"- \[([^\]]+)\]\(([^)]+)\)", line)) and sections:
            next(iter(sections[-1].values())).append({found[1]: found[2]})
    return sections


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    docs = Path(config.docs_dir).resolve()
    for path in sorted(linked(docs)):
        text = path.read_text()
        if path.suffix != ".md":
            language = "python" if path.suffix == ".py" else "text"
            text = CODE.format(name=path.relative_to(docs.parent), language=language, text=text)
        files.append(File.generated(config, uri(path, docs), content=UNSEARCHED + text))
    return files


def linked(docs: Path) -> set[Path]:
    """Files that are no pages of docs but that its pages link to, or that such files do."""
    found: set[Path] = set()
    pages = list(docs.rglob("*.md"))
    while pages:
        page = pages.pop()
        for path in targets(page):
            if path.is_file() and uri(path, docs).startswith(SOURCE) and path not in found:
                found.add(path)
                pages += [path] if path.suffix == ".md" else []
    return found


def targets(page: Path) -> Iterator[Path]:
    for link in LINK.finditer(page.read_text()):
        if "://" not in link[2]:
            yield (page.parent / link[2]).resolve()


def uri(path: Path, docs: Path) -> str:
    """The page of a file, from the root of the site."""
    if path.is_relative_to(docs) and path.suffix in PAGES:
        return path.relative_to(docs).as_posix()
    return SOURCE + path.relative_to(docs.parent).as_posix() + (".md" if path.suffix != ".md" else "")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    docs, own = Path(config.docs_dir).resolve(), page.file.src_uri
    source = docs / own
    if own.startswith(SOURCE):
        source = docs.parent / own.removeprefix(SOURCE)
        if not source.is_file():  # code: what looks like a link is none
            return markdown

    def on_site(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (source.parent / target).resolve()
        if path.is_dir():
            return text
        if "://" in target or not path.exists():
            return link[0]
        mark = "!" if link[0].startswith("!") else ""
        return f"{mark}[{text}]({posixpath.relpath(uri(path, docs), posixpath.dirname(own))}{anchor})"

    return IMAGE.sub(on_site, LINK.sub(on_site, markdown))
