"""The commands for a running server, as an operator types them, against a real one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from testbed.bed import Bed
from testbed.client import connect
from tests.cli.common import Done, outside
from tests.e2e.admin import KEY, Admin, serving
from tests.e2e.servers import ADMIN, KERNELS, MANAGER, RESOLVER


@dataclass(frozen=True)
class Operator:
    """Somebody on the server's host, with its variables and its key."""

    admin: Admin
    env: dict[str, str]

    def types(self, *arguments: str, code: int = 0) -> Done:
        done = outside(*arguments, env=self.env)
        done.assert_no_traceback()
        assert done.code == code, done
        return done

    def adapters(self, *arguments: str, code: int = 0) -> list[dict[str, Any]]:
        return list(self.types(*arguments, "--json", code=code).json["adapters"])


@pytest.fixture(scope="module")
def operator(bed: Bed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    home = tmp_path_factory.mktemp("operator")
    root, allowed = home / "adapters", home / "allowed"
    for name in ("sql", "chat", "team/poet"):
        shutil.copytree(bed.adapters / name, root / name)
    allowed.mkdir()
    with serving(bed, home) as server:
        env = {
            "LORA_PLUGINS_URL": server.url,
            "VLLM_API_KEY": KEY,
            "VLLM_PLUGINS": f"{RESOLVER},{MANAGER},{KERNELS},{ADMIN}",
            "VLLM_LORA_RESOLVER_CACHE_DIR": str(root),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "LORA_PLUGINS_STORE_DIR": str(home / "store"),
        }
        yield Operator(Admin(server, connect(server), bed, root, allowed), env)


def test_an_operators_day(operator: Operator) -> None:
    """Every command for a server once, and what the server then answers."""
    admin = operator.admin
    found = operator.adapters("ls", "--remote")
    assert {row["name"] for row in found} == {"chat", "sql", "team/poet"}

    uri = admin.publish("by-uri", "chat", below=admin.allowed).as_uri()
    loaded = operator.adapters("load", "sql", "team/poet", "nobody", code=3)
    assert [one.get("error", {}).get("code") for one in loaded] == [None, None, "L002"]
    operator.types("load", "from/uri", "--uri", uri)
    admin.answers_like("sql", "sql")
    admin.answers_like("from/uri", "chat")

    first = loaded[0]["digest"]
    admin.publish("sql", "chat", 1)
    operator.types("refresh", "sql", "--if-match", "0" * 12, code=1)
    admin.answers_like("sql", "sql")
    (swapped,) = operator.adapters("refresh", "sql", "--if-match", first[:12])
    assert (swapped["previous_digest"], swapped["swapped"], swapped["digest"] != first) == (first, True, True)
    admin.answers_like("sql", "chat")
    (back,) = operator.adapters("rollback", "sql", "--to", first)
    assert back["digest"] == first
    admin.answers_like("sql", "sql")
    said = operator.types("why", "sql").out
    assert f"stays at {first[:12]}" in said
    assert said.splitlines()[-1].startswith(f"sql: served, version {first[:12]} from file://")
    operator.types("pause", "sql")
    assert "lora-plugins resume sql" in operator.types("why", "sql", code=4).out
    operator.types("resume", "sql")

    operator.types("pin", "team/*")
    assert admin.view("team/poet")["pinned"]
    operator.types("unpin", "*")
    assert not admin.view("team/poet")["pinned"]
    operator.types("prefetch", "*")
    assert {"sql", "team/poet", "from/uri"} <= {
        view["lora_name"] for view in admin.done("GET", "/v1/loras")["loras"] if "host" in view["tiers"]
    }
    assert "3 adapters" in operator.types("ls", "--server").out

    said = operator.types("doctor", "--url", admin.server.url, "--no-network").out
    assert "lora_lru_manager runs, as in this environment" in said
    assert "lora_admin runs, as in this environment" in said
    assert said.splitlines()[-1] == "adapters are served by name from filesystem; with the admin API"

    digest = admin.view("team/poet")["digest"]
    assert "stays: leased by process" in operator.types("rm", digest[:12], code=5).out
    operator.types("unload", "team/*", "from/uri")
    assert {view["lora_name"] for view in admin.done("GET", "/v1/loras")["loras"]} == {"sql"}
    assert "1 adapter removed" in operator.types("rm", "team/poet").out
    operator.types("load", "team/poet")
    admin.answers_like("team/poet", "team/poet")
    operator.types("unload", "team/poet", "--block")
    assert "lora-plugins load team/poet" in operator.types("why", "team/poet", code=3).out
    assert "does not serve it" in operator.types("why", "chat", "--dry-run").out
