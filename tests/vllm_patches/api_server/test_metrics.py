"""On vLLM's own `/metrics`: registered once, whatever is loaded twice, and with several API servers too.

Each case has a process of its own, because the registry is the process's.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.forking_vllm import run_script
from testbed.server import outer_environment

PRELUDE = """
import asyncio, warnings
import httpx
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from vllm.entrypoints.serve.instrumentator import metrics as vllms
from lora_plugins.process import this_process
from lora_plugins.events import AdapterUnknown, RequestServed
from lora_plugins.vllm_patches.api_server.web_application import patch as patch_app
from lora_plugins.settings import Settings

process = this_process()
process.settings = Settings()

warnings.simplefilter("error", UserWarning)

def serve():
    app = FastAPI()
    vllms.attach_router(app)
    return app

def scrape(app, path="/metrics"):
    async def get():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            answer = await client.get(path)
            assert answer.status_code == 200, answer.status_code
            kinds = CONTENT_TYPE_LATEST, "text/plain; version=0.0.4; charset=utf-8"  # vLLM's, without and with a slash
            assert answer.headers["content-type"] == kinds[path.endswith("/")], answer.headers
            return answer.text.splitlines()
    return asyncio.run(get())

def absent(lines):
    prefix = 'lora_plugins_resolves_total{result="absent",source="none"} '
    return [float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]
"""


Run = Callable[..., str]


def running(home: Path, **env: str) -> Run:
    """What runs a script behind `PRELUDE` in a process of its own, with further variables, and returns its output."""

    def run(script: str, **more: str) -> str:
        environment = {**outer_environment(), "CUDA_VISIBLE_DEVICES": "", **env, **more}
        ended = run_script(PRELUDE + textwrap.dedent(script), environment=environment, home=home)
        assert ended.returncode == 0, (ended.stdout, ended.stderr)
        return ended.stdout

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return running(tmp_path_factory.mktemp("metrics"))


@pytest.fixture(scope="module")
def run_with_files(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """In vLLM's multiprocess mode, which is chosen when prometheus_client is imported."""
    files = str(tmp_path_factory.mktemp("files"))
    return running(tmp_path_factory.mktemp("metrics"), PROMETHEUS_MULTIPROC_DIR=files)


def test_registering_twice_and_vllms_clearing_change_nothing(run):
    run("""
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    for _ in range(3):
        patch_app()
    first = serve()
    assert absent(scrape(first)) == []
    process.events.emit(AdapterUnknown("sql"))
    for path in ("/metrics", "/metrics/"):
        lines = scrape(first, path)
        assert absent(lines) == [1.0]
        assert any(line.startswith("process_cpu_seconds_total") for line in lines), "what is not ours"
    unregister_vllm_metrics()
    second = serve()
    process.events.emit(AdapterUnknown("sql"))
    unregister_vllm_metrics()
    for app in (first, second):
        assert absent(scrape(app)) == [2.0]
        assert [one.cls.__name__ for one in app.user_middleware].count("RefreshBeforeScrape") == 1
    """)


def test_several_api_servers_show_the_sums_of_all(run_with_files, tmp_path: Path):
    """vLLM's multiprocess mode: each process counts in files, and whichever is scraped reads them all."""
    count = """
    process.settings = Settings(metrics_adapters=1)
    patch_app()
    app = serve()
    for name in ("sql", "chat"):
        process.events.emit(AdapterUnknown(name))
        process.events.emit(RequestServed(name))
    from lora_plugins.events import AdapterUnloaded
    process.events.emit(AdapterUnloaded("sql", 0.0, 0))
    serve()
    print("\\n".join(scrape(app)))
    """
    files = str(tmp_path)
    first = run_with_files(count, PROMETHEUS_MULTIPROC_DIR=files)
    second = run_with_files(count, PROMETHEUS_MULTIPROC_DIR=files)
    absents = 'lora_plugins_resolves_total{result="absent",source="none"} '
    assert absents + "2.0" in first
    assert absents + "4.0" in second
    assert 'lora_plugins_requests_total{adapter_name="sql"} 2.0' in second
    assert 'lora_plugins_requests_total{adapter_name="_other"} 2.0' in second


def test_the_engines_are_asked_and_only_with_our_manager(run):
    run("""
    from types import SimpleNamespace
    from lora_plugins.scheduler.messages import to_plain
    from tests.observability.test_engine_metrics import engine
    patch_app()
    asked = []

    class Core:
        core_engines = [(3).to_bytes(2, "little")]

        async def call_utility_async(self, utility, *arguments):
            asked.append((utility, *arguments))
            return to_plain(engine(("sql", True, False)))

    class Client:
        def __init__(self, lora_config):
            model_config = SimpleNamespace(served_model_name="llama")
            self.vllm_config = SimpleNamespace(lora_config=lora_config, model_config=model_config)
            self.engine_core = Core()

    def loaded(installed, lora_config="there"):
        process.is_manager_patched = installed
        app = serve()
        app.state.engine_client = Client(lora_config)
        return [line for line in scrape(app) if line.startswith("vllm:lora_adapter_loaded{")]

    assert loaded(False) == [] and asked == []
    assert loaded(True, None) == [] and asked == []
    (line,) = loaded(True)
    assert asked == [("lora_plugins_figures",)]
    for label in ('model_name="llama"', 'engine="3"', 'adapter_name="sql"', 'level="gpu"', 'pinned="false"'):
        assert label in line, line
    """)


UPSTREAM = """
from prometheus_client import Gauge
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from lora_plugins.vllm_patches.api_server import metrics as installation
from lora_plugins.observability.scrape import Reports
from tests.observability.strict_page import check_page
from tests.observability.test_engine_metrics import engine

async def figures(client):
    return Reports("llama", {0: engine(("sql", True, False, 8))})

installation._query_engines = figures
patch_app()
app = serve()

def names():
    return check_page("\\n".join(scrape(app)) + "\\n")
"""


@pytest.mark.parametrize("has_series", [False, True])
def test_a_name_that_vllm_has_is_vllms_alone(run, has_series):
    """vllm-project/vllm#54830 will bring these names: a second TYPE line makes a Go parser drop the page."""
    run(f"""{UPSTREAM}
before = names()
assert before["vllm:lora_adapter_loaded"] == ["sql"], before

upstreams = Gauge("vllm:lora_adapter_loaded", "Of vLLM", ["model_name", "engine", "adapter_name"])
if {has_series}:
    upstreams.labels("llama", "0", "chat").set(1)
after = names()
assert after.pop("vllm:lora_adapter_loaded") == (["chat"] if {has_series} else [])
before.pop("vllm:lora_adapter_loaded")
assert after == before, "all others are shown as before"

unregister_vllm_metrics()
assert names()["vllm:lora_adapter_loaded"] == ["sql"]
""")
