"""The page of a package index, made of README."""

from __future__ import annotations

from tools import check_links
from tools.index_page import UNTIL, Addresses, page, project_urls, released, web_address

README = (check_links.ROOT / "README.md").read_text(encoding="utf-8")
AT = Addresses("https://git.example.com/lora-plugins", "v1.2.3", "https://docs.example.com/")


def test_without_an_address_the_page_needs_no_repository() -> None:
    assert len(README.encode()) <= 5 * 1024
    shown = page(README, Addresses())
    assert [link["path"] for link in check_links.LINK.finditer(shown) if link["path"]] == []
    assert "](https://github.com/vllm-project/vllm)" in shown
    for kept in ("*The way of a request: ", "`lora_admin`", "Troubleshooting", "vllm serve HuggingFaceTB"):
        assert kept in shown
    assert "](" not in shown.replace("](https://", "")


def test_links_and_pictures_are_absolute_and_of_the_tag() -> None:
    shown = page(README, AT)
    assert "](" not in shown.replace("](https://", "")
    assert f"[Changelog]({AT.web}/blob/v1.2.3/CHANGELOG.md)" in shown
    assert f"]({AT.web}/raw/v1.2.3/docs/images/demo.svg)" in shown
    assert shown.count("![") == README.count("![") == 3


def test_the_page_of_a_release_says_nothing_of_before() -> None:
    assert UNTIL in f"{README}{UNTIL}"
    assert released(f"stays\ngoes {UNTIL}\nstays too\n") == "stays\nstays too\n"
    shown = page(README, AT)
    assert UNTIL not in shown
    assert "no index" not in shown
    assert shown.index("pip install lora-plugins") < shown.index("pip install .")


def test_addresses_show_no_key_and_name_each_place() -> None:
    assert web_address("https://key@git.example.com/lora-plugins.git") == AT.web
    assert web_address("ssh://git@git.example.com/lora-plugins.git") == ""
    assert project_urls(Addresses()) == ""
    urls = project_urls(AT)
    assert 'Documentation = "https://docs.example.com/"\n' in urls
    assert f'Repository = "{AT.web}"\n' in urls
