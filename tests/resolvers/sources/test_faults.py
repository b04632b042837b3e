"""The fault matrix: whatever the network and the store do, the right bytes or the right error, and a clean store."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fsspec.asyn import get_loop

from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.api.http_errors import hidden
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.object_store import object_source
from lora_plugins.resolvers.sources.s3 import s3_storage_options
from lora_plugins.resolvers.sources.source import VersionChanged
from lora_plugins.settings import Settings
from testbed import faults
from testbed.faults import Fault
from tests.resolvers.sources.object_bed import BASE, FILES, LIMITS, RANGE, WEIGHTS, Bed, locate, read
from tests.virtual_time import run_until_late

WEIGHTS_PATH = r"\.safetensors"
LIST = "list-type=2"
LONG_S = 600.0
PAGE = b"<html><head><title>Sign in</title></head><body>A captive portal</body></html>"
BUCKETS = b"<ListAllMyBucketsResult><Owner><ID>1</ID></Owner><Buckets/></ListAllMyBucketsResult>"

# What goes wrong, where, and how often.
PASSING: dict[str, tuple[Fault, str, int]] = {
    "500 at list": (faults.server_error(), LIST, 2),
    "SlowDown in ranges": (faults.slow_down(), WEIGHTS_PATH, 4),
    "reset at list": (faults.reset(), LIST, 1),
    "short body": (faults.short(70_000), WEIGHTS_PATH, 3),
    "short body of the small file": (faults.short(3), "config", 1),
    "length too small": (faults.wrong_length(-10), WEIGHTS_PATH, 2),
    "length too large": (faults.wrong_length(10), WEIGHTS_PATH, 2),
    "stall before headers": (faults.stall(2.5), WEIGHTS_PATH, 1),
    "stall mid-body": (faults.stall(2.5, after=100_000), WEIGHTS_PATH, 1),
    "flipped byte": (faults.flip(500_000, in_object=True), WEIGHTS_PATH, 1),
    "flipped byte in the small file": (faults.flip(2), "config", 1),
    "breaks off again and again, but gets on": (faults.reset(80_000), WEIGHTS_PATH, 12),
}


@pytest.mark.parametrize("fault", PASSING)
def test_passing_fault_ends_in_the_right_bytes(bed: Bed, fault: str) -> None:
    bed.put()
    what, path, times = PASSING[fault]
    bed.proxy.plan(what, path=path, times=times)
    assert read(bed.serve(bed.source(read_timeout_s=1.0 if "stall" in fault else 30.0))) == FILES
    assert any(request.fault for request in bed.proxy.requests())
    bed.assert_clean()


LASTING: dict[str, tuple[Fault, str, tuple[str, ...]]] = {
    "500": (faults.server_error(), "", ("HTTP 500", "InternalError")),
    "denied": (faults.denied(), "", ("denies", "HTTP 403", "AccessDenied")),
    "expired (400)": (faults.expired_token(), "", ("expired", "renew")),
    "a wrong clock": (faults.s3_error(403, "RequestTimeTooSkewed", "m"), "", ("clock", "NTP", "RequestTimeTooSkewed")),
    "archived": (faults.s3_error(403, "InvalidObjectState", "m"), WEIGHTS_PATH, ("archived", "restore", WEIGHTS_FILE)),
    "a disabled key": (faults.s3_error(400, "KMS.DisabledException", "m"), WEIGHTS_PATH, ("encrypted", "kms:Decrypt")),
    "a wrong key": (faults.s3_error(403, "InvalidAccessKeyId", "m"), "", ("not accepted", "InvalidAccessKeyId")),
    "a page in the place of a LIST": (faults.status(200, PAGE), LIST, ("malformed", "proxies")),
    "nothing in the place of a LIST": (faults.status(200, b""), LIST, ("malformed", "proxies")),
    "another answer in the place of a LIST": (faults.status(200, BUCKETS), LIST, ("malformed", "proxies")),
    "a proxy's 404": (faults.status(404, PAGE), LIST, ("malformed", "HTTP 404", "proxies")),
    "an empty 404": (faults.status(404, b""), LIST, ("malformed", "HTTP 404", "proxies")),
    "a proxy's 404 in ranges": (faults.status(404, PAGE), WEIGHTS_PATH, ("malformed", "HTTP 404", WEIGHTS_FILE)),
    "another ETag in ranges": (faults.relabelled({"ETag": f'"{"0" * 32}"'}), WEIGHTS_PATH, ("changed", WEIGHTS_FILE)),
    "no ETag in ranges": (faults.relabelled({"ETag": ""}), WEIGHTS_PATH, ("malformed", WEIGHTS_FILE)),
    "denied ranges": (faults.denied(), WEIGHTS_PATH, ("denies", WEIGHTS_FILE)),
    "reset": (faults.reset(), WEIGHTS_PATH, ("broke off", WEIGHTS_FILE)),
    "short": (faults.short(10), WEIGHTS_PATH, ("broke off", WEIGHTS_FILE)),
    "redirected LIST": (faults.status(307, headers={"Location": "http://127.0.0.1:9/"}), LIST, ("refuses", "307")),
}


@pytest.mark.parametrize("case", LASTING)
def test_lasting_fault_is_an_outage_never_absence(bed: Bed, case: str) -> None:
    fault, path, texts = LASTING[case]
    bed.put()
    bed.proxy.plan(fault, path=path, times=None)
    source = bed.source()
    with pytest.raises(SourceUnavailable) as caught:
        bed.serve(source)
    text = str(caught.value)
    for expected in texts:
        assert expected in text
    assert f" at s3://{bed.bucket.name}/loras/sql/ on {bed.proxy.url}" in text
    assert caught.value.remedy
    for secret in ("testing", "X-Amz", "Signature"):
        assert secret not in text
    for place in (bed.bucket.name, bed.proxy.url):
        assert place not in str(hidden(caught.value))
    assert not bed.store.layout.digests()
    bed.assert_clean()
    bed.proxy.clear()
    assert read(bed.serve(source)) == FILES


REFUSED = {"expired": faults.expired_token(), "not accepted": faults.s3_error(403, "InvalidAccessKeyId", "m")}


@pytest.mark.parametrize("refused", REFUSED)
@pytest.mark.parametrize("expires", ["look-up", "fetch"])
def test_renewed_credentials_are_read_again(bed: Bed, tmp_path: Path, monkeypatch, expires: str, refused: str) -> None:
    def write(key: str) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\naws_session_token = {key}\n"
        (tmp_path / "credentials").write_text(text)

    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)
    bed.put()
    write("OLD")
    env = {name: text for name, text in bed.s3.env(bed.proxy.url).items() if "KEY" not in name}
    source = bed.source(storage_options=s3_storage_options(env))
    bed.proxy.plan(REFUSED[refused], path="" if expires == "look-up" else WEIGHTS_PATH, times=None)
    with pytest.raises(SourceUnavailable, match=rf"{refused}.*files and profiles are read again"):
        bed.serve(source)
    for is_refused in (True, False):
        bed.proxy.refuse(is_refused)  # other ranges of the failed fetch may still be on their way
    bed.proxy.clear()
    bed.proxy.forget()
    write("NEW")
    assert read(bed.serve(source)) == FILES
    sent = [{name.lower(): text for name, text in it.headers.items()} for it in bed.proxy.requests("GET")]
    assert {headers["x-amz-security-token"] for headers in sent} == {"NEW"}


@pytest.mark.parametrize("expires", ["look-up", "fetch"])
def test_an_expired_token_of_the_environment_is_named(bed: Bed, expires: str) -> None:
    bed.put()
    source = bed.source(storage_options=s3_storage_options(bed.s3.env(bed.proxy.url) | {"AWS_SESSION_TOKEN": "OLD"}))
    bed.proxy.plan(faults.expired_token(), path="" if expires == "look-up" else WEIGHTS_PATH, times=None)
    named = r"found an AWS_SESSION_TOKEN that has expired.*ExpiredToken.*restart.*AWS_SHARED_CREDENTIALS_FILE"
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match=named) as caught:
            bed.serve(source)
        assert "OLD" not in str(caught.value)


def test_a_bare_templates_failure_says_how_it_is_read(bed: Bed) -> None:
    source = bed.source(f"{bed.bucket.name}-of-nobody/{{lora_name}}")
    for _ in range(2):
        with pytest.raises(SourceUnavailable, match=r"no such bucket.*S3_PATH_TEMPLATE without a scheme is .* s3://"):
            bed.serve(source)
    with pytest.raises(SourceUnavailable) as caught:
        bed.serve(bed.source(f"s3://{bed.bucket.name}-of-nobody/{{lora_name}}"))
    assert "without a scheme" not in str(caught.value)


def test_stalls_end_at_the_deadline(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.stall(LONG_S, after=1000), path=WEIGHTS_PATH, times=None)
    source = bed.source(limits=replace(LIMITS, timeout_s=LONG_S), read_timeout_s=LONG_S)
    with pytest.raises(SourceUnavailable, match=r"within 600 s"):
        run_until_late(bed.ask(source), lambda: bed.proxy.bytes_sent(WEIGHTS_PATH) >= 1000, LONG_S, get_loop())
    assert not _on_fsspecs_loop()
    bed.assert_clean()


@pytest.mark.parametrize(("timeout_s", "look_up_s"), [(5, 5), (600, 60)])
def test_silent_store_ends_at_the_deadline_of_the_setting(bed: Bed, timeout_s: int, look_up_s: int) -> None:
    bed.proxy.plan(faults.stall(LONG_S), times=None)
    env = {**bed.s3.env(bed.proxy.url), "LORA_PLUGINS_FETCH_TIMEOUT_S": str(timeout_s)}
    source = object_source(f"s3://{bed.bucket.name}/loras/{{lora_name}}", Settings.from_env(env))
    locating = source.locate(AdapterName("sql"), BASE)
    with pytest.raises(SourceUnavailable, match=f"within {look_up_s} s.*LORA_PLUGINS_FETCH_TIMEOUT_S"):
        run_until_late(locating, bed.proxy.count, LONG_S, get_loop())


def test_slow_store_ends_at_the_deadline_with_the_last_failure(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.server_error(), path=WEIGHTS_PATH, times=None)
    limits = replace(LIMITS, timeout_s=LONG_S, attempts=1_000_000)
    more_than_once = 2 * LIMITS.parallel
    # Longer than the deadline: the time that passes at once must end no single request.
    asking = bed.ask(bed.source(limits=limits, read_timeout_s=2 * LONG_S))
    with pytest.raises(SourceUnavailable, match=r"within 600 s; the last failure: .*HTTP 500"):
        run_until_late(asking, lambda: bed.proxy.count("GET", WEIGHTS_PATH) > more_than_once, LONG_S, get_loop())


@pytest.mark.parametrize("same_size", [True, False])
def test_object_that_changes_meanwhile_is_never_mixed(bed: Bed, same_size: bool) -> None:
    bed.put()
    new = os.urandom(len(WEIGHTS) + (0 if same_size else 1000))
    bed.proxy.plan(faults.run_after(lambda: bed.put(files={WEIGHTS_FILE: new})), path=WEIGHTS_PATH, skip=1)
    source = bed.source(limits=replace(LIMITS, parallel=1))
    with pytest.raises(VersionChanged):
        bed.serve(source)
    assert not bed.store.layout.digests()
    assert read(bed.serve(source))[WEIGHTS_FILE] == new
    bed.assert_clean()


def test_object_that_vanishes_meanwhile(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.run_after(lambda: bed.bucket.delete_prefix("loras/sql")), path=WEIGHTS_PATH, skip=1)
    source = bed.source(limits=replace(LIMITS, parallel=1))
    with pytest.raises(VersionChanged, match="gone"):
        bed.serve(source)
    assert bed.serve(source) is None


def test_unknown_host(bed: Bed) -> None:
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        locate(bed.source(url="http://no-such-host.invalid:1"))


def test_cancelling_leaves_no_task_and_no_file(bed: Bed) -> None:
    bed.put()
    bed.proxy.plan(faults.stall(LONG_S, after=1000), path=WEIGHTS_PATH, times=None)
    source = bed.source(read_timeout_s=LONG_S)

    async def run() -> None:
        located = await source.locate(AdapterName.parse("sql"), BASE)
        assert located is not None
        task = asyncio.create_task(bed.obtain(source, located))
        while bed.proxy.bytes_sent(WEIGHTS_PATH) < 1000:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
        assert not _on_fsspecs_loop()

    asyncio.run(run())
    bed.assert_clean()


def test_requests_of_a_healthy_fetch(bed: Bed) -> None:
    bed.put()
    bed.bucket.put("loras/sql/optimizer.pt", b"x" * 1000)
    bed.bucket.put("loras/sql/checkpoint-1/adapter_model.safetensors", b"x")
    bed.serve(bed.source())
    gets = bed.proxy.requests("GET")
    assert sum(LIST in request.query for request in gets) == 1
    assert len(gets) == 1 + 1 + 5  # the list, the configuration, four ranges and the rest
    assert not [request for request in gets if "optimizer" in request.path or "checkpoint" in request.path]
    first = [request.path for request in gets[1 : 1 + LIMITS.parallel]]
    assert any(path.endswith("adapter_config.json") for path in first)  # with the large file, not after it


def test_at_most_parallel_ranges_in_flight(bed: Bed) -> None:
    bed.put()
    guard, now, most, three = threading.Lock(), [0], [0], threading.Event()

    def enter() -> None:
        with guard:
            now[0] += 1
            most[0] = max(most[0], now[0])
            if now[0] == 3:
                three.set()
        three.wait(60)  # the first ones until there are three
        threading.Event().wait(0.05)  # time for a fourth, if there is one
        with guard:
            now[0] -= 1

    bed.proxy.plan(faults.run_before(enter), path="loras/sql/adapter_", times=None)
    bed.serve(bed.source(limits=replace(LIMITS, parallel=3, range_bytes=RANGE // 4)))
    assert most[0] == 3


PEAK = """
import asyncio, resource, sys
from pathlib import Path
from lora_plugins.adapter.names import AdapterName
from lora_plugins.resolvers.sources.object_store import ObjectSource, s3_storage_options
from lora_plugins.store.partial_download import PartialDownload
source = ObjectSource("s3://b/{lora_name}", storage_options=s3_storage_options({
    "AWS_ENDPOINT_URL": sys.argv[1], "AWS_ALLOW_HTTP": "1", "AWS_REGION": "r",
    "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
async def run():
    located = await source.locate(AdapterName.parse("big"), "base")
    idle = peak()
    arriving = PartialDownload(Path(sys.argv[2]), [file.name for file in located.files])
    await source.fetch(located, arriving)
    arriving.finish()
    print(peak() - idle)
asyncio.run(run())
"""


def test_peak_memory_of_a_large_object(tmp_path) -> None:
    from testbed.ranges import range_server

    (tmp_path / "b" / "big").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "b" / "big" / "adapter_config.json").write_bytes(b"{}")
    with (tmp_path / "b" / "big" / WEIGHTS_FILE).open("wb") as file:
        file.truncate(200 << 20)
    with range_server(tmp_path) as server:
        command = [sys.executable, "-c", PEAK, server.url, str(tmp_path / "out")]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    assert (tmp_path / "out" / WEIGHTS_FILE).stat().st_size == 200 << 20
    assert int(ran.stdout) < 128, f"{ran.stdout.strip()} MB above idle"


def _on_fsspecs_loop() -> set[asyncio.Task[object]]:
    """Return the tasks that still run on the loop of all fetches."""
    return {task for task in asyncio.all_tasks(get_loop()) if not task.done()}
