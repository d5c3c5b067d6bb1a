"""Hooks of MkDocs: the site's navigation is docs/index.md, and links to files outside the site are plain text there."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
PAGES = (".md", ".png", ".svg")


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


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    docs = Path(config.docs_dir).resolve()
    folder = (docs / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        text, target = link[1], link[2]
        path = (folder / target).resolve()
        in_site = "://" in target or (path.is_relative_to(docs) and path.suffix in PAGES)
        return link[0] if in_site else text

    return LINK.sub(plain, markdown)
