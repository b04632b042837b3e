"""The allow-list of repositories: what it reads, what it lets through, and what a pin means."""

from __future__ import annotations

import pytest
from huggingface_hub.utils import HFValidationError, validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import AdapterNotFound, InvalidSettings
from lora_plugins.resolvers.sources.hub_repos import HubPatterns, HubTarget
from lora_plugins.resolvers.sources.uri import SourceUri, is_repo


def match(entries: str, name: str) -> HubTarget | str:
    return HubPatterns.parse(entries).match(AdapterName.parse(name))


def target(repo: str, folder: str, revision: str, explicit: bool, is_pinned: bool = False) -> HubTarget:
    org, *path = filter(None, f"{repo}/{folder}".split("/"))
    return HubTarget(SourceUri("hf", org, tuple(path)), revision, explicit, is_pinned)


@pytest.mark.parametrize(
    ("entries", "name", "found"),
    [
        ("org/repo", "org/repo", target("org/repo", "", "main", True)),
        ("org/repo", "org/repo/a/b", target("org/repo", "a/b", "main", True)),
        ("org/repo", "org/repo/a@v1", target("org/repo", "a", "v1", True)),
        ("org/repo@refs/pr/1", "org/repo", target("org/repo", "", "refs/pr/1", True, True)),
        ("org/repo", "org/repo@refs/tags/1", target("org/repo", "", "refs/tags/1", True)),
        ("org/repo/a", "org/repo/a", target("org/repo", "a", "main", True)),
        ("org/repo/a", "org/repo/a/b", target("org/repo", "a/b", "main", True)),
        ("org/*", "org/any/a", target("org/any", "a", "main", False)),
        ("org/*@v1", "org/any", target("org/any", "", "v1", False, True)),
        ("org/repo@v1", "org/repo", target("org/repo", "", "v1", True, True)),
        ("org/repo@v1", "org/repo@v1", target("org/repo", "", "v1", True, True)),
        (" a/b , org/repo ", "org/repo", target("org/repo", "", "main", True)),
        # The most specific entries decide.
        ("org/*, org/repo@v1", "org/repo", target("org/repo", "", "v1", True, True)),
        ("org/*, org/repo@v1", "org/other@v2", target("org/other", "", "v2", False)),
        ("org/repo@v1, org/repo/a", "org/repo/a@v2", target("org/repo", "a", "v2", True)),
        # Several pins of one target are all served, the first by default.
        ("org/repo@v2, org/repo@v1", "org/repo", target("org/repo", "", "v2", True, True)),
        ("org/repo@v2, org/repo@v1", "org/repo@v1", target("org/repo", "", "v1", True, True)),
        ("org/repo@v2, org/repo", "org/repo@v9", target("org/repo", "", "v9", True)),
    ],
)
def test_names_on_the_list_match(entries, name, found):
    assert match(entries, name) == found


OUTSIDE = {
    "org/repo": [
        *("org", "repo", "org/rep", "org/repo2", "org/repository/repo", "Org/repo", "x/org/repo"),
        "org/repo@refs/pr/1",
    ],
    "org/repo/a": ["org/repo", "org/repo/ab"],
    "org/repo/a/b": ["org/repo/a"],
    "org/*": [
        *("org2/repo", "org/a--b", "org/a..b", "org/repo.git", "org/modèle", "org/*"),
        "org/repo@refs/convert/parquet",
    ],
    "org/repo@v1": ["org/repo@v2", "org/repo@main"],
    "org/*, org/repo@v1": ["org/repo@v2"],
    "org/*@v1": ["org/any@main"],
    "org/*, org/repo@refs/pr/1": ["org/repo@refs/pr/2"],
    "": ["org/repo"],
}


@pytest.mark.parametrize(("entries", "name"), [(entries, name) for entries, them in OUTSIDE.items() for name in them])
def test_names_outside_the_list_do_not_match(entries, name):
    patterns = HubPatterns.parse(entries.split(",") if entries else [])
    assert isinstance(patterns.match(AdapterName.parse(name)), str)


@pytest.mark.parametrize(
    "entry",
    [
        *("", "repo", "*", "*/*", "*/repo", "o*/repo", "org/re*", "org/**", "org/*/a", "org/repo/a*", "org/repo/"),
        *("/org/repo", "org//repo", "org/../x", "org/repo/../x", "org/a--b", "org/repo@", "org/repo@a@b"),
        *("hf://org/repo", "org/repo\n"),
    ],
)
def test_startup_fails_with_a_malformed_entry(entry):
    if entry.strip() != entry:
        entry = f"a\n{entry}"
    with pytest.raises(InvalidSettings, match="VLLM_LORA_RESOLVER_HF_REPO_LIST"):
        HubPatterns.parse([entry])


def test_a_list_is_shown_as_it_was_given():
    text = "org/*, org/repo/a b@refs/pr/1, a/b@v1"
    assert str(HubPatterns.parse(text)) == text


PART = st.text(st.sampled_from("ab.-_A0*é/@ "), max_size=8)


@given(st.text(st.sampled_from("ab.-_A0é/"), max_size=110))
def test_a_repository_is_never_one_that_huggingface_hub_refuses(text):
    if is_repo(text):
        validate_repo_id(text)
    elif text.count("/") == 1 and text.isascii():  # older versions let letters of any script through
        with pytest.raises(HFValidationError):
            validate_repo_id(text)


@given(st.lists(PART, min_size=1, max_size=4), st.lists(PART, min_size=1, max_size=4))
def test_a_target_is_the_name_itself_and_below_an_entry(entry, text):
    try:
        patterns = HubPatterns.parse(["/".join(entry)])
        name = AdapterName.parse("/".join(text))
    except (InvalidSettings, AdapterNotFound):
        return
    found = patterns.match(name)
    if isinstance(found, HubTarget):
        assert "/".join(part for part in (found.uri.repo, found.uri.subfolder) if part) == name.path
        listed = str(patterns).partition("@")[0].removesuffix("/*")
        assert f"{name.path}/".startswith(f"{listed}/")
        assert found.revision == (name.revision or str(patterns).partition("@")[2] or "main")
