"""What the owner of a repository has published: its branches and tags, and the commits that one of them reaches.

The Hub also finds commits of pull requests, which anybody can open, by their hash or by other spellings of `refs/pr/7`.
So what it found is compared with the branches and tags that it lists.
"""

from __future__ import annotations

from huggingface_hub import HfApi

from lora_plugins.resolvers.sources.hub.patterns import DEFAULT_REVISION, HubTarget

_OWN_BY_NAME = ("refs/heads/", "refs/tags/")


def is_own(target: HubTarget) -> bool:
    """Whether the revision is the owner's, or the operator's choice, whatever commit the Hub says it is."""
    return target.is_pinned or target.revision == DEFAULT_REVISION or target.revision.startswith(_OWN_BY_NAME)


def is_published(api: HfApi, target: HubTarget, commit: str) -> bool:
    """Whether a branch or tag reaches the commit that the Hub has found for the target.

    One request; further ones, a branch's whole history each, only where `commit` is not the newest of any.

    Raises:
        Exception: whatever `huggingface_hub` raises.
    """
    refs = api.list_repo_refs(target.repo)
    own = [*refs.branches, *refs.tags]
    if any(commit == ref.target_commit for ref in own):
        return True
    reached: set[str] = set()
    for ref in own:
        if ref.target_commit not in reached:
            reached.update(made.commit_id for made in api.list_repo_commits(target.repo, revision=ref.target_commit))
            if commit in reached:
                return True
    return False
