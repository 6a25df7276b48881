"""A hook of mkdocs: what the site has beside docs/.

The README becomes the first page. A link that leads out of docs/, to an example, a result or
another page, gets a page of its own under source/, so that links are the same in a checkout and on
the site, and `mkdocs build --strict` finds every one that leads nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
HOME = "README.md"
# A code block, which is left alone, or the target of a link.
_LINK = re.compile(r"^```.*?^```|(?<=\]\()([^)\s#:]+)(?=[#)])", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the first page, and everything that pages link to."""
    waiting = [HOME, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if path.startswith("docs/") and not path.endswith(".md"):
            continue  # a picture, which mkdocs copies
        content = _content(path)
        if not path.startswith("docs/"):
            files.append(File.generated(config, _place(path), content=content))
        if _place(path).endswith(".md"):
            found = {_target(path, link) for link in _links(content)}
            new = {each for each in found - seen if (ROOT / each).exists()}
            seen |= new
            waiting += new
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets links lead to where their targets are on the site."""
    path = _path_of(page.file.src_uri)

    def on_site(match: re.Match[str]) -> str:
        link = match.group(1)
        if link is None:
            return match.group()
        here = Path(page.file.src_uri).parent
        return os.path.relpath(_place(_target(path, link)), here)

    return _LINK.sub(on_site, markdown)


def _links(markdown: str) -> list[str]:
    return [link for link in _LINK.findall(markdown) if link]


def _target(path: str, link: str) -> str:
    """The path in the repository to which a link of the page at `path` leads."""
    return os.path.normpath(Path(path).parent / link)


def _place(path: str) -> str:
    """Where the site has a file or folder of the repository."""
    if path == HOME:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith((".md", ".json")):
        return f"source/{path}"
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def _path_of(place: str) -> str:
    """The file or folder of the repository that the site has there."""
    if place == "index.md":
        return HOME
    if not place.startswith("source/"):
        return f"docs/{place}"
    path = place.removeprefix("source/")
    if (ROOT / path).exists():
        return path
    return path.removesuffix("/index.md") if path.endswith("/index.md") else path[: -len(".md")]


def _content(path: str) -> str:
    """What the site shows of a file or folder of the repository."""
    there = ROOT / path
    if there.is_dir():
        names = [each.name for each in sorted(there.iterdir()) if each.is_file()]
        lines = [f"* [{name}]({there.name}/{name})\n" for name in names]
        return f"# {path}\n\n{''.join(lines)}"
    text = there.read_text()
    if there.suffix in (".md", ".json"):
        return text
    return f"# {path}\n\n````{there.suffix.removeprefix('.') or 'text'}\n{text}````\n"
