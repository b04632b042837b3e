"""KV connectors that find blocks by their tokens alone are refused at start; those that nobody has read are named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.vllm_patches import engine_args, kv_connectors

MODULE = "tests.vllm_patches.recording_connectors"


@pytest.fixture(autouse=True)
def patched() -> None:
    import vllm.engine.arg_utils  # noqa: F401 - which vLLM has imported when it loads plugins

    engine_args.patch()


def start(base: Path, connector: str | None, *, lora: bool = True, module: str | None = None, **extra: Any) -> Any:
    """Return what `vllm serve` makes of its arguments before an engine starts."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_module_path=module, kv_connector_extra_config=extra
    )
    arguments = EngineArgs(
        model=str(base), enable_lora=lora, kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True
    )
    return arguments.create_engine_config()


@pytest.mark.parametrize("name", ["ExampleConnector", "HF3FSKVConnector", "LMCacheConnectorV1", "FlexKVConnectorV1"])
def test_connectors_by_tokens_alone_are_refused(base: Path, name: str) -> None:
    with pytest.raises(InvalidSettings, match=rf"(?s){name}.*tokens alone") as refused:
        start(base, name)
    assert "OffloadingConnector" in refused.value.remedy


def test_one_behind_another_and_a_subclass_are_refused(base: Path) -> None:
    children = [{"kv_connector": one, "kv_role": "kv_both"} for one in ("DecodeBenchConnector", "ExampleConnector")]
    with pytest.raises(InvalidSettings, match=r"the KV connector ExampleConnector"):
        start(base, "MultiConnector", connectors=children)
    with pytest.raises(InvalidSettings, match=r"the KV connector Subclass"):
        start(base, "SubclassOfExample", module=MODULE)


def test_lmcaches_own_classes_are_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has connectors of its own, by `kv_connector_module_path`; here a package of the same name."""
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "of_a_test.py").write_text(f"from {MODULE} import KVRecorder\nclass Own(KVRecorder): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(InvalidSettings, match=r"the KV connector Own"):
            start(base, "Own", module="lmcache.of_a_test")
    finally:
        for name in ("lmcache", "lmcache.of_a_test"):
            sys.modules.pop(name, None)


def test_without_adapters_nothing_is_refused(base: Path) -> None:
    assert start(base, "ExampleConnector", lora=False).kv_transfer_config.kv_connector == "ExampleConnector"


@pytest.mark.parametrize("name", [None, "OffloadingConnector", "SimpleCPUOffloadConnector", "DecodeBenchConnector"])
def test_connectors_by_block_hashes_run(base: Path, name: str | None, caplog: pytest.LogCaptureFixture) -> None:
    assert start(base, name).kv_transfer_config.kv_connector == name
    assert "KV connector" not in caplog.text


def test_unknown_connectors_are_named_once(base: Path, logged: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        start(base, "KVRecorder", module=MODULE)
    (said,) = [line for line in logged.messages if "KVRecorder" in line and "adapter" in line]
    assert f"{MODULE}.KVRecorder" in said


def test_every_connector_of_vllm_is_judged() -> None:
    """Those that this machine can import; a release with a new one fails here."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    judged = 0
    for name in KVConnectorFactory._registry:
        try:
            kind = KVConnectorFactory.get_connector_class_by_name(name)
        except ImportError:
            continue  # of a package that is not installed
        assert kv_connectors.is_known(kind), name
        judged += 1
    assert judged >= 10
