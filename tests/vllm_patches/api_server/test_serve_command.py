"""Front ends without our code: what `vllm serve` is asked for, the gRPC server's module, and a `vllm-rs` as parent."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import vllm.plugins
import vllm.v1.utils
from vllm.entrypoints.cli import serve as cli
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lora_plugins.errors import InvalidSettings
from lora_plugins.lifecycle.leader import SOCKET
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import serve_command, several_api_servers
from testbed.forking_vllm import run_forked, run_script
from testbed.server import outer_environment

RESOLVER, MANAGER, KERNELS, ADMIN = "lora_filesystem_resolver", "lora_lru_manager", "lora_kernels", "lora_admin"
RUST = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": "/bin/true"}
Serve = Callable[..., None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """What `vllm serve` does before its server starts, with these plugins, options and variables."""
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", True)
    before = ServeSubcommand.validate
    ServeSubcommand.validate = inspect.unwrap(before)  # where a test before this one has named other plugins

    def run(plugins: str, *options: str, **env: str) -> None:
        for name, value in {"VLLM_PLUGINS": plugins, **env}.items():
            monkeypatch.setenv(name, value)
        serve_command.patch(Settings.from_env())
        serve_command.patch(Settings.from_env())
        parser, command = FlexibleArgumentParser(), ServeSubcommand()
        command.subparser_init(parser.add_subparsers(dest="subparser"))
        command.validate(parser.parse_args(["serve", "model", *options]))

    yield run
    ServeSubcommand.validate = before


@pytest.mark.parametrize("plugins", [RESOLVER, f"{MANAGER},{ADMIN}", f"{KERNELS},lora_s3_resolver"])
@pytest.mark.parametrize(
    ("options", "env", "remedy"),
    [((), RUST, "unset VLLM_USE_RUST_FRONTEND"), (("--grpc",), {}, "leave --grpc out")],
    ids=["Rust", "gRPC"],
)
def test_startup_fails_with_front_ends_without_resolvers(
    serve: Serve, plugins: str, options: tuple[str, ...], env: dict[str, str], remedy: str
) -> None:
    with pytest.raises(InvalidSettings) as caught:
        serve(plugins, *options, **env)
    assert remedy in caught.value.remedy
    assert plugins.rpartition(",")[2] in caught.value.found


@pytest.mark.parametrize("variable", ["LORA_PLUGINS_POLICY", "LORA_PLUGINS_ADMIN_KEY", "LORA_PLUGINS_ADAPTERS_FILE"])
def test_a_policy_is_not_left_out_by_rust(serve: Serve, tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidSettings, match=variable):
        serve(MANAGER, **RUST, **{variable: str(tmp_path / "file")})


@pytest.mark.parametrize(
    ("plugins", "options", "env"),
    [
        (f"{MANAGER},{KERNELS}", (), RUST),
        (f"{MANAGER},{KERNELS}", ("--grpc",), RUST),
        (f"{MANAGER},{RESOLVER}", ("--headless",), RUST),
        (f"{MANAGER},{RESOLVER},{ADMIN}", (), {"VLLM_USE_RUST_FRONTEND": "0"}),
    ],
    ids=["Rust", "gRPC", "engines without a server", "vLLM's own server"],
)
def test_front_ends_that_lack_nothing_are_not_refused(
    serve: Serve, plugins: str, options: tuple[str, ...], env: dict[str, str]
) -> None:
    serve(plugins, *options, **env)


UPDATING = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool | None, bool]]:
    """What vLLM would start: how many API servers, whether their folder is there, and whether updating is on."""
    seen: list[tuple[int, bool | None, bool]] = []

    def start(args: Any) -> None:
        folder = getattr(args, several_api_servers.FOLDER, None)
        is_there = None if folder is None else Path(folder).is_dir()
        seen.append((args.api_server_count, is_there, cli.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING))

    monkeypatch.setattr(cli, "run_multi_api_server", start)
    return seen


@pytest.mark.parametrize(
    ("dying", "code", "is_started", "ends"),
    [
        (0, 0, True, "ApiServer_0 .* died with exit code 1"),
        (1, 9, True, "ApiServer_0 .* died with exit code -15"),
        (1, 9, False, "ApiServer_1 .* died with exit code 9"),
    ],
)
def test_a_follower_that_serves_dies_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, dying: int, code: int, is_started: bool, ends: str
) -> None:
    fork = multiprocessing.get_context("fork")

    def start(args: Any) -> None:
        processes: list[Any] = [
            fork.Process(target=os._exit, args=(code,), name=f"ApiServer_{number}")
            if number == dying
            else fork.Process(target=time.sleep, args=(60,), name=f"ApiServer_{number}")
            for number in range(3)
        ]
        for process in processes:
            process.start()
        if is_started:
            (Path(getattr(args, several_api_servers.FOLDER)) / f"serves-{processes[dying].pid}").touch()
        leaves = threading.Timer(1, processes[0].terminate)
        leaves.start()
        try:
            cli.wait_for_completion_or_failure(api_server_manager=SimpleNamespace(processes=processes))
        finally:
            leaves.join()
            for process in processes:
                process.kill()
                process.join()

    monkeypatch.setattr(cli, "run_multi_api_server", start)
    serve(MANAGER)
    with pytest.raises(RuntimeError, match=ends):
        cli.run_multi_api_server(servers(3))
    assert cli.wait_for_completion_or_failure is vllm.v1.utils.wait_for_completion_or_failure


def servers(count: int, **more: Any) -> SimpleNamespace:
    of_hosts = {"data_parallel_hybrid_lb": False, "data_parallel_start_rank": None}
    return SimpleNamespace(api_server_count=count, **{**of_hosts, **more})


@pytest.mark.parametrize("plugins", [f"{MANAGER},{RESOLVER}", f"{MANAGER},{RESOLVER},{ADMIN}"])
def test_several_servers_get_a_folder_and_may_update(
    serve: Serve,
    started: list[tuple[int, bool | None, bool]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    plugins: str,
) -> None:
    serve(plugins, **UPDATING)
    (deep := tmp_path / ("d" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    several = servers(2)
    cli.run_multi_api_server(servers(1))
    cli.run_multi_api_server(several)
    assert started == [(1, None, True), (2, True, False)], "vLLM's command refuses updating with several"
    folder = Path(getattr(several, several_api_servers.FOLDER))
    assert not folder.exists(), "it is removed at the end"
    assert len(str(folder / SOCKET)) < 107, "the path of a socket"
    assert cli.envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING


@pytest.mark.parametrize(
    ("plugins", "args", "why"),
    [
        (RESOLVER, servers(2), "without lora_lru_manager"),
        (f"{MANAGER},{RESOLVER}", servers(2, data_parallel_hybrid_lb=True), "of several hosts"),
        (f"{MANAGER},{RESOLVER},{ADMIN}", servers(2, data_parallel_start_rank=2), "of several hosts"),
    ],
)
def test_startup_fails_with_several_servers_that_cannot_share(
    serve: Serve, started: list[tuple[int, bool | None, bool]], plugins: str, args: SimpleNamespace, why: str
) -> None:
    serve(plugins, **UPDATING)
    with pytest.raises(InvalidSettings, match=f"--api-server-count 2: .*{why}") as caught:
        cli.run_multi_api_server(args)
    assert "--api-server-count 1" in caught.value.remedy
    assert started == []


@pytest.mark.parametrize(
    ("plugins", "args", "is_shared"),
    [
        (f"{MANAGER},{RESOLVER}", servers(2), True),
        (MANAGER, servers(2), True),
        (MANAGER, servers(2, data_parallel_hybrid_lb=True), None),
        (RESOLVER, servers(2), None),
    ],
)
def test_several_servers_of_static_modules_start_anyway(
    serve: Serve,
    started: list[tuple[int, bool | None, bool]],
    plugins: str,
    args: SimpleNamespace,
    is_shared: bool | None,
) -> None:
    serve(plugins)
    cli.run_multi_api_server(args)
    assert started == [(2, is_shared, False)]


@pytest.mark.deployment("gRPC server", "refused", "`python -m vllm.entrypoints.grpc_server` with a resolver: L007")
def test_the_grpc_server_itself_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_servicer.vllm.servicer", ModuleType("servicer"))
    monkeypatch.setenv("VLLM_PLUGINS", f"{MANAGER},{RESOLVER}")
    with pytest.raises(InvalidSettings, match="gRPC server with lora_filesystem_resolver"):
        serve_command.patch(Settings.from_env())
    monkeypatch.setenv("VLLM_PLUGINS", MANAGER)
    serve_command.patch(Settings.from_env())


BELOW = """
import os, sys
from pathlib import Path
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server import serve_command
Path("/proc/self/comm").write_text(sys.argv[1])
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
serve_command.patch(Settings.from_env())
"""


def ended_below(home: Path, parent: str, plugins: str) -> Any:
    """A process with these plugins whose parent has this name."""
    return run_script(BELOW, parent, environment={**outer_environment(), "VLLM_PLUGINS": plugins}, home=home)


@pytest.mark.deployment("front end in Rust", "refused", "`vllm-rs serve`: its engine ends with L007")
def test_an_engine_of_vllm_rs_does_not_start(tmp_path: Path) -> None:
    ended = ended_below(tmp_path, "vllm-rs", f"{MANAGER},{RESOLVER}")
    assert ended.returncode == 1
    assert "[L007] found vllm-rs serve with lora_filesystem_resolver" in ended.stderr
    assert ended_below(tmp_path, "vllm-rs", f"{MANAGER},{KERNELS}").returncode == 0
    assert ended_below(tmp_path, "another", f"{MANAGER},{RESOLVER}").returncode == 0


@pytest.mark.parametrize("level", ["INFO", pytest.param("DEBUG", marks=pytest.mark.nightly)])
def test_a_refused_start_is_a_line_without_traceback(tmp_path: Path, level: str) -> None:
    env = {**outer_environment(), "VLLM_PLUGINS": RESOLVER, "VLLM_LORA_RESOLVER_CACHE_DIR": str(tmp_path)}
    env |= {"LORA_PLUGINS_STORE_MAX_BYTES": "plenty", "VLLM_LOGGING_LEVEL": level}
    command = ["vllm", "serve", "/no/such/model", "--enable-lora"]
    ended = run_forked("vllm.entrypoints.cli.main:main", command, environment=env, home=tmp_path)
    assert ended.returncode == 1
    said, command = ended.stderr.splitlines()[-2:]
    assert said.startswith("error: [L007] found LORA_PLUGINS_STORE_MAX_BYTES='plenty'")
    assert command == "lora-plugins explain L007"
    assert ("Traceback" in ended.stderr) == (level == "DEBUG")


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: seen.append(kind))
    serve_command.say_errors_in_a_line()
    serve_command.say_errors_in_a_line()
    sys.excepthook(ValueError, ValueError("x"), None)
    sys.excepthook(InvalidSettings, InvalidSettings("x"), None)
    assert seen == [ValueError]
