"""What MkDocs does beside mkdocs.yml: README is the home page, and links to files outside docs/ lead to copies of them.

So the site has everything that it links to, and needs neither a network nor the address of the repository.
"""

from __future__ import annotations

import os
import posixpath
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from pymdownx.slugs import slugify

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # MkDocs runs this file by its path
from tools import check_links

# Browsers show these; of other files, the copy has the ending .txt, so that they show it too.
SHOWN = (".json", ".md", ".png", ".svg", ".txt")


def in_site(path: str) -> str:
    """The place in the site of a file of the repository."""
    if path == check_links.HOME:
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" + ("" if path.endswith(SHOWN) else ".txt")


def in_repository(uri: str) -> str:
    """The reverse of `in_site`, for pages."""
    if uri == "index.md":
        return check_links.HOME
    return uri.removeprefix("repository/") if uri.startswith("repository/") else f"docs/{uri}"


def on_config(config: Any) -> Any:
    config.site_url = os.environ.get("SITE_URL", "")  # the release workflow sets it; no file of this tree names a host
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")  # GitHub's anchors
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, and whatever pages link to outside docs/: Markdown as pages, the rest as it is."""

    def add(path: str, inclusion: InclusionLevel) -> None:
        source = str(check_links.ROOT / path)
        files.append(File.generated(config, in_site(path), abs_src_path=source, inclusion=inclusion))
        if path.endswith(".md"):
            waiting.append(path)

    waiting = [in_repository(file.src_uri) for file in files.documentation_pages()]
    add(check_links.HOME, InclusionLevel.INCLUDED)
    for page in check_links.navigation():
        if files.get_file_from_path(page) is None and page.startswith("repository/"):
            add(in_repository(page), InclusionLevel.INCLUDED)
    while waiting:
        page = waiting.pop()
        if wrong := list(check_links.wrong_links(page)):
            raise PluginError("\n".join(wrong))
        for link in check_links.LINK.finditer(check_links.without_code((check_links.ROOT / page).read_text("utf-8"))):
            to = check_links.target(page, link["path"])
            if files.get_file_from_path(in_site(to)) is None:
                add(to, InclusionLevel.NOT_IN_NAV)
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Point links to the places that files of the repository have in the site."""
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation"]  # the section has no other page
    here, at = in_repository(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def moved(link: Any) -> str:
        if not link["path"]:
            return str(link[0])
        to = in_site(check_links.target(here, link["path"]))
        return f"{link['before']}{posixpath.relpath(to, at or '.')}{link['anchor'] or ''}{link['after']}"

    done, last = "", 0
    for block in check_links.FENCE.finditer(markdown):
        done += check_links.LINK.sub(moved, markdown[last : block.start()]) + block[0]
        last = block.end()
    return done + check_links.LINK.sub(moved, markdown[last:])
