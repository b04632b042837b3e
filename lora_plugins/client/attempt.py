"""A push to one address and its undoing, and how answers are read.

Runs in the trainer's process, in the event loop of a call of `lora_plugins.client`. In: the body of a push, and HTTP
answers. Out: what each server has answered, which versions are served there, and whether a rollback has succeeded.

An address is of one server, or of an application on Ray Serve, where one call reaches several replicas, and the answer
has a row for each replica. An answer may be *lost*: the server may have taken the push without the client's knowing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Heard = httpx.Response | BaseException  # the result of a call: an answer, or the error in its place
_LOOK_S = 10.0  # for the question which version is served, after a lost answer
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
        status: the HTTP status; 0 where an error came in the place of an answer.
        body: the JSON object in the answer; empty for any other content.
        text: the answer or the error, for people.
        replica: the replica's name on Ray Serve; empty for a server.
    """

    status: int
    body: Mapping[str, Any]
    text: str
    replica: str = ""

    def is_done(self, needs: str) -> bool:
        """Whether the call was done, and the body has a text under the key `needs`, as a done call's body has."""
        # A pause that another client's resume has ended is answered with 200, and did not last.
        return self.status == 200 and isinstance(self.body.get(needs), str) and self.body.get("status") != "resumed"

    @property
    def is_refusal(self) -> bool:
        """Whether the server itself has refused the call, and not a proxy that lost the server's answer."""
        # Errors of lora-plugins have a code such as [L004] in their text, whatever their status.
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
    """Return the texts of all answers where one or more have not done the call; None where the call was done.

    `needs`: as in `OneAnswer.is_done`.
    """
    if answers and all(it.is_done(needs) for it in answers):
        return None
    return ", ".join(it.text for it in answers) or "no answer"


def served_digests(heard: Heard) -> set[str | None] | None:
    """Return the digests that a name has on the replicas, from their answers; None in the set stands for "not served".

    Returns None in the place of a set where an answer does not say what its replica serves.
    """
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
        answers: the answers of the server or the replicas; empty before `send` has ended.
    """

    def __init__(self, client: httpx.AsyncClient, url: str, query: Mapping[str, str]) -> None:
        self.answers: list[OneAnswer] = []
        self._client = client
        self._url = url
        self._query = query
        self._before: set[str | None] | None = None  # of `served_digests` before the push; None where not known
        # The client has no answer that settles the push: the server may have taken the push, or may take it yet.
        self._is_lost = False

    async def send(self, body: bytes, headers: Mapping[str, str], *, looks_first: bool) -> None:
        """Push, and note the answers, or the error in their place; raises nothing.

        With `looks_first`, ask before the push which version is served, so that `undo` can settle a lost answer.
        """
        try:
            if looks_first:
                self._before = served_digests(await self._client.get(self._url))
            self._is_lost = True
            heard: Heard = await self._client.put(self._url, content=body, headers=headers, params=self._query)
        except Exception as error:  # noqa: BLE001 - every server must be heard before a rollback
            heard = error
        self.answers = answers_of(heard)
        # Surely not taken: the server has not got the body, or every replica has refused.
        is_refused = isinstance(heard, _UNSENT) or all(it.is_refusal for it in self.answers)
        self._is_lost = self._is_lost and self.error is not None and not is_refused

    @property
    def error(self) -> str | None:
        """The text of a failed push; None where the push succeeded on the server or on every replica."""
        return error_of(self.answers, "digest")

    @property
    def digests(self) -> set[str]:
        """Digests of the pushed version, as the server or the replicas that took the push have answered."""
        return {it.body["digest"] for it in self.answers if it.is_done("digest")}

    async def undo(self, pushed: Collection[str]) -> bool:
        """Go back to the version served before this push, unless another push has changed the name since.

        Args:
            pushed: digests of the pushed version on all servers that answered.

        Returns:
            Whether the pushed version is surely not served now, or was served before this push too.
        """
        try:
            # Digests to go back from, each with the digests to go back to; without answers, from a look at the server.
            changes = self._taken() if self.digests else await self._found(pushed)
            return changes is not None and all([await self._go_back(*it) for it in changes.items()])
        except Exception:  # noqa: BLE001 - an answer that nobody understands settles nothing
            return False

    def _taken(self) -> dict[str, set[str | None]]:
        """Return, by pushed digest, the digests served before, as the answers say; without unchanged names.

        None stands for "not served", and an empty digest for a version without a digest.
        """
        changes: dict[str, set[str | None]] = {}
        for body in (it.body for it in self.answers if it.is_done("digest")):
            before = body.get("previous_digest")
            if before is None and body.get("swapped"):  # a version that only the workers had was served before
                before = ""
            if before != body["digest"]:
                changes.setdefault(body["digest"], set()).add(before)
        return changes

    async def _found(self, pushed: Collection[str]) -> dict[str, set[str | None]] | None:
        """Return as `_taken` does, where no answer says that the push was taken, from a look at what is served now.

        Returns None where the look does not settle whether the pushed version is served, or will be.
        """
        if not self._is_lost:
            return {}  # surely not taken, so there is nothing to go back from
        if self._before is None:  # not known what to go back to
            return None
        now = served_digests(await self._client.get(self._url, timeout=_LOOK_S))
        if now is None:
            return None
        # Versions that were not served before the push; if other servers have said the pushed digest, only this digest.
        new = {it for it in now - self._before if it is not None and (not pushed or it in pushed)}
        # Without a new version, the server may take the push yet: not settled.
        return dict.fromkeys(new, self._before) or None

    async def _go_back(self, digest: str, before: set[str | None]) -> bool:
        """Roll back from `digest` to the version `before`, or unload where none was served; whether this was done."""
        named = [it for it in before if it is not None]
        if len(named) > 1 or "" in named:  # one call cannot go back to several versions, or to one without a digest
            return False
        # One call reaches all replicas. With `If-Match`, a replica that serves another version than `digest` answers
        # 412: another push has changed the name there, or the replica refused this push.
        headers = {"If-Match": digest}
        if named:
            body: dict[str, Any] = {"digest": named[0], "running": self._query["mode"]}
            heard = await self._client.post(f"{self._url}/rollback", json=body, headers=headers)
        else:
            heard = await self._client.delete(self._url, headers=headers)
        # A name that is not served (404) needs no unload; a rollback has to find the name.
        statuses = {it.status for it in answers_of(heard)}
        return statuses <= ({200, 412} if named else {200, 404, 412})
