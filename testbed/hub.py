"""A Hugging Face Hub on loopback, in memory: enough of its HTTP API for the real `huggingface_hub` to work with it.

    with local_hub() as hub:
        first = hub.commit("team/sql", {"adapter_config.json": b"{}", "adapter_model.safetensors": weights})
        hub.tag("team/sql", "v1")
        hub.private("team/secret", tokens=["hf_reader"])
        ...
        assert hub.count("GET", r"/resolve/.*safetensors") == 1

Only models; no Xet, so every file comes over plain HTTP. What it answers is modelled on what the client in
`huggingface_hub` reads, and on the messages that the real Hub is known to give.
"""

from __future__ import annotations

import hashlib
import re
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode

from aiohttp import web

from testbed.listener import Listener
from testbed.repos import Blob, Commit, Repo, history, info, refs

_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")
_VERBS = frozenset(("revision", "tree", "refs", "commits", "auth-check"))


@dataclass
class Request:
    """One request as it was seen."""

    method: str
    path: str  # decoded, without the query
    query: str
    range: str | None
    authorized: bool  # a token was sent
    status: int | None = None
    sent: int = 0


class _Refused(Exception):
    def __init__(self, status: int, code: str | None, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.headers = status, code, message, headers or {}


class Hub(Listener):
    """A running Hub. Its repositories may be changed at any time, from any thread.

    `page_size` cuts listings into pages; with `redirects`, large files come from another origin, as from a CDN.
    """

    def __init__(self, *, page_size: int = 1000, redirects: bool = False, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(self._handle, tls)
        self.page_size = page_size
        self.redirects = redirects
        self.users: dict[str, str] = {}
        self._repos: dict[str, Repo] = {}
        self._moved: dict[str, str] = {}
        self._requests: list[Request] = []
        self._lock = threading.RLock()

    # What tests do

    def commit(
        self, repo: str, files: Mapping[str, bytes | None], *, branch: str = "main", title: str = "Update"
    ) -> str:
        """Add or replace files (None deletes) on top of a branch, creating what is missing; the new commit's hash."""
        with self._lock:
            return self._repos.setdefault(repo, Repo(repo)).commit(files, branch, title).sha

    def tag(self, repo: str, name: str, revision: str = "main") -> None:
        self._repos[repo].tags[name] = self._repos[repo].at(revision)

    def branch(self, repo: str, name: str, revision: str = "main") -> None:
        self._repos[repo].branches[name] = self._repos[repo].at(revision)

    def pull_request(self, repo: str, files: Mapping[str, bytes | None], number: int = 1) -> str:
        """Add files to `main` in a pull request, which no branch or tag reaches; the commit's hash."""
        with self._lock:
            return self._repos[repo].pull(files, number).sha

    def private(self, repo: str, tokens: Iterable[str] = ()) -> None:
        """Hide the repository from all but the bearers of `tokens`."""
        self._repos[repo].readers = frozenset(tokens)
        self._know(tokens)

    def gated(self, repo: str, tokens: Iterable[str] = ()) -> None:
        """Let everyone see the repository, and only the bearers of `tokens` download from it."""
        self._repos[repo].granted = frozenset(tokens)
        self._know(tokens)

    def user(self, token: str, name: str = "somebody") -> str:
        """Make `token` a valid one; a token that is not known is refused everywhere."""
        self.users[token] = name
        return token

    def move(self, repo: str, to: str) -> None:
        """Rename a repository; the old name redirects."""
        with self._lock:
            moved = self._repos[to] = self._repos.pop(repo)
            moved.id = to
            self._moved[repo] = to

    def delete(self, repo: str) -> None:
        del self._repos[repo]

    def reset(self) -> None:
        """Forget repositories, users and requests."""
        with self._lock:
            for kept in (self._repos, self._moved, self.users, self._requests):
                kept.clear()

    def requests(self, method: str | None = None, path: str = "") -> list[Request]:
        """The requests so far, oldest first, with this method and with `path` (a regular expression) in their path."""
        with self._lock:
            return [r for r in self._requests if method in (None, r.method) and re.search(path, r.path)]

    def count(self, method: str | None = None, path: str = "") -> int:
        return len(self.requests(method, path))

    def forget(self) -> None:
        """Forget the requests so far."""
        with self._lock:
            self._requests.clear()

    def env(self, home: Path, *, token: str | None = None, url: str | None = None) -> dict[str, str]:
        """Environment of a process that uses this Hub (or a proxy of it at `url`) and keeps its cache in `home`.

        An empty token is as good as none, and hides one that the machine has.
        """
        return {
            "HF_ENDPOINT": url or self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_TOKEN": token or "",
            "HUGGING_FACE_HUB_TOKEN": "",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def _know(self, tokens: Iterable[str]) -> None:
        for token in tokens:
            self.users.setdefault(token, "somebody")

    # What it answers

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        token = request.headers.get("Authorization", "").removeprefix("Bearer ") or None
        seen = Request(request.method, unquote(path), query, request.headers.get("Range"), token is not None)
        with self._lock:
            self._requests.append(seen)
            try:
                answer = self._route(request, path.lstrip("/").split("/"), dict(parse_qsl(query)), token)
            except _Refused as refused:
                headers = {"X-Error-Message": refused.message, **refused.headers}
                if refused.code is not None:
                    headers["X-Error-Code"] = refused.code
                answer = web.json_response({"error": refused.message}, status=refused.status, headers=headers)
        seen.status = answer.status
        if request.method == "GET" and answer.body is not None:
            seen.sent = len(answer.body)
        return answer

    def _route(
        self, request: web.BaseRequest, parts: list[str], query: dict[str, str], token: str | None
    ) -> web.Response:
        if parts[0] == "-":
            return self._content(request, self._blob(parts[-1]), {})
        if token is not None and token not in self.users:
            raise _Refused(401, None, "Invalid credentials in Authorization header")
        if parts[:2] == ["api", "whoami-v2"]:
            if token is None:
                raise _Refused(401, None, "Invalid username or password.")
            return web.json_response({"type": "user", "name": self.users[token], "orgs": []})
        if parts[:2] == ["api", "models"]:
            if len(parts) == 2:
                return self._models(request, query, token)
            size = 1 if len(parts) == 3 or parts[3] in _VERBS else 2
            name, rest, prefix = "/".join(parts[2 : 2 + size]), [unquote(p) for p in parts[2 + size :]], "/api/models/"
        elif "resolve" in parts[1:3]:
            size = parts.index("resolve")
            name, rest, prefix = "/".join(parts[:size]), [unquote(p) for p in parts[size:]], "/"
        else:
            raise _Refused(404, None, "Sorry, we can't find the page you are looking for.")
        if name in self._moved:
            tail = "".join(f"/{quote(p, safe='')}" for p in rest) + (f"?{urlencode(query)}" if query else "")
            return web.Response(status=307, headers={"Location": f"{prefix}{self._moved[name]}{tail}"})
        return self._repo(request, self._visible(name, token), rest, query, token)

    def _visible(self, name: str, token: str | None) -> Repo:
        repo = self._repos.get(name)
        if repo is None or (repo.readers is not None and token not in repo.readers):
            # Missing and hidden look the same; without a token, the answer is to log in.
            if token is None:
                raise _Refused(401, "RepoNotFound", "Invalid username or password.")
            raise _Refused(404, "RepoNotFound", "Repository not found")
        return repo

    def _repo(
        self, request: web.BaseRequest, repo: Repo, rest: list[str], query: dict[str, str], token: str | None
    ) -> web.Response:
        verb, arguments = (rest[0], rest[1:]) if rest else ("revision", ["main"])
        if verb == "refs":
            return web.json_response(
                {
                    "branches": refs("heads", repo.branches),
                    "tags": refs("tags", repo.tags),
                    "converts": [],
                    **({"pullRequests": refs("pr", repo.pulls)} if "include_prs" in query else {}),
                }
            )
        if verb in ("resolve", "auth-check") and repo.granted is not None and token not in repo.granted:
            text = f"Access to model {repo.id} is restricted"
            if token is None:
                text += ". You must have access to it and be authenticated to access it. Please log in."
                raise _Refused(401, "GatedRepo", text)
            text += f" and you are not in the authorized list. Visit {self.url}/{repo.id} to ask for access."
            raise _Refused(403, "GatedRepo", text)
        if verb == "auth-check":
            return web.Response(text="OK")
        commit = repo.at(arguments[0]) if arguments else None
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {arguments[0] if arguments else ''}")
        if verb == "revision":
            return web.json_response(info(repo, commit, blobs=query.get("blobs", "").lower() == "true"))
        if verb == "tree":
            return self._tree(request, commit, "/".join(arguments[1:]), query)
        if verb == "commits":
            return self._page(request, history(commit), query)
        return self._resolve(request, commit, "/".join(arguments[1:]))

    def _tree(self, request: web.BaseRequest, commit: Commit, folder: str, query: dict[str, str]) -> web.Response:
        prefix = f"{folder}/" if folder else ""
        recursive = query.get("recursive", "").lower() in ("true", "1")
        entries: dict[str, dict[str, object]] = {}
        for path, blob in commit.files.items():
            if not path.startswith(prefix):
                continue
            below = path[len(prefix) :].split("/")
            for depth in range(1, len(below) if recursive else min(2, len(below))):
                name = prefix + "/".join(below[:depth])
                tree = hashlib.sha1(f"tree {commit.sha} {name}".encode()).hexdigest()
                entries.setdefault(name, {"type": "directory", "oid": tree, "size": 0, "path": name})
            if recursive or len(below) == 1:
                file = {"type": "file", "oid": blob.oid, "size": len(blob.data), "path": path, **blob.lfs("oid")}
                entries[path] = file
        if not entries and folder:
            raise _Refused(404, "EntryNotFound", f'{folder} does not exist on "{commit.sha}"')
        return self._page(request, list(entries.values()), query)

    def _models(self, request: web.BaseRequest, query: dict[str, str], token: str | None) -> web.Response:
        shown = [
            info(repo, repo.branches["main"], siblings="full" in query)
            for name, repo in sorted(self._repos.items())
            if (repo.readers is None or token in repo.readers)
            and query.get("author", name.split("/")[0]) == name.split("/")[0]
            and query.get("search", "").lower() in name.lower()
        ]
        return self._page(request, shown, query)

    def _page(self, request: web.BaseRequest, items: list[dict[str, object]], query: dict[str, str]) -> web.Response:
        start, size = int(query.get("cursor", 0)), min(self.page_size, int(query.get("limit", self.page_size)))
        headers = {}
        if start + size < len(items):
            following = urlencode({**query, "cursor": start + size})
            path = request.raw_path.partition("?")[0]
            headers["Link"] = f'<http://{request.headers["Host"]}{path}?{following}>; rel="next"'
        return web.json_response(items[start : start + size], headers=headers)

    def _resolve(self, request: web.BaseRequest, commit: Commit, path: str) -> web.Response:
        headers = {"X-Repo-Commit": commit.sha}
        blob = commit.files.get(path)
        if blob is None:
            raise _Refused(404, "EntryNotFound", "Entry not found", headers)
        if blob.sha256 is not None:
            headers |= {"X-Linked-Size": str(len(blob.data)), "X-Linked-ETag": f'"{blob.sha256}"'}
            if self.redirects:
                # Another host name, and so another origin: the client must not send its token there.
                location = f"http://localhost:{self.port}/-/{blob.sha256}"
                return web.Response(status=302, headers={**headers, "Location": location})
        return self._content(request, blob, headers)

    def _blob(self, sha256: str) -> Blob:
        for repo in self._repos.values():
            for commit in repo.commits.values():
                for blob in commit.files.values():
                    if blob.sha256 == sha256:
                        return blob
        raise _Refused(403, None, "AccessDenied")

    def _content(self, request: web.BaseRequest, blob: Blob, headers: Mapping[str, str]) -> web.Response:
        size = len(blob.data)
        sent = {**headers, "ETag": f'"{blob.sha256 or blob.oid}"', "Accept-Ranges": "bytes"}
        asked = _RANGE.match(request.headers.get("Range", ""))
        if request.method == "HEAD" or not asked or not any(asked.groups()):
            return web.Response(body=blob.data, headers=sent, content_type="application/octet-stream")
        first, last = asked.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(size, int(last) + 1 if first and last else size)
        if start >= end:
            raise _Refused(416, None, "Range Not Satisfiable", {"Content-Range": f"bytes */{size}"})
        sent["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        body = blob.data[start:end]
        return web.Response(status=206, body=body, headers=sent, content_type="application/octet-stream")


@contextmanager
def local_hub(*, page_size: int = 1000, redirects: bool = False, tls: ssl.SSLContext | None = None) -> Iterator[Hub]:
    """Run a Hub until the block ends."""
    hub = Hub(page_size=page_size, redirects=redirects, tls=tls)
    hub.start()
    try:
        yield hub
    finally:
        hub.stop()
