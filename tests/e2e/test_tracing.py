"""The span of a request for an adapter names the adapter and its version, below the client's own span."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from testbed.bed import Bed
from testbed.models import PROMPT
from tests.e2e.servers import admin_server
from tests.e2e.standing_still import LONGEST_S

traces = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")


@contextmanager
def collector() -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """A collector of OTLP on the loopback: its URL, and attributes of requests' spans by trace."""
    found: dict[str, dict[str, Any]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = traces.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
            for span in (span for of in sent.resource_spans for scope in of.scope_spans for span in scope.spans):
                if span.name == "llm_request":
                    named = {one.key: one.value.string_value for one in span.attributes}
                    found[span.trace_id.hex()] = named | {"parent": span.parent_span_id.hex()}
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", found
        server.shutdown()


def test_spans_name_adapters_below_the_clients_own(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "adapters").symlink_to(bed.adapters)
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    asked = [
        ("sql", "/v1/completions", {"prompt": PROMPT}),
        ("team/poet", "/v1/completions", {"prompt": PROMPT, "stream": True}),
        ("chat", "/v1/chat/completions", chat),
        (str(bed.base), "/v1/chat/completions", chat),
    ]
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with (
        collector() as (url, found),
        admin_server(bed, tmp_path, "--otlp-traces-endpoint", url, **environment) as server,
    ):
        wanted = {}
        for name, route, body in asked:
            trace, parent = secrets.token_hex(16), secrets.token_hex(8)
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            question = {"model": name, "max_tokens": 2, **body}
            answer = httpx.post(server.url + route, json=question, headers=headers, timeout=LONGEST_S)
            assert answer.status_code == 200, answer.text
            is_base = name == str(bed.base)
            named = {"gen_ai.request.model": name, "lora_adapter.digest": answer.headers.get("x-lora-digest")}
            wanted[trace] = {"parent": parent} | ({} if is_base else named)
        deadline = time.monotonic() + LONGEST_S
        while found.keys() != wanted.keys() and time.monotonic() < deadline:
            time.sleep(0.1)
    ours = ("parent", "gen_ai.request.model", "lora_adapter.digest")
    assert {trace: {key: of[key] for key in ours if key in of} for trace, of in found.items()} == wanted
