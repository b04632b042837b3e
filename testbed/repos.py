"""Repositories of the local Hub: files with the names that git and LFS have for them, commits, branches and tags."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

_LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True)
class Blob:
    """A file's bytes and the names that git and LFS have for them."""

    data: bytes = field(repr=False)
    oid: str
    sha256: str | None  # only in LFS

    @classmethod
    def of(cls, path: str, data: bytes) -> Blob:
        sha256 = hashlib.sha256(data).hexdigest() if path.endswith(_LFS_SUFFIXES) else None
        stored = data if sha256 is None else cls.pointer(sha256, len(data))
        return cls(data, hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest(), sha256)

    @staticmethod
    def pointer(sha256: str, size: int) -> bytes:
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()

    def lfs(self, name: str) -> dict[str, object]:
        """The `lfs` member of a listing, where the digest is called `name`."""
        if self.sha256 is None:
            return {}
        size = len(self.data)
        return {"lfs": {name: self.sha256, "size": size, "pointerSize": len(self.pointer(self.sha256, size))}}


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    date: str
    files: Mapping[str, Blob] = field(repr=False)
    parent: Commit | None = field(repr=False)


@dataclass
class Repo:
    """`readers` are the tokens that see a private repository, `granted` those that may download from a gated one."""

    id: str
    branches: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, Commit] = field(default_factory=dict)
    pulls: dict[str, Commit] = field(default_factory=dict)
    commits: dict[str, Commit] = field(default_factory=dict)
    readers: frozenset[str] | None = None
    granted: frozenset[str] | None = None

    def commit(self, files: Mapping[str, bytes | None], branch: str, title: str) -> Commit:
        """Put files (None deletes) on top of a branch; a new branch starts from `main`."""
        self.branches[branch] = made = self._commit(
            files, branch, title, self.branches.get(branch) or self.branches.get("main")
        )
        return made

    def pull(self, files: Mapping[str, bytes | None], number: int) -> Commit:
        """Put files on top of `main` where anybody may: in a pull request."""
        self.pulls[f"{number}"] = made = self._commit(files, f"refs/pr/{number}", "Propose", self.branches["main"])
        return made

    def _commit(self, files: Mapping[str, bytes | None], branch: str, title: str, parent: Commit | None) -> Commit:
        tree = dict(parent.files) if parent else {}
        for path, data in files.items():
            tree.pop(path, None)
            if data is not None:
                tree[path] = Blob.of(path, data)
        content = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(tree.items()))
        identity = f"{self.id} {parent.sha if parent else ''} {branch} {title} {len(self.commits)}\n{content}"
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        made = Commit(hashlib.sha1(identity.encode()).hexdigest(), title, date, dict(sorted(tree.items())), parent)
        self.commits[made.sha] = made
        return made

    def at(self, revision: str) -> Commit | None:
        for prefix, names in (("refs/heads/", self.branches), ("refs/tags/", self.tags)):
            if revision.removeprefix(prefix) in names:
                return names[revision.removeprefix(prefix)]
        number = revision.removeprefix("refs/").removeprefix("pr/")
        if number != revision and number in self.pulls:  # git finds refs/pr/1 as pr/1 too
            return self.pulls[number]
        return self.commits.get(revision)


def info(repo: Repo, commit: Commit, *, blobs: bool = False, siblings: bool = True) -> dict[str, object]:
    """What the API says about a repository at a commit."""
    files = [
        {"rfilename": p, **({"size": len(b.data), "blobId": b.oid, **b.lfs("sha256")} if blobs else {})}
        for p, b in commit.files.items()
    ]
    return {
        "_id": hashlib.sha1(repo.id.encode()).hexdigest()[:24],
        "id": repo.id,
        "modelId": repo.id,
        "author": repo.id.split("/")[0],
        "sha": commit.sha,
        "lastModified": commit.date,
        "createdAt": commit.date,
        "private": repo.readers is not None,
        "gated": "manual" if repo.granted is not None else False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        **({"siblings": files} if siblings else {}),
    }


def refs(kind: str, names: Mapping[str, Commit]) -> list[dict[str, str]]:
    return [{"name": n, "ref": f"refs/{kind}/{n}", "targetCommit": c.sha} for n, c in names.items()]


def history(commit: Commit | None) -> list[dict[str, object]]:
    found = []
    while commit is not None:
        authors = [{"user": "somebody"}]
        found.append({"id": commit.sha, "title": commit.title, "message": "", "authors": authors, "date": commit.date})
        commit = commit.parent
    return found
