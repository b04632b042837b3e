"""Each fault arrives at a client as planned, only where planned, and everything is recorded."""

from __future__ import annotations

import http.client
import os
import time

import pytest

from testbed import faults
from testbed.proxy import FaultProxy, fault_proxy
from testbed.ranges import range_server

DATA = os.urandom(300_000)
KEY = "/b/sql/w.safetensors"


@pytest.fixture(scope="module")
def upstream():
    with range_server(blobs={KEY[1:]: DATA, "b/sql/config.json": b"{}"}) as server:
        yield server


@pytest.fixture
def proxy(upstream):
    with fault_proxy(upstream.url) as running:
        yield running


def get(proxy: FaultProxy, path: str = KEY, method: str = "GET", timeout: float = 60, **headers: str):
    """Status, headers and body of one request on a connection of its own; a broken one keeps what had arrived."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=timeout)
    body = bytearray()
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        while piece := answer.read1(65536):
            body += piece
        return answer.status, answer.headers, bytes(body)
    except (OSError, http.client.HTTPException) as error:
        error.body = bytes(body)
        raise
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        (faults.server_error(), 500, b"<Code>InternalError</Code>"),
        (faults.slow_down(), 503, b"<Code>SlowDown</Code>"),
        (faults.denied(), 403, b"<Code>AccessDenied</Code>"),
        (faults.expired_token(), 400, b"<Code>ExpiredToken</Code>"),
        (faults.too_many(7), 429, b"Too many"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_statuses_are_answered_once_and_without_the_upstream(proxy, upstream, fault, status, text):
    upstream.reset()
    proxy.plan(fault)
    got, headers, body = get(proxy)
    assert (got, text in body) == (status, True)
    assert headers.get("Retry-After") == ("7" if status == 429 else None)
    assert upstream.stats()["requests"] == 0
    assert get(proxy)[0] == 200
    proxy.plan(fault)
    assert get(proxy, method="HEAD")[2] == b""


def test_reset_in_the_body(proxy):
    proxy.plan(faults.reset(after=100_000))
    with pytest.raises(ConnectionResetError) as caught:
        get(proxy)
    assert caught.value.body == DATA[:100_000]
    assert [(r.sent, r.complete, r.fault) for r in proxy.requests()] == [(100_000, False, "reset")]


def test_short_body(proxy):
    proxy.plan(faults.short(after=1000))
    with pytest.raises(http.client.IncompleteRead):
        _read_whole(proxy)
    assert proxy.bytes_sent() == 1000


def _read_whole(proxy: FaultProxy, **headers: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    try:
        connection.request("GET", KEY, headers=headers)
        return connection.getresponse().read()
    finally:
        connection.close()


def test_stalls_before_the_headers_and_in_the_body(proxy):
    for after in (None, 1000):
        proxy.plan(faults.stall(0.3, after))
        started = time.monotonic()
        assert get(proxy)[2] == DATA
        assert time.monotonic() - started >= 0.3
    proxy.plan(faults.stall(600))
    with pytest.raises(TimeoutError):
        get(proxy, timeout=0.2)
    proxy.plan(faults.stall(600, after=1000))
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    connection.request("GET", KEY)
    answer = connection.getresponse()
    assert answer.read(1000) == DATA[:1000]
    connection.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        answer.read(1)
    connection.close()


def test_a_flipped_byte_of_the_body_or_of_the_object(proxy):
    proxy.plan(faults.flip(200_000))
    body = get(proxy)[2]
    assert [i for i in range(len(DATA)) if body[i] != DATA[i]] == [200_000]
    proxy.plan(faults.flip(200_000, in_object=True), times=None)
    assert get(proxy, Range="bytes=0-199999")[2] == DATA[:200_000]
    part = get(proxy, Range="bytes=199999-200001")[2]
    assert [a == b for a, b in zip(part, DATA[199_999:200_002], strict=True)] == [True, False, True]


def test_bandwidth(proxy):
    proxy.plan(faults.throttle(600_000))
    started = time.monotonic()
    assert get(proxy)[2] == DATA
    assert time.monotonic() - started > 0.4


def test_after_an_outage_the_same_port_answers_again(proxy):
    kept = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
    kept.request("HEAD", KEY)
    kept.getresponse().read()
    proxy.refuse()
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        get(proxy)
    with pytest.raises(ConnectionResetError):
        kept.sock.recv(1)
    kept.close()
    proxy.refuse(False)
    assert get(proxy)[2] == DATA


def test_matching_by_method_path_query_times_and_order(proxy):
    proxy.plan(faults.server_error(), method="GET", path=r"\.safetensors$", times=2, skip=1)
    proxy.plan(faults.denied(), path=r"/b\?list-type=2", times=None)
    assert [get(proxy)[0] for _ in range(4)] == [200, 500, 500, 200]
    assert get(proxy, "/b/sql/config.json")[0] == 200
    assert [get(proxy, "/b?list-type=2")[0] for _ in range(2)] == [403, 403]
    proxy.clear()
    assert get(proxy, "/b?list-type=2")[0] == 200


def test_requests_and_ranges_fetched_twice_are_counted(proxy):
    get(proxy, Range="bytes=0-99")
    proxy.plan(faults.short(after=10))
    with pytest.raises(http.client.IncompleteRead):
        _read_whole(proxy, Range="bytes=100-199")
    get(proxy, Range="bytes=100-199")
    assert proxy.refetched() == []
    assert [r.range for r in proxy.requests("GET")] == ["bytes=0-99", "bytes=100-199", "bytes=100-199"]
    get(proxy, Range="bytes=0-99")
    _settle(proxy, 310)  # a client can have its answer a moment before the proxy has noted it
    assert proxy.refetched() == [(f"{KEY}?", "bytes=0-99")]
    assert proxy.counts() == {("GET", KEY): 4}
    assert proxy.bytes_sent(r"w\.safetensors") == 310
    proxy.forget()
    assert proxy.count() == 0


def _settle(proxy, sent_bytes):
    deadline = time.monotonic() + 60
    while proxy.bytes_sent() != sent_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
