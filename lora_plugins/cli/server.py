"""The command line's client of a running server; the key comes from the environment alone."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import typer
from pydantic import BaseModel

from lora_plugins.adapter.names import is_prefix
from lora_plugins.api.access.administrators import ADMIN_KEY, SEND_THE_KEY
from lora_plugins.api.models import AdapterList
from lora_plugins.cli.exits import UsageProblem
from lora_plugins.errors import KINDS, InvalidAdapter, LoRAPluginsError, SourceUnavailable, VersionMismatch
from lora_plugins.replica_answers import object_of, rows_of
from lora_plugins.settings import VARIABLES, environment
from lora_plugins.store.layout import is_digest

ServerUrl = Annotated[str, typer.Option("--url", envvar="LORA_PLUGINS_URL", help="The server's address.")]
DEFAULT_URL = VARIABLES["LORA_PLUGINS_URL"].default or ""
_KEYS = (ADMIN_KEY, "VLLM_API_KEY")

_PATH = "/v1/loras"
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_PAGE = 5_000  # names; a few megabytes
_MAX_BYTES = 64 << 20
_SHOWN_CHARACTERS = 300
_ERROR = re.compile(
    r"\[(?P<code>L\d{3})\] (?:(?:adapter '(?P<adapter>.*?)')?(?:, )?(?:file '(?P<file>.*?)')?: )?found (?P<found>.*?)"
    r"(?:; expected (?P<expected>.*?))?(?:\. To fix: (?P<remedy>.*))?\.",
    re.DOTALL,
)
_BY_CODE = {kind.code: kind for kind in KINDS}

Model = TypeVar("Model", bound=BaseModel)


def _key_of_environment() -> str | None:
    env = environment()
    return next((env[name] for name in _KEYS if env.get(name)), None)


@dataclass(frozen=True, slots=True)
class AdminClient:
    """A server; every method raises the server's error, as an error of ours.

    Raises at construction:
        UsageProblem: `url` is no address of a server.
    """

    url: str
    timeout_s: float
    key: str | None = field(default_factory=_key_of_environment, repr=False)

    def __post_init__(self) -> None:
        if "@" in self.url:
            raise UsageProblem(f"--url with a login, which errors would show: set {ADMIN_KEY} in its place")
        try:
            parts = urlsplit(self.url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageProblem(f"--url {self.url}: not http://host:port")

    def adapters(self) -> AdapterList:
        """Return the adapters that the server serves, and has blocked: in pages, as an answer is limited."""
        listed = page = self.ask(AdapterList, "GET", f"?limit={_PAGE}")
        while page.next is not None:
            page = self.ask(AdapterList, "GET", f"?limit={_PAGE}&after={quote(page.next, safe='')}")
            listed.loras += page.loras
        listed.count, listed.next = len(listed.loras), None
        return listed

    def ask(
        self,
        kind: type[Model],
        method: str,
        path: str,
        body: BaseModel | bytes | None = None,
        *,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Model:
        """Return the admin API's answer at a path below `/v1/loras`."""
        headers = {**(headers or {}), **({"If-Match": if_match} if if_match is not None else {})}
        if isinstance(body, BaseModel):
            headers["Content-Type"] = "application/json"
            content: bytes | None = body.model_dump_json(exclude_none=True, exclude_defaults=True).encode()
        else:
            content = body
        answer = self._send(method, _PATH + path, content, headers)
        try:
            # Lists of replicas may differ, and none stands for all of them.
            return kind.model_validate_json(answer if kind is AdapterList else _of_replicas(answer))
        except ValueError:
            what = "list of adapters" if kind is AdapterList else kind.__name__
            raise SourceUnavailable(
                f"an answer of {self.url}{_PATH} that is no {what}",
                expected="the admin API of lora-plugins",
                remedy="check --url, and that server and command line are of one version",
            ) from None

    def text(self, path: str) -> str:
        """Return the server's answer at another path of its own, such as `/metrics`."""
        return self._send("GET", path, None, {}).decode(errors="replace")

    def whole_digest(self, name: str, prefix: str) -> str:
        """Return the whole digest of the served version that begins with `prefix`: the server takes whole digests only.

        Raises:
            VersionMismatch: another version is served.
        """
        if prefix == "*" or is_digest(prefix):
            return prefix
        served = next((one.digest for one in self.adapters().loras if one.lora_name == name and one.digest), "")
        if is_prefix(prefix) and served.startswith(prefix):
            return served
        raise VersionMismatch(f"version {served}" if served else "no version", expected=prefix, adapter=name)

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        # Not `httpx`, whose import takes a tenth of a second.
        request = urllib.request.Request(  # noqa: S310 - checked at construction
            self.url.rstrip("/").removesuffix("/v1") + path,
            data=body,
            headers={"Accept": "application/json", **headers},
            method=method,
        )
        if self.key:
            request.add_header("Authorization", f"Bearer {self.key}")
        try:
            # As `DIRECT` of the client: no proxy for this machine.
            direct = [urllib.request.ProxyHandler({})] if urlsplit(self.url).hostname in _THIS_MACHINE else []
            with urllib.request.build_opener(_WithinServer, *direct).open(request, timeout=self.timeout_s) as answer:
                return bytes(answer.read(_MAX_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                if 300 <= error.code < 400:
                    raise SourceUnavailable(
                        f"a server at {self.url} that leads to {error.headers.get('Location', 'another place')}",
                        expected="the server itself",
                        remedy="set --url to the address that it leads to",
                    ) from None
                raise self._refusal(error.code, _message(error), path.partition("?")[0]) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise SourceUnavailable(
                f"no answer from {self.url} ({getattr(reason, 'strerror', None) or reason or type(reason).__name__})",
                expected="a running vLLM server",
                remedy="check --url, and that the server runs",
            ) from None

    def _refusal(self, status: int, message: str, path: str) -> LoRAPluginsError:
        said = _error_of(message)
        if status in (401, 403):
            why = f": {said.found}" if said is not None else ""
            denied = f"a server at {self.url} that denies access (HTTP {status}{why})"
            # Not the key's fault: a caller's address, or a tenant without admin rights, as the server says.
            if said is not None and said.remedy != SEND_THE_KEY:
                return SourceUnavailable(denied, expected=said.expected, remedy=said.remedy)
            return SourceUnavailable(
                f"{denied}: {'the key is wrong' if self.key else 'no key was sent'}",
                expected="a key of the server's administrators",
                remedy=f"set {_KEYS[0]} to the server's, or {_KEYS[1]} where the server has no admin key",
            )
        if said is not None:
            return said
        if status == 404:
            return SourceUnavailable(
                f"a server at {self.url} without {path}",
                expected="one with the admin API, or a key that may use it",
                remedy="name lora_admin and lora_lru_manager in the server's VLLM_PLUGINS",
            )
        shown = f": {message[:_SHOWN_CHARACTERS]}" if message else ""
        if status in (400, 422):
            return InvalidAdapter(f"a request that the server refuses (HTTP {status}{shown})")
        return SourceUnavailable(
            f"a server at {self.url} that answers HTTP {status}{shown}",
            expected="HTTP 200",
            remedy="look at the server's log",
        )


class _WithinServer(urllib.request.HTTPRedirectHandler):
    """Follows a redirect of a GET within the server: any other would lose a POST's body, or carry the key elsewhere."""

    def redirect_request(self, *given: Any) -> urllib.request.Request | None:
        """Leave any other redirect an error."""
        asked, to = given[0], given[-1]
        stays = asked.get_method() == "GET" and urlsplit(to)[:2] == urlsplit(asked.full_url)[:2]
        return super().redirect_request(*given) if stays else None


def _of_replicas(answer: bytes) -> bytes:
    """Return the first of the answers of replicas on Ray Serve, if all have one digest; any other answer as it is."""
    rows = rows_of(object_of(answer))
    if not rows or len({str(row["body"].get("digest")) for row in rows}) > 1:
        return answer
    return json.dumps(rows[0]["body"]).encode()


def _message(error: urllib.error.HTTPError) -> str:
    """Return the text of an error, or of the errors of replicas on Ray Serve."""
    try:
        content = object_of(error.read(_MAX_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return ""
    if not (rows := rows_of(content)):
        return _text_of(content)
    texts = {_text_of(row["body"]) for row in rows}
    if len(texts) == 1:
        return texts.pop()
    # Only the beginning is shown, so the failures come first.
    rows = sorted(rows, key=lambda row: int(row["status"]), reverse=True)
    return "; ".join(f"replica {row['replica']}: {row['status']} {_text_of(row['body'])}".rstrip() for row in rows)


def _text_of(content: Mapping[str, Any]) -> str:
    """Return the text of an error's body: vLLM's `error.message`, or FastAPI's `detail`."""
    inner = content.get("error")
    message = inner.get("message") if isinstance(inner, dict) else content.get("detail") or inner
    return message if isinstance(message, str) else ""


def _error_of(message: str) -> LoRAPluginsError | None:
    """Return the error of ours that says `message`, or None."""
    # Servers send our errors as text: read back, an error keeps its code, and so its exit code.
    match = _ERROR.fullmatch(message)
    fields = match.groupdict("") if match else {}
    kind = _BY_CODE.get(fields.pop("code", ""))
    return None if kind is None else kind(**fields)
