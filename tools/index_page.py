"""The page of a package index: README with absolute links and pictures, and the addresses beside.

No file of this tree names a host. `REPOSITORY`, the repository's URL, is set by the release workflow, or by whoever
builds; `REF` is the tag, so that a release's page keeps its own files; `SITE_URL` is the site of the docs.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

UNTIL = "<!-- until 0.2.0 -->"  # at the end of lines that are true before the first release only


@dataclass(frozen=True)
class Addresses:
    """Where a reader of the page finds the repository's files, under the paths of GitHub and GitLab; empty: nowhere."""

    web: str = ""
    ref: str = "HEAD"
    site: str = ""

    @classmethod
    def of_environment(cls) -> Addresses:
        web = web_address(os.environ.get("REPOSITORY", ""))
        return cls(web, os.environ.get("REF") or "HEAD", os.environ.get("SITE_URL", ""))


def web_address(repository: str) -> str:
    """Where a browser shows the repository: no key that is in the URL, and nothing for an address of ssh or a path."""
    return re.sub(r"^(https://)([^/]*@)?|(\.git)?/?$", r"\1", repository) if repository.startswith("https://") else ""


def released(text: str) -> str:
    """A page of this repository without the lines that a release makes untrue."""
    return re.sub(rf"^.*{UNTIL}\n", "", text, flags=re.MULTILINE)


def page(readme: str, at: Addresses) -> str:
    """README for a package index; without an address, links lose their target and a picture becomes its alt text."""
    picture = rf"![\1]({at.web}/raw/{at.ref}/\2)" if at.web else r"*\1.*" + "\n"
    text = re.sub(r"^!\[([^\]]*)\]\((?!https?:)([^)]*)\)", picture, released(readme), flags=re.MULTILINE)
    link = rf"[\1]({at.web}/blob/{at.ref}/\2)" if at.web else r"\1"
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)([^)]*)\)", link, text)


def project_urls(at: Addresses) -> str:
    """What pyproject.toml gets at its end, so that an index shows the addresses."""
    if not at.web:
        return ""
    urls = {
        "Repository": at.web,
        "Documentation": at.site or f"{at.web}/blob/{at.ref}/docs",
        "Changelog": f"{at.web}/blob/{at.ref}/CHANGELOG.md",
        "Issues": f"{at.web}/issues",
        "Security": f"{at.web}/blob/HEAD/SECURITY.md",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in urls.items())
