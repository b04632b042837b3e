"""A push to one address and its undoing, and how answers are read.

Runs in the trainer's process, in the event loop of a call of `lora_plugins.client`. In: the body of a push, and HTTP
answers. Out: what each server has answered, which versions are served there, and whether a rollback has succeeded.

An address is of one server, or of an application on Ray Serve, where one call reaches several replicas, and each has
its own answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Heard = httpx.Response | BaseException  # what came of a call: an answer, or the error in its place
_LOOK_S = 10.0
_SECRET = re.compile(r"(?<=//)[^/?#]*@|[?#].*")  # login, query and fragment of a URL
# With these errors the server has not got the whole body, and so cannot take the push.
_UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.WriteError,
    httpx.WriteTimeout,
)


@dataclass(frozen=True)
class OneAnswer:
    """The answer of one server or replica.

    Attributes:
        status: of HTTP; 0 without an answer.
        body: the JSON object; empty for any other body.
        text: for people.
        replica: the replica's name on Ray Serve; empty for a server.
    """

    status: int
    body: Mapping[str, Any]
    text: str
    replica: str = ""

    def is_done(self, needs: str) -> bool:
        """Whether the call was done; the body of a done call has a value of the key `needs`."""
        # A pause that another client's resume has ended is answered with 200, and did not last.
        return self.status == 200 and isinstance(self.body.get(needs), str) and self.body.get("status") != "resumed"

    @property
    def is_refusal(self) -> bool:
        """Whether the server itself has refused the call, and not a proxy that lost the server's answer."""
        return 300 <= self.status < 500 or "[L0" in self.text


def object_of(answer: str | bytes) -> dict[str, Any]:
    """Return the JSON object in an answer; empty for any other text, such as a proxy's page."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def replicas_of(content: Mapping[str, Any]) -> list[OneAnswer]:
    """Return the answers of the replicas of an application on Ray Serve; none for any other answer."""
    rows = content.get("replicas")
    if not isinstance(rows, list) or not all(isinstance(it, dict) and isinstance(it.get("status"), int) for it in rows):
        return []
    answers = []
    for row in rows:
        said, replica = row.get("body"), str(row.get("replica", ""))
        text = f"replica {replica}: {row['status']} {json.dumps(said)}"
        answers.append(OneAnswer(row["status"], said if isinstance(said, dict) else {}, text, replica))
    return answers


def answers_of(heard: Heard) -> list[OneAnswer]:
    """Return one answer for each server or replica."""
    if isinstance(heard, BaseException):
        return [OneAnswer(0, {}, f"{type(heard).__name__}: {heard}")]
    body = object_of(heard.content)
    if replicas := replicas_of(body):
        return replicas
    # A redirect is not followed: it would change the method, or carry the key and the adapter elsewhere.
    leads = f"leads to {_SECRET.sub('…', heard.headers['Location'])} " if heard.has_redirect_location else ""
    return [OneAnswer(heard.status_code, body, f"{heard.status_code} {leads}{heard.text}")]


def error_of(answers: list[OneAnswer], needs: str) -> str | None:
    """Return what all replicas answered, if one has not done the call."""
    if answers and all(it.is_done(needs) for it in answers):
        return None
    return ", ".join(it.text for it in answers) or "no answer"


def served_digests(heard: Heard) -> set[str | None] | None:
    """Return the digests that a name has on all replicas, None for "not served"; without digests if one is unknown."""
    digests: set[str | None] = set()
    for it in answers_of(heard):
        if it.status == 404 or it.body.get("state") in ("draining", "blocked"):
            digests.add(None)
        elif it.is_done("digest"):
            digests.add(it.body["digest"])
        else:
            return None
    return digests


class Attempt:
    """A push to one address: of a server, or of all replicas on Ray Serve.

    Attributes:
        answers: of the server or the replicas; none until they have come.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, query: Mapping[str, str]) -> None:
        self.answers: list[OneAnswer] = []
        self._client = client
        self._url = url
        self._query = query
        self._before: set[str | None] | None = None
        self._is_lost = False  # the server may have taken the push, or take the push yet

    async def send(self, body: bytes, headers: Mapping[str, str], *, looks_first: bool) -> None:
        """Push; with `looks_first`, ask before which version is served, so that a lost answer can be settled."""
        try:
            if looks_first:
                self._before = served_digests(await self._client.get(self._url))
            self._is_lost = True
            heard: Heard = await self._client.put(self._url, content=body, headers=headers, params=self._query)
        except Exception as error:  # noqa: BLE001 - every server must be heard before a rollback
            heard = error
        self.answers = answers_of(heard)
        is_refused = isinstance(heard, _UNSENT) or all(it.is_refusal for it in self.answers)
        self._is_lost = self._is_lost and self.error is not None and not is_refused

    @property
    def error(self) -> str | None:
        """The text of a failed push."""
        return error_of(self.answers, "digest")

    @property
    def digests(self) -> set[str]:
        """Digests of the pushed version, as the server or the replicas that took the push have answered."""
        return {it.body["digest"] for it in self.answers if it.is_done("digest")}

    async def undo(self, pushed: Collection[str]) -> bool:
        """Go back to the version before, unless another push came since.

        Args:
            pushed: digests of the pushed version on all servers that answered.

        Returns:
            Whether the pushed version is surely not served, or was served before too.
        """
        try:
            changes = self._taken() if self.digests else await self._found(pushed)
            return changes is not None and all([await self._go_back(*it) for it in changes.items()])
        except Exception:  # noqa: BLE001 - an answer that nobody understands settles nothing
            return False

    def _taken(self) -> dict[str, set[str | None]]:
        """Return the versions before, by pushed version; an empty digest is a version without a digest."""
        changes: dict[str, set[str | None]] = {}
        for body in (it.body for it in self.answers if it.is_done("digest")):
            before = body.get("previous_digest")
            if before is None and body.get("swapped"):
                before = ""
            if before != body["digest"]:
                changes.setdefault(body["digest"], set()).add(before)
        return changes

    async def _found(self, pushed: Collection[str]) -> dict[str, set[str | None]] | None:
        """Return the same where no answer came, from what is served now; None if that does not settle the question."""
        if not self._is_lost:
            return {}
        if self._before is None:
            return None
        now = served_digests(await self._client.get(self._url, timeout=_LOOK_S))
        if now is None:
            return None
        new = {it for it in now - self._before if it is not None and (not pushed or it in pushed)}
        return dict.fromkeys(new, self._before) or None

    async def _go_back(self, digest: str, before: set[str | None]) -> bool:
        named = [it for it in before if it is not None]
        if len(named) > 1 or "" in named:
            return False
        # One call reaches all replicas; `If-Match` keeps those out that another push has changed, or that refused.
        headers = {"If-Match": digest}
        if named:
            body: dict[str, Any] = {"digest": named[0], "running": self._query["mode"]}
            heard = await self._client.post(f"{self._url}/rollback", json=body, headers=headers)
        else:
            heard = await self._client.delete(self._url, headers=headers)
        statuses = {it.status for it in answers_of(heard)}
        return statuses <= ({200, 412} if named else {200, 404, 412})
