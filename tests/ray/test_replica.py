"""What Ray is given of this process's environment, and what its nodes must have by themselves."""

from __future__ import annotations

import pytest

from lora_plugins.errors import InvalidSettings
from lora_plugins.settings import is_secret

SECRETS = ("LORA_PLUGINS_ADMIN_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN")
PLAIN = (
    "LORA_PLUGINS_POLICY",
    "LORA_PLUGINS_STORE_DIR",
    "VLLM_PLUGINS",
    "AWS_REGION",
    "HF_ENDPOINT",
    "S3_PATH_TEMPLATE",
)


@pytest.mark.parametrize("name", [*SECRETS, "AZURE_STORAGE_CONNECTION_STRING", "AZURE_CLIENT_SECRET", "GOOGLE_TOKEN"])
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


def test_ray_is_given_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from lora_plugins.ray.__main__ import passed_on

    for name in (*SECRETS, *PLAIN):
        monkeypatch.setenv(name, "s3://bucket/{lora_name}" if name == "S3_PATH_TEMPLATE" else "x")
    given = passed_on()
    assert given.keys() >= set(PLAIN)
    assert given.keys().isdisjoint(SECRETS)


def test_a_replica_without_a_secret_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    from lora_plugins.ray.replica import require_secrets

    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.delenv("LORA_PLUGINS_ADMIN_KEY", raising=False)
    require_secrets(["HF_TOKEN"])
    with pytest.raises(InvalidSettings, match="without LORA_PLUGINS_ADMIN_KEY") as caught:
        require_secrets(["HF_TOKEN", "LORA_PLUGINS_ADMIN_KEY"])
    assert "ray start" in caught.value.remedy
