"""The commands' HTTP client of a running server: the admin API at `/v1/loras`, and the server's other routes.

Runs in the command's process, with one blocking call at a time. In: the server's address by `--url`; the key comes from
the environment alone, so that no list of processes shows the key. Out: answers as models of `api/models.py`; every
failure is raised as an error of ours, rebuilt from the server's answer where the server has sent one.
"""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import typer
from pydantic import BaseModel

from lora_plugins import errors
from lora_plugins.adapter.names import is_prefix
from lora_plugins.api.access.administrators import ADMIN_KEY, SEND_THE_KEY
from lora_plugins.api.models import AdapterList, AdapterView
from lora_plugins.cli import UsageProblem
from lora_plugins.client import is_here, is_sendable
from lora_plugins.client.attempt import object_of, replicas_of
from lora_plugins.errors import LoRAPluginsError, SourceUnavailable
from lora_plugins.settings import VARIABLES, environment
from lora_plugins.store.layout import is_digest

ServerUrl = Annotated[str, typer.Option("--url", envvar="LORA_PLUGINS_URL", help="The server's address.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for each answer of the server.")]
DEFAULT_URL = VARIABLES["LORA_PLUGINS_URL"].default or ""
VLLM_KEY = "VLLM_API_KEY"

_PATH = "/v1/loras"
_SHOWN_CHARACTERS = 300
_NUMBER = re.compile(r"\[Errno -?\d+\] ")  # of an error of the operating system

Model = TypeVar("Model", bound=BaseModel)


class AdminClient:
    """A server; every method raises the server's error, as an error of ours.

    Args:
        url: the server's address.
        timeout_s: of each call.
        keys: variables of the environment; the first that is set has the key.

    Raises:
        UsageProblem: `url` is no address of a server.
        InvalidSettings: the environment's key or proxy cannot be used.
    """

    def __init__(self, url: str, timeout_s: float, keys: Sequence[str] = (ADMIN_KEY, VLLM_KEY)) -> None:
        if "@" in url:
            raise UsageProblem(f"--url with a login, which errors would show: set {ADMIN_KEY} in its place")
        try:
            parts = urlsplit(url)
        except ValueError:
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageProblem(f"--url {url}: not http://host:port")
        self.url = url
        variable = next((name for name in keys if environment().get(name)), "")
        self._key = environment().get(variable)
        if self._key is not None and not is_sendable(self._key):
            raise errors.InvalidSettings(
                f"a key in {variable} that no header can have",
                expected="printable ASCII characters, and no space or line feed at the end",
                remedy=f"correct {variable}",
            )
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        # The system's certificates, not those of a Python package.
        verify = ssl.create_default_context() if parts.scheme == "https" else False
        try:
            self._http = httpx.Client(timeout=timeout_s, headers=headers, verify=verify, trust_env=not is_here(url))
        except (ImportError, ValueError) as error:
            raise errors.InvalidSettings(
                f"a proxy of the environment that cannot be used ({error})",
                expected="proxies at http:// or https://",
                remedy="correct ALL_PROXY, or the other variables of proxies",
            ) from None

    def adapters(self) -> AdapterList:
        """Return the adapters that the server serves, and has blocked, of all pages."""
        listed = page = self.ask(AdapterList, "GET", "")
        while page.next is not None:
            page = self.ask(AdapterList, "GET", f"?after={quote(page.next, safe='')}")
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
        """Return the server's answer at another path of its own, such as `/version`."""
        return self._send("GET", path, None, {}).decode(errors="replace")

    def whole_digest(self, name: str, prefix: str) -> str:
        """Return the whole digest of the served version that begins with `prefix`: the server takes whole digests only.

        Raises:
            VersionMismatch: another version is served.
        """
        if prefix == "*" or is_digest(prefix):
            return prefix
        try:
            served = self.ask(AdapterView, "GET", f"/{quote(name)}").digest or ""
        except errors.AdapterNotFound:
            served = ""
        if is_prefix(prefix) and served.startswith(prefix):
            return served
        raise errors.VersionMismatch(f"version {served}" if served else "no version", expected=prefix, adapter=name)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Return the answer, whatever its status, but a redirect.

        Raises:
            SourceUnavailable: no answer comes, or the answer leads elsewhere.
        """
        try:
            answer = self._http.request(method, self.url.rstrip("/").removesuffix("/v1") + path, **more)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = _NUMBER.sub("", str(error)) or type(error).__name__
            raise SourceUnavailable(
                f"no answer from {self.url} ({reason})",
                expected="a running vLLM server",
                remedy="check --url, and that the server runs",
            ) from None
        # Not followed: a POST would lose its body, or the key would go elsewhere.
        if 300 <= answer.status_code < 400:
            raise SourceUnavailable(
                f"a server at {self.url} that leads to {answer.headers.get('Location', 'another place')}",
                expected="the server itself",
                remedy="set --url to the address that it leads to",
            )
        return answer

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> bytes:
        answer = self.request(method, path, content=body, headers={"Accept": "application/json", **headers})
        if answer.is_error:
            raise self._refusal(answer, path.partition("?")[0])
        return answer.content

    def _refusal(self, answer: httpx.Response, path: str) -> LoRAPluginsError:
        (message, said), status = _said(object_of(answer.content)), answer.status_code
        if status in (401, 403):
            why = f": {said.found}" if said is not None else ""
            denied = f"a server at {self.url} that denies access (HTTP {status}{why})"
            # Not the key's fault: a caller's address, or a tenant without admin rights, as the server says.
            if said is not None and said.remedy != SEND_THE_KEY:
                return SourceUnavailable(denied, expected=said.expected, remedy=said.remedy)
            return SourceUnavailable(
                f"{denied}: {'the key is wrong' if self._key else 'no key was sent'}",
                expected="a key of the server's administrators",
                remedy=f"set {ADMIN_KEY} to the server's, or {VLLM_KEY} where the server has no admin key",
            )
        if said is not None:
            return said
        if status == 404:
            return SourceUnavailable(
                f"a server at {self.url} without {path}",
                expected="one with the admin API, or a key that may use it",
                remedy="name lora_admin and lora_lru_manager in the server's VLLM_PLUGINS",
            )
        shown = f"HTTP {status}" + (f": {message[:_SHOWN_CHARACTERS]}" if message else "")
        if status in (400, 422):
            return errors.InvalidAdapter(f"a request that the server refuses ({shown})")
        found, remedy = f"a server at {self.url} that answers {shown}", "look at the server's log"
        return SourceUnavailable(found, expected="HTTP 200", remedy=remedy)


def _of_replicas(answer: bytes) -> bytes:
    """Return the first of the answers of replicas on Ray Serve, if all have one digest; any other answer as it is."""
    replicas = replicas_of(object_of(answer))
    if not replicas or len({str(one.body.get("digest")) for one in replicas}) > 1:
        return answer
    return json.dumps(replicas[0].body).encode()


def _said(content: Mapping[str, Any]) -> tuple[str, LoRAPluginsError | None]:
    """Return the text of an error's body, of vLLM's or FastAPI's form, and the error of ours in the body, if any."""
    if replicas := replicas_of(content):
        # Only the beginning is shown, so the failures come first.
        said = [(one, *_said(one.body)) for one in sorted(replicas, key=lambda one: -one.status)]
        if len({text for _, text, _ in said}) == 1:
            return said[0][1:]
        return "; ".join(f"replica {one.replica}: {one.status} {text}".rstrip() for one, text, _ in said), None
    inner = content.get("error")
    body: dict[str, Any] = inner if isinstance(inner, dict) else {"message": content.get("detail") or inner}
    message = body.get("message")
    try:
        ours = errors.error_of(body["lora_plugins"])
    except (KeyError, TypeError):  # of vLLM, or of a release with other errors
        ours = None
    return message if isinstance(message, str) else "", ours
