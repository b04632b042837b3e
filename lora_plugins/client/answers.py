"""Answers to the client: of a server, or of all replicas behind one address of Ray Serve."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from lora_plugins.replica_answers import object_of, rows_of

Heard = httpx.Response | BaseException


@dataclass(frozen=True)
class Answer:
    """The answer of one server or replica.

    Attributes:
        status: of HTTP; 0 without an answer.
        body: the JSON object; empty for any other body.
        text: for people.
    """

    status: int
    body: Mapping[str, Any]
    text: str

    def is_done(self, needs: str) -> bool:
        """Whether the call was done; the body of a done call has a value of the key `needs`."""
        # A pause that another client's resume has ended is answered with 200, and did not last.
        return self.status == 200 and isinstance(self.body.get(needs), str) and self.body.get("status") != "resumed"

    @property
    def is_refusal(self) -> bool:
        """Whether the server itself has refused the call, and not a proxy that lost the server's answer."""
        return 300 <= self.status < 500 or "[L0" in self.text


def answers_of(heard: Heard) -> list[Answer]:
    """Return one answer for each server or replica."""
    if isinstance(heard, BaseException):
        return [Answer(0, {}, f"{type(heard).__name__}: {heard}")]
    body = object_of(heard.content)
    if not (rows := rows_of(body)):
        # Not followed: it would change the method, or carry the key and the adapter elsewhere.
        leads = f"leads to {heard.headers['Location']} " if heard.has_redirect_location else ""
        return [Answer(heard.status_code, body, f"{heard.status_code} {leads}{heard.text}")]
    return [
        Answer(it["status"], it["body"], f"replica {it['replica']}: {it['status']} {json.dumps(it['said'])}")
        for it in rows
    ]


def error_of(answers: list[Answer], needs: str) -> str | None:
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
