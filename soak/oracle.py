"""What the server may answer, and when: the model of the world that every answer is compared with.

For each name, *claims* are open or closed over time: that a version may be served, that there may be no such adapter
(404), that the name may not be registered. Whoever changes the world opens what may come to be so before the change,
and closes what can be so no longer after it. An answer is right if it is that of a claim which was open at some moment
while the request ran. Any other refusal needs a fault that explains it, a *cause*: with whom the fault may reach, what
it may cause, and since when and until when. A fault counts where it has hit: the proxy of a source says which requests
it broke, and those say for which name. What no cause explains is a violation.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

from soak.bank import Bank

Refusal = tuple[int, str]
"""Status and code."""
SOURCE_FAILS: frozenset[Refusal] = frozenset({(503, "L006")})
DISK_IS_FULL: frozenset[Refusal] = frozenset({(507, "L004")})

# How long after its last hit a fault may still refuse: two seconds for which an outage is remembered, and what a loaded
# machine needs to say so.
AFTER_S = 15.0
# What the server says where it has not asked the source: the breaker is open, or all places are taken.
UNASKED = ("asked only now and then", "too many names that this server", "slow to answer", "that have not ended")
# What it says where the time was over, which began with a hit and did not end with one.
OVERDUE, LONGEST_FLIGHT_S = "no complete answer within", 45.0


@dataclass(eq=False)
class Cause:
    """One fault.

    Attributes:
        whom: a name, `of_source` of one, or `DISK`.
        ended: when it can refuse nobody any more; infinite while it is on.
        texts: only what says one of these; all where empty.
    """

    what: str
    whom: str
    began: float
    ended: float = math.inf
    refusals: frozenset[Refusal] = SOURCE_FAILS
    texts: tuple[str, ...] = ()

    def explains(self, refusal: Refusal, text: str, began: float, ended: float) -> bool:
        after_s = LONGEST_FLIGHT_S - AFTER_S if OVERDUE in text and not self.texts else 0.0
        if refusal not in self.refusals or self.began > ended or self.ended + after_s < began:
            return False
        return not self.texts or any(said in text for said in self.texts)


DISK = "@disk"


def of_source(source: str) -> str:
    """Everybody whose adapter is looked for there."""
    return f"@{source}"


class Causes:
    """All causes of a soak; `look` is called before they are asked: a hit may be a moment old."""

    def __init__(self) -> None:
        self._causes: dict[str, list[Cause]] = defaultdict(list)
        self.look: list[Callable[[], None]] = []

    def add(self, cause: Cause) -> Cause:
        self._causes[cause.whom].append(cause)
        return cause

    def explaining(self, whom: Iterable[str], refusal: Refusal, text: str, began: float, ended: float) -> Cause | None:
        """The cause of a refusal of a request that ran between these; None where there was none."""
        self.refresh()
        causes = (cause for one in whom for cause in reversed(self._causes.get(one, ())))
        return next((cause for cause in causes if cause.explains(refusal, text, began, ended)), None)

    def held_up(self, whom: Iterable[str], began: float, ended: float) -> bool:
        """Whether any fault was on while a request ran."""
        self.refresh()
        return any(c.began <= ended and c.ended >= began for one in whom for c in self._causes.get(one, ()))

    def may_refuse(self, whom: Iterable[str], at: float, status: int | None = None) -> bool:
        """Whether any refusal, or one of this status, could be explained at this moment."""
        return any(
            cause.began <= at <= cause.ended
            for one in whom
            for cause in self._causes.get(one, ())
            if status is None or any(allowed == status for allowed, _ in cause.refusals)
        )

    def forget(self, before: float) -> None:
        """Drop what ended before this time."""
        for whom, causes in list(self._causes.items()):
            causes[:] = [cause for cause in causes if cause.ended >= before]
            if not causes:
                del self._causes[whom]

    def end_all(self, at: float) -> None:
        """No fault explains anything after this time."""
        self.refresh()
        for causes in self._causes.values():
            for cause in causes:
                cause.ended = min(cause.ended, at)

    def refresh(self) -> None:
        """Hear of what has been hit until now."""
        for look in self.look:
            look()


class Claim(Enum):
    """What else may be so of a name, beside the versions (which are numbers)."""

    ABSENT = "absent"  # no source has it, or it is blocked: 404
    UNREGISTERED = "unregistered"  # the next request has to ask the sources
    GIVEN_WAY = "given way"  # its copy may have left a full disk: the next request has to fetch it
    UNLOADING = "unloading"  # a request that is held may be refused (L001), and one that runs may be ended


Label = int | Claim


class Windows:
    """Since when and until when each claim of one name was open."""

    def __init__(self) -> None:
        self._windows: dict[Label, list[list[float]]] = defaultdict(list)

    def open(self, label: Label, at: float) -> None:
        """From here on; one that is open, or was to close later, stays open."""
        windows = self._windows[label]
        if windows and windows[-1][1] >= at:
            windows[-1][1] = math.inf
        else:
            windows.append([at, math.inf])

    def close(self, label: Label, at: float) -> None:
        """At this time, which may lie ahead; one that was to close earlier does so."""
        windows = self._windows[label]
        if windows and windows[-1][1] > at:
            windows[-1][1] = at

    def during(self, began: float, ended: float) -> set[Label]:
        """The claims that were open at some moment between these."""
        return {
            label
            for label, windows in self._windows.items()
            if any(opened <= ended and closed >= began for opened, closed in reversed(windows))
        }

    def history(self) -> dict[str, list[list[float]]]:
        """All of it, for people."""
        return {str(label): [list(window) for window in windows] for label, windows in self._windows.items()}

    def forget(self, before: float) -> None:
        """Drop what closed before this time."""
        for windows in self._windows.values():
            windows[:] = [window for window in windows if window[1] >= before]


@dataclass(frozen=True)
class Answer:
    """What a client saw.

    Attributes:
        status: the HTTP status; 0 where the connection broke.
        token_ids: None where the route shows text only.
        is_whole: the answer ended by itself, with as many tokens as were asked for.
        reason: vLLM's `finish_reason`.
        digest: of the version that made it, as its header says.
    """

    status: int
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    is_whole: bool = True
    reason: str = "length"
    error: str = ""
    digest: str | None = None

    @property
    def code(self) -> str:
        """Of our errors; empty where it is none of them."""
        return code_of(self.error)


def code_of(text: str) -> str:
    found = re.search(r"\[(L\d{3})\]", text)
    return found[1] if found else ""


@dataclass(frozen=True)
class Asked:
    """What a client asked for; `adapter` is its number, None for a name that nobody has, -1 for the base model."""

    name: str
    adapter: int | None
    form: str
    prompt: int
    max_tokens: int
    began: float
    ended: float


class Oracle:
    """Judges answers; see the module."""

    def __init__(self, bank: Bank, names: Iterable[str]) -> None:
        self._bank = bank
        self._windows = {name: Windows() for name in names}
        self.causes = Causes()
        self.sources_of: dict[str, tuple[str, ...]] = {}
        """The sources whose failure may keep a name from being resolved, by name."""
        self._down = Windows()
        self.gave_way_at = -math.inf
        """When copies may have left a full disk for the last time."""
        self.explained: Counter[str] = Counter()
        """Refusals, by what explains them."""
        self.refused: set[str] = set()
        """Names that a fault has had refused; they are asked again when it is over."""
        self._looks, self._allowed_looks = 0, Counter[str]()

    def of(self, name: str) -> Windows:
        """The claims of a name."""
        return self._windows[name]

    @property
    def down(self) -> Windows:
        """When the server may be gone altogether: label 0."""
        return self._down

    def is_down(self, began: float, ended: float) -> bool:
        return bool(self._down.during(began, ended))

    def whom(self, name: str, claims: set[Label]) -> tuple[str, ...]:
        """Whose faults may refuse a request for this name, while these claims are open: a full disk's always."""
        if name not in self._windows or Claim.ABSENT in claims:  # all sources are asked
            return name, of_source("s3"), of_source("hub"), DISK
        if Claim.UNREGISTERED in claims or Claim.GIVEN_WAY in claims:
            return name, *map(of_source, self.sources_of[name]), DISK
        return (DISK,)

    def count_allowed(self, at: float) -> None:
        """Note for which names a 503 would be right at this moment; nothing while there is no server."""
        if self.is_down(at, at):
            return
        self.causes.refresh()
        self._looks += 1
        for name, windows in self._windows.items():
            claims = windows.during(at, at)
            if Claim.UNLOADING in claims or self.causes.may_refuse(self.whom(name, claims), at, 503):
                self._allowed_looks[name] += 1

    def may_be_late(self, asked: Asked) -> bool:
        """Whether a fault, or a server that was not there, may have held a request up."""
        if self.is_down(asked.began, asked.ended):
            return True
        whom = self.whom(asked.name, self._claims(asked.name, asked.began, asked.ended))
        return self.causes.held_up(whom, asked.began, asked.ended)

    def no_longer_refused(self) -> list[str]:
        """The names that a fault had refused, and that no fault may refuse now; each once."""
        now = time.monotonic()
        self.causes.refresh()
        over = [
            name
            for name in self.refused
            if not self.causes.may_refuse(self.whom(name, self._claims(name, now, now)), now)
        ]
        self.refused -= set(over)
        return over

    def _claims(self, name: str, began: float, ended: float) -> set[Label]:
        return self.of(name).during(began, ended) if name in self._windows else {Claim.ABSENT}

    def allowed_parts(self) -> dict[str, float]:
        """The part of the time in which a 503 was allowed, by name, the largest first."""
        looks = max(1, self._looks)
        return {name: count / looks for name, count in self._allowed_looks.most_common()}

    def forget(self, before: float) -> None:
        self.causes.forget(before)
        for windows in self._windows.values():
            windows.forget(before)

    def judge(self, asked: Asked, answer: Answer) -> str | None:
        """What is wrong with an answer; None where it is right."""
        if answer.reason == "left":
            return self._judge_tokens(asked, answer) if answer.text or answer.token_ids else None
        if self.is_down(asked.began, asked.ended) and (answer.status in (0, 500, 503) or not answer.is_whole):
            return None
        if answer.status == 200:
            if asked.name in self._windows and asked.began > self.gave_way_at:  # the request has leased the copy
                self.of(asked.name).close(Claim.GIVEN_WAY, asked.ended)
            return self._judge_tokens(asked, answer)
        if answer.digest is not None:
            return f"a refusal with a digest, {answer.digest}"
        why = self._explanation(asked, answer)
        if why is not None:
            self.explained[why] += 1
            return None
        return f"status {answer.status} that nothing explains: {answer.error[:300]}"

    def judge_digest(self, asked: Asked, answer: Answer) -> str | None:
        """What is wrong with the digest of an answer that has begun; None where it is that of a valid version."""
        if asked.adapter is None or asked.adapter == -1:
            return None if answer.digest is None else f"a digest where no adapter answers, {answer.digest}"
        if answer.digest is None:
            return "an adapter's answer without a digest"
        whose = self._bank.versions_by_digest.get(answer.digest)
        if whose is None or whose[0] != asked.adapter or whose[1] not in self._versions(asked):
            return f"the digest of {whose} where only versions {sorted(self._versions(asked))} were valid"
        return None

    def _versions(self, asked: Asked) -> set[int]:
        claims: set[Label] = {0} if asked.adapter == -1 else self.of(asked.name).during(asked.began, asked.ended)
        return {label for label in claims if isinstance(label, int)}

    def _explanation(self, asked: Asked, answer: Answer) -> str | None:
        """What makes a refusal right."""
        if asked.adapter == -1:
            return None
        claims = self._claims(asked.name, asked.began, asked.ended)
        if answer.status == 404 and Claim.ABSENT in claims:
            return "absent"
        if answer.status == 503 and Claim.UNLOADING in claims:
            return "unloading"
        refusal = (answer.status, answer.code)
        cause = self.causes.explaining(self.whom(asked.name, claims), refusal, answer.error, asked.began, asked.ended)
        if cause is None:
            return None
        self.refused.add(asked.name)
        return cause.what

    def _judge_tokens(self, asked: Asked, answer: Answer) -> str | None:
        if asked.adapter is None:
            return f"an answer for a name that nobody has: {answer.text!r}" if answer.status == 200 else None
        versions = sorted(self._versions(asked))
        if answer.status == 200:
            may_be_ended = asked.adapter != -1 and Claim.UNLOADING in self.of(asked.name).during(
                asked.began, asked.ended
            )
            wrong = self._judge_end(asked, answer, may_be_ended)
            if wrong is not None:
                return wrong
        fitting = [version for version in versions if self._is_of(asked.adapter, version, asked, answer)]
        if not fitting:
            return f"{self._describe(asked, answer)} where only versions {versions} were valid"
        wrong = self.judge_digest(asked, answer)
        if wrong is not None or answer.digest is None:
            return wrong
        _, said = self._bank.versions_by_digest[answer.digest]
        return None if said in fitting else f"the digest of version {said}, and the answer of {fitting}"

    def _judge_end(self, asked: Asked, answer: Answer, may_be_ended: bool) -> str | None:
        count = None if answer.token_ids is None else len(answer.token_ids)
        if not answer.is_whole or answer.reason != "length":
            if may_be_ended or self.is_down(asked.began, asked.ended):
                return None
            return f"an answer that ended too early ({answer.reason}), with {answer.text!r} {answer.error}"
        if count is not None and count != asked.max_tokens:
            return f"{count} tokens where {asked.max_tokens} were asked for"
        return None

    def _is_of(self, adapter: int, version: int, asked: Asked, answer: Answer) -> bool:
        expected = self._bank.answers[adapter, version, asked.form, asked.prompt][: asked.max_tokens]
        is_whole = answer.is_whole and answer.reason == "length"
        if answer.token_ids is not None:
            return answer.token_ids == (expected if is_whole else expected[: len(answer.token_ids)])
        text = self._bank.text(expected)
        return answer.text == text if is_whole else text.startswith(answer.text)

    def _describe(self, asked: Asked, answer: Answer) -> str:
        """Whose answer a wrong one is."""
        for adapter, version, form, prompt in self._bank.answers:
            if (form, prompt) == (asked.form, asked.prompt) and self._is_of(adapter, version, asked, answer):
                whose = {asked.adapter: "its own", -1: "the base model's"}.get(adapter, f"adapter {adapter}'s")
                return f"{whose} version {version} answered"
        return f"an answer that no version gives, {answer.text!r}"
