"""Sources behind a certificate that the machine does not trust, as of a company's own CA: real TLS on loopback."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import SourceUnavailable
from lora_plugins.resolvers.sources.object_store import object_source
from lora_plugins.resolvers.sources.remote_failures import FailureKind, RemoteFailure
from lora_plugins.settings import Settings
from testbed.hub import Hub, local_hub
from tests.certificates import self_signed
from tests.resolvers.sources.hub_bed import FILES, Bed, isolate


class TlsBed(Bed):
    """A Hub over TLS, which is any server too; `certificate` is the file of its certificate."""

    def __init__(self, hub: Hub, root: Path, certificate: Path, hellos: list[str]) -> None:
        super().__init__(hub, root)
        self.certificate, self.hellos = certificate, hellos

    def ask_s3(self) -> object:
        env = {"AWS_ENDPOINT_URL": self.hub.url, "AWS_REGION": "x", "AWS_SKIP_SIGNATURE": "true"}
        source = object_source("s3://bucket/{lora_name}", Settings.from_env(env | os.environ))
        return asyncio.run(source.locate(AdapterName.parse("team/sql"), "org/base"))


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsBed]:
    certificate, context = self_signed(tmp_path)
    hellos: list[str] = []
    context.sni_callback = lambda _, name, __: hellos.append(name)  # for each connection that begins
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    isolate(monkeypatch, tmp_path)
    with local_hub(tls=context) as hub:
        hub.commit("team/sql", FILES)
        close_session()  # the client is one for the process, and reads the environment when it is made
        yield TlsBed(hub, tmp_path, certificate, hellos)
    close_session()


def refused(ask: object, *texts: str) -> None:
    with pytest.raises(RemoteFailure) as caught:
        ask()  # type: ignore[operator]
    assert (type(caught.value), caught.value.kind) == (RemoteFailure, FailureKind.TLS)
    for text in ("a TLS connection that cannot be trusted", *texts):
        assert text in str(caught.value)


@pytest.mark.parametrize("variable", ["", "REQUESTS_CA_BUNDLE"])
def test_a_hub_with_an_unknown_ca_is_asked_once(bed: TlsBed, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    if variable:
        monkeypatch.setenv(variable, str(bed.certificate))
    refused(lambda: bed.ask("team/sql"), "SSLCertVerificationError", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE is not read")
    assert bed.hellos == ["localhost"]


def test_a_hub_with_its_ca_in_the_environment_is_read(bed: TlsBed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(bed.certificate))
    assert bed.locate("team/sql") is not None


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_broken_file_of_certificates_is_no_broken_disk(
    bed: TlsBed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "trusted.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    refused(lambda: bed.ask("team/sql"), "SSL_CERT_FILE")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(file))
    refused(bed.ask_s3, "AWS_CA_BUNDLE")


def test_an_object_store_with_an_unknown_ca_names_its_variable(bed: TlsBed, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(bed.ask_s3, "AWS_CA_BUNDLE")
    assert len(bed.hellos) == 1
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bed.certificate))
    with pytest.raises(SourceUnavailable, match="HTTP 404"):  # the server is no S3
        bed.ask_s3()


def test_plain_http_at_an_https_url_is_named(bed: TlsBed, tmp_path: Path) -> None:
    with local_hub() as plain:
        url = plain.url.replace("http:", "https:")
        refused(lambda: bed.ask("team/sql", endpoint=url), "HF_ENDPOINT")
