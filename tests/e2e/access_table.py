"""What five principals reach on a real server: each route, for each name, as the table of docs/guides/access.md."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import httpx

from testbed.models import PROMPT

# Columns, and the key of each. Below /v1 vLLM itself refuses the first two.
PRINCIPALS = {
    "no key": None,
    "wrong key": "nobodys",
    "tenant": "key-a",
    "tenant with `pushes`": "key-b",
    "administrator": "key-root",
}
_BY_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
_CHAT = [{"role": "user", "content": "x"}]
_SHORT = {"prompt": PROMPT, "max_tokens": 1}
_GENERATED = {"request_id": "x", "choices": [{"index": 0, "token_ids": [5], "finish_reason": "stop"}]}

# Routes with a model in the body: a name is tried with each.
OF_A_MODEL: dict[str, dict[str, Any]] = {
    "/v1/completions": _SHORT,
    "/v1/completions/render": _SHORT,
    "/v1/completions/derender": {"generate_responses": [_GENERATED]},
    "/v1/chat/completions": {"messages": _CHAT, "max_tokens": 1},
    "/v1/chat/completions/batch": {"messages": [_CHAT], "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": _CHAT, "max_tokens": 1},
    "/v1/chat/completions/derender": {"generate_response": _GENERATED},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
    "/v1/responses/render": {"input": "x", "max_output_tokens": 1},
    "/v1/messages": {"messages": _CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": _CHAT},
    "/v1/messages/render": {"messages": _CHAT, "max_tokens": 1},
    "/generative_scoring": {"query": "x", "items": ["y"], "label_token_ids": [1, 2]},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1}},
    "/invocations": _SHORT,
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [1, 2]},
}
# Routes with a name in the path or in the query, in an order that leaves everything as it was.
OF_A_NAME = (
    ("PUT", "/v1/loras/{lora_name}"),
    ("GET", "/v1/loras/{lora_name}"),
    ("POST", "/v1/loras/{lora_name}/pause"),
    ("POST", "/v1/loras/{lora_name}/resume"),
    ("POST", "/v1/loras/{lora_name}/rollback"),
    ("POST", "/v1/loras/{lora_name}/prefetch"),
    ("POST", "/v1/loras/{lora_name}/pin"),
    ("POST", "/v1/loras/{lora_name}/unpin"),
    ("POST", "/v1/loras/{lora_name}/refresh"),
    ("DELETE", "/v1/loras/{lora_name}"),
)
OF_A_RESPONSE = (("GET", "/v1/responses/{response_id}"), ("POST", "/v1/responses/{response_id}/cancel"))
# The others. An administrator's body is a wrong one where a right one would end the server.
OTHERS = (
    *(("GET", path) for path in ("/health", "/ping", "/load", "/version", "/metrics", "/tokenizer_info")),
    *(("GET", path) for path in ("/docs", "/redoc", "/openapi.json")),
    ("POST", "/v1/systemone"),
    ("POST", "/ping"),
    ("GET", "/v1/loras"),
    ("POST", "/v1/loras"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/{adapter_name}"),
    ("POST", "/inference/v1/abort_requests"),
    ("GET", "/kv_event_sources"),
    ("POST", "/scale_elastic_ep"),
    ("POST", "/is_scaling_elastic_ep"),
)
# Without a body, or with a wrong level, most of them answer an administrator that the call is wrong.
OF_DEVELOPMENT_MODE = (
    *(("GET", f"/{name}") for name in ("server_info", "is_sleeping", "is_paused", "weight_info", "get_world_size")),
    *(("POST", f"/{name}") for name in ("collective_rpc", "abort_requests", "pause", "resume", "sleep?level=9")),
    *(("POST", f"/{name}") for name in ("wake_up", "release_kv_cache_memory")),
    *(("POST", f"/reset_{name}_cache") for name in ("prefix", "mm", "encoder")),
    *(("POST", f"/{name}") for name in ("update_weights", "update_weight_version", "weight_checker")),
    *(("POST", f"/{name}_weight_transfer_engine") for name in ("init", "shutdown")),
    *(("POST", f"/{name}_weight_update") for name in ("start", "start_draft", "finish")),
)
# Names that exist, and who may use them. `DIGEST` is that of team-b/sql; no adapter has `NODIGEST`.
PUBLIC, PUSHED = {"public/sql"}, {"team-b/pushed"}
OWN = {
    "no key": PUBLIC,
    "wrong key": PUBLIC,
    "tenant": {"team-a/sql", "shared"},
    "tenant with `pushes`": {"team-b/sql", "team-b/cold", "team-b/sql@DIGEST", "shared"},
}
EVERYTHING = set().union(*OWN.values())
# Names without an adapter that may be used, some of which look like one.
HIDDEN = (
    "team-a/blocked",
    "team-b/blocked",
    "team-a/nobody",
    "team-b/nobody",
    "team-a/sql@DIGEST",  # one's own name, and the digest of another's
    "team-a/sql@NODIGEST",
    "team-a/../team-b/sql",
    "team-b/\N{LATIN SMALL LETTER LONG S}ql",
    "team-\N{FULLWIDTH LATIN SMALL LETTER B}/sql",
    "Team-B/sql",
    "team-b/sql/",
)
BLOCKED = HIDDEN[:2]
Ask = Callable[..., httpx.Response]  # method, path, key and what httpx takes
Call = Callable[[str, str], httpx.Response]  # a principal, a name


def observed(ask: Ask, digest: str) -> str:
    """The table: routes whose cells are alike share a row."""
    cells: dict[str, list[str]] = {}

    def full(name: str) -> str:
        return name.replace("NODIGEST", "0" * 64).replace("DIGEST", digest)

    for path, body in OF_A_MODEL.items():

        def use(who: str, name: str, path: str = path, body: Mapping[str, Any] = body) -> httpx.Response:
            return ask("POST", path, PRINCIPALS[who], json={"model": full(name), **body})

        cells[f"POST {path}"] = [_used(who, use) for who in PRINCIPALS]

    def use_by_header(who: str, name: str) -> httpx.Response:
        headers = {_BY_HEADER: full(name).encode()}
        return ask("POST", "/invocations", PRINCIPALS[who], json=_SHORT, headers=headers)

    assert [_used(who, use_by_header) for who in PRINCIPALS] == cells["POST /invocations"]
    cells["GET /v1/models"] = [_listed(who, ask("GET", "/v1/models", key), full) for who, key in PRINCIPALS.items()]
    cells["GET /v1/models/{name}"] = [_carded(who, ask, full) for who in PRINCIPALS]
    for method, path in OF_A_RESPONSE:
        cells[f"{method} {path}"] = [_responded(ask, who, method, path) for who in PRINCIPALS]
    for method, path in OF_A_NAME:

        def call(who: str, name: str, method: str = method, path: str = path) -> httpx.Response:
            quoted = quote(full(name)).replace("..", "%2E%2E")  # else httpx takes the segment out
            return ask(method, path.replace("{lora_name}", quoted), PRINCIPALS[who])

        cells[f"{method} {path}"] = [_called(who, call) for who in PRINCIPALS]
    for method, path in (*OTHERS, *OF_DEVELOPMENT_MODE):
        # The server closes a connection after an error of its own.
        answers = [ask(method, path, key, headers={"Connection": "close"}).status_code for key in PRINCIPALS.values()]
        cells[f"{method} {path.partition('?')[0]}"] = [f"{it}" if it in {401, 403} else "yes" for it in answers]
    operations = ask("GET", "/openapi.json", None).json()["paths"].items()
    missing = {f"{method.upper()} {path}" for path, methods in operations for method in methods} - set(cells)
    assert not missing, f"routes that nobody has tried: {missing}"
    rows: dict[tuple[str, ...], list[str]] = {}
    for route, row in cells.items():
        rows.setdefault(tuple(row), []).append(f"`{route}`")
    lines = [("route", *PRINCIPALS), ("---",) * (1 + len(PRINCIPALS))]
    lines += [(", ".join(routes), *row) for row, routes in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _listed(who: str, answer: httpx.Response, full: Callable[[str], str]) -> str:
    if answer.status_code != 200:
        return f"{answer.status_code}"
    listed = {card["id"] for card in answer.json()["data"]}
    shown = {name for name in (*EVERYTHING, *HIDDEN) if full(name) in listed}
    return _word(who, shown | {name for name in OWN.get(who, EVERYTHING) if "@" in name})  # which no list shows


def _carded(who: str, ask: Ask, full: Callable[[str], str]) -> str:
    """Whose cards are shown, and that all others are answered as one name that does not exist is."""
    answers = {
        name: ask("GET", f"/v1/models/{quote(full(name)).replace('..', '%2E%2E')}", PRINCIPALS[who])
        for name in (*sorted(EVERYTHING), *HIDDEN)
    }
    shown = {name for name, answer in answers.items() if answer.status_code == 200}
    told = {(it.status_code, it.text.replace(full(name), "")) for name, it in answers.items() if name not in shown}
    if not shown:
        return " ".join(sorted({f"{status}" for status, _ in told}))
    assert len(told) == 1, told
    return _word(who, shown | {name for name in OWN.get(who, EVERYTHING) if "@" in name})


def _responded(ask: Ask, who: str, method: str, path: str) -> str:
    """Whose stored responses can be read, or told to end."""
    statuses = {}
    for owner, key in PRINCIPALS.items():
        own_id = f"resp_of_{owner.replace(' ', '-').replace('`', '')}"
        ask("POST", "/v1/responses", key, json={"input": "x", "max_output_tokens": 1, "request_id": own_id})
        statuses[owner] = ask(method, path.replace("{response_id}", own_id), PRINCIPALS[who]).status_code
    reached = {owner for owner, status in statuses.items() if status not in {401, 403, 404}}
    return "own" if reached == {who} else " ".join(sorted(reached or {f"{it}" for it in statuses.values()}))


def _used(who: str, use: Call) -> str:
    answers = {name: use(who, name) for name in (*sorted(EVERYTHING), *HIDDEN)}
    reached = {name for name, answer in answers.items() if answer.status_code not in {401, 403, 404}}
    # What a tenant hears of a name of its own may say more. All the others must be refused in the same words.
    own = {name.partition("/")[0] for name in OWN.get(who, EVERYTHING)}
    refusals = {
        _wording(answer): name
        for name, answer in answers.items()
        if name not in reached and (name.partition("/")[0] not in own or name.endswith("/nobody"))
    }
    if not reached and len(refusals) == 1:
        return f"{answers['Team-B/sql'].status_code}"
    of_digests = {_wording(answers[name]) for name in ("team-a/sql@DIGEST", "team-a/sql@NODIGEST")}
    assert len(of_digests) == 1, f"{who} learns that a digest exists: {of_digests}"
    assert len(refusals) <= 1 or who == "administrator", f"{who} is refused in several ways: {refusals}"
    return _word(who, reached)


def _wording(answer: httpx.Response) -> tuple[int, str, str]:
    """Status, text and headers, without what is of the name or of the moment."""
    sent = dict(answer.request.headers.raw)
    name = json.loads(answer.request.content).get("model") or sent[_BY_HEADER.encode()].decode("latin-1")
    text = re.sub("0{64}|[0-9a-f]{64}", "<digest>", answer.text.replace(name, "<name>"))
    told = [f"{it}: {value}" for it, value in answer.headers.items() if it not in {"date", "content-length"}]
    return answer.status_code, text, "; ".join(sorted(told))


def _called(who: str, call: Call) -> str:
    statuses = {name: call(who, name).status_code for name in (*sorted(EVERYTHING | PUSHED), *HIDDEN)}
    reached = {name for name, status in statuses.items() if status not in {401, 403}}
    return _word(who, reached) if reached else " ".join(sorted({f"{status}" for status in statuses.values()}))


def _word(who: str, reached: set[str]) -> str:
    if reached >= EVERYTHING:
        return "all"
    if reached == OWN.get(who):
        return "public" if reached == PUBLIC else "own"
    return "its pushes" if reached == PUSHED else " ".join(sorted(reached))
