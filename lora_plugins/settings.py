"""Settings, read once from the environment; no other module reads it."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from lora_plugins.errors import InvalidSettings

_PREFIX = "LORA_PLUGINS_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_UNITS = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9, "b": 1}

# One line each in docs/settings.md; a test compares the two.
OWN_VARIABLES = frozenset(
    {
        "LORA_PLUGINS_BASE_MATCH",
        "LORA_PLUGINS_BASE_ALIASES",
        "LORA_PLUGINS_FOLLOW_SYMLINKS",
        "LORA_PLUGINS_ALLOW_PICKLE",
        "LORA_PLUGINS_CHECK_FINITE",
        "LORA_PLUGINS_CHECK_MD5",
        "LORA_PLUGINS_MAX_ADAPTER_BYTES",
        "LORA_PLUGINS_STORE_DIR",
        "LORA_PLUGINS_STORE_MAX_BYTES",
        "LORA_PLUGINS_SOURCES",
        "LORA_PLUGINS_ALLOWED_URIS",
        "LORA_PLUGINS_FETCH_TIMEOUT_S",
        "LORA_PLUGINS_ABSENT_TTL_S",
        "LORA_PLUGINS_REVALIDATE_S",
        "LORA_PLUGINS_HOST_MAX_BYTES",
        "LORA_PLUGINS_HOST_POLICY",
        "LORA_PLUGINS_SPARE_SLOTS",
        "LORA_PLUGINS_SPARE_SLOTS_WITHIN",
        "LORA_PLUGINS_UNMATCHED",
        "LORA_PLUGINS_KERNELS",
        "LORA_PLUGINS_TUNING_DIR",
        "LORA_PLUGINS_PRELOAD",
        "LORA_PLUGINS_PRELOAD_WAIT",
        "LORA_PLUGINS_RESTORE",
        "LORA_PLUGINS_REFRESH_S",
        "LORA_PLUGINS_DRAIN_TIMEOUT_S",
        "LORA_PLUGINS_POLICY",
        "LORA_PLUGINS_METRICS_ADAPTERS",
    }
)

SOURCES = ("filesystem", "s3", "hub")
HOST_POLICIES = ("lru", "lrfu")


class BaseMatch(StrEnum):
    """How an adapter's `base_model_name_or_path` is held against the served model."""

    STRICT = "strict"
    COMPATIBLE = "compatible"
    OFF = "off"


class Kernels(StrEnum):
    """Which kernels compute adapters."""

    AUTO = "auto"
    CPU = "cpu"
    TORCH = "torch"
    TRITON = "triton"
    REFERENCE = "reference"
    VLLM = "vllm"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment asks of us; defaults are those of an empty environment.

    Attributes:
        runtime_lora_updating: vLLM's `VLLM_ALLOW_RUNTIME_LORA_UPDATING`; without it vLLM asks no resolver.
        filesystem_root: vLLM's `VLLM_LORA_RESOLVER_CACHE_DIR`, absolute.
        base_match: see `BaseMatch`.
        base_aliases: further names under which adapters may know the served base model.
        follow_symlinks: serve what a symlink below the root points to outside it.
        allow_pickle: serve `adapter_model.bin` and `.pt`, of which only the configuration is verified.
        check_finite: read every weight once and refuse NaN and infinity.
        check_md5: hold S3 objects against ETags that look like an MD5.
        max_adapter_bytes: size limit of one adapter's files together.
        store_dir: the store's root. store_max_bytes: its budget, None for no limit.
        sources: labels of the sources, in the order in which they are asked.
        allowed_uris: prefixes of the source URIs that may be fetched by URI.
        fetch_timeout_s: deadline for one adapter's fetch, retries included.
        absent_ttl_s: how long a remote source's "no such adapter" is believed.
        revalidate_s: how long a remote source is not asked again for a name that it had.
        host_max_bytes: budget of a worker's host cache, None for no limit but `--max-cpu-loras`.
        host_policy: which adapter leaves the host cache first.
        spare_slots: slots that are written while all others are in use.
        spare_slots_within: whether these are among `--max-loras`, instead of beside them.
        refuse_unmatched: refuse an adapter of which some modules do not match the model's.
        kernels: which kernels `lora_kernels` computes adapters with.
        tuning_dir: tuning tables of the user's, before those of the package.
        preload: names that are served from the start. preload_wait: whether the start waits for them.
        restore: serve from the start what was served when the last server of this base model and store stopped.
        refresh_s: how often `lora_admin` looks for new versions of what is served; 0 for never.
        drain_timeout_s: how long an unload waits for running requests before it ends them.
        policy: the file that says who may use which adapters; None for everybody all.
        metrics_adapters: how many adapters have a label of their own in metrics.
        s3_path_template, local_path_template: `S3_PATH_TEMPLATE` and `LOCAL_PATH_TEMPLATE` of vLLM's documentation.
        hub_repos: vLLM's `VLLM_LORA_RESOLVER_HF_REPO_LIST`.
        aws: the `AWS_*` variables; never logged.
    """

    runtime_lora_updating: bool = False
    filesystem_root: Path | None = None
    base_match: BaseMatch = BaseMatch.COMPATIBLE
    base_aliases: tuple[str, ...] = ()
    follow_symlinks: bool = False
    allow_pickle: bool = False
    check_finite: bool = True
    check_md5: bool = True
    max_adapter_bytes: int = 8 << 30
    store_dir: Path = field(default_factory=lambda: _store_dir({}))
    store_max_bytes: int | None = None
    sources: tuple[str, ...] = SOURCES
    allowed_uris: tuple[str, ...] = ()
    fetch_timeout_s: float = 300.0
    absent_ttl_s: float = 15.0
    revalidate_s: float = 60.0
    host_max_bytes: int | None = None
    host_policy: str = "lru"
    spare_slots: int = 1
    spare_slots_within: bool = False
    refuse_unmatched: bool = True
    kernels: Kernels = Kernels.AUTO
    tuning_dir: Path | None = None
    preload: tuple[str, ...] = ()
    preload_wait: bool = True
    restore: bool = False
    refresh_s: float = 60.0
    drain_timeout_s: float = 60.0
    policy: Path | None = None
    metrics_adapters: int = 200
    s3_path_template: str | None = None
    local_path_template: str | None = None
    hub_repos: tuple[str, ...] = ()
    aws: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the process's environment, or `env` in its place.

        Raises:
            InvalidSettings: a value that cannot be right, or an unknown `LORA_PLUGINS_*` variable.
        """
        env = os.environ if env is None else env
        _refuse_unknown(env)
        root = env.get("VLLM_LORA_RESOLVER_CACHE_DIR")
        return cls(
            runtime_lora_updating=env.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").strip().lower() in {"1", "true"},
            filesystem_root=_path("VLLM_LORA_RESOLVER_CACHE_DIR", root) if root else None,
            base_match=_base_match(env),
            base_aliases=_names(env, "LORA_PLUGINS_BASE_ALIASES"),
            follow_symlinks=_flag(env, "LORA_PLUGINS_FOLLOW_SYMLINKS", default=False),
            allow_pickle=_flag(env, "LORA_PLUGINS_ALLOW_PICKLE", default=False),
            check_finite=_flag(env, "LORA_PLUGINS_CHECK_FINITE", default=True),
            check_md5=_flag(env, "LORA_PLUGINS_CHECK_MD5", default=True),
            max_adapter_bytes=_bytes(env, "LORA_PLUGINS_MAX_ADAPTER_BYTES", default=8 << 30) or 8 << 30,
            store_dir=_store_dir(env),
            store_max_bytes=_bytes(env, "LORA_PLUGINS_STORE_MAX_BYTES", default=None),
            sources=_sources(env),
            allowed_uris=_names(env, "LORA_PLUGINS_ALLOWED_URIS"),
            fetch_timeout_s=_seconds(env, "LORA_PLUGINS_FETCH_TIMEOUT_S", default=300.0),
            absent_ttl_s=_seconds(env, "LORA_PLUGINS_ABSENT_TTL_S", default=15.0, least=0.0),
            revalidate_s=_seconds(env, "LORA_PLUGINS_REVALIDATE_S", default=60.0, least=0.0),
            host_max_bytes=_bytes(env, "LORA_PLUGINS_HOST_MAX_BYTES", default=None),
            host_policy=_choice(env, "LORA_PLUGINS_HOST_POLICY", HOST_POLICIES),
            spare_slots=_count(env, "LORA_PLUGINS_SPARE_SLOTS", default=1),
            spare_slots_within=_flag(env, "LORA_PLUGINS_SPARE_SLOTS_WITHIN", default=False),
            refuse_unmatched=_choice(env, "LORA_PLUGINS_UNMATCHED", ("refuse", "warn")) == "refuse",
            kernels=_kernels(env),
            tuning_dir=_existing(env, "LORA_PLUGINS_TUNING_DIR", Path.is_dir, "a directory that is there"),
            preload=_names(env, "LORA_PLUGINS_PRELOAD"),
            preload_wait=_flag(env, "LORA_PLUGINS_PRELOAD_WAIT", default=True),
            restore=_flag(env, "LORA_PLUGINS_RESTORE", default=False),
            refresh_s=_seconds(env, "LORA_PLUGINS_REFRESH_S", default=60.0, least=0.0),
            drain_timeout_s=_seconds(env, "LORA_PLUGINS_DRAIN_TIMEOUT_S", default=60.0, least=0.0),
            policy=_existing(env, "LORA_PLUGINS_POLICY", Path.is_file, "a file that is there"),
            metrics_adapters=_count(env, "LORA_PLUGINS_METRICS_ADAPTERS", default=200),
            s3_path_template=env.get("S3_PATH_TEMPLATE") or None,
            local_path_template=env.get("LOCAL_PATH_TEMPLATE") or None,
            hub_repos=_names(env, "VLLM_LORA_RESOLVER_HF_REPO_LIST"),
            aws={name: value for name, value in env.items() if name.startswith("AWS_")},
        )

    def slots(self, max_loras: int) -> int:
        """How many slots a worker makes where vLLM would make `max_loras`."""
        return max_loras if self.spare_slots_within else max_loras + self.spare_slots

    def running(self, max_loras: int) -> int:
        """How many adapters may run at once.

        Raises:
            InvalidSettings: none, as all slots are spare ones.
        """
        running = max_loras - self.spare_slots if self.spare_slots_within else max_loras
        if running < 1:
            raise InvalidSettings(
                f"{self.spare_slots} spare slots within --max-loras {max_loras}",
                expected="one slot at least that requests can use",
                remedy="lower LORA_PLUGINS_SPARE_SLOTS, or raise --max-loras",
            )
        return running


def named_in_environment(plugin: str, env: Mapping[str, str] | None = None) -> bool:
    """Whether `VLLM_PLUGINS` names this plugin; False where it is unset and vLLM loads all. Never raises."""
    return plugin in (os.environ if env is None else env).get("VLLM_PLUGINS", "").split(",")


def environment() -> Mapping[str, str]:
    """The process's environment as it is, for whoever judges it instead of taking settings from it."""
    return dict(os.environ)


def bytes_of(text: str) -> int | None:
    """Read a positive number of bytes such as `8GiB`, `500MB` or `1024`; None where it is none."""
    match = re.fullmatch(r"([0-9]{1,18})\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS or int(match[1]) == 0:
        return None
    return int(match[1]) * _UNITS[match[2]]


def _refuse_unknown(env: Mapping[str, str]) -> None:
    for name in env:
        if name.startswith(_PREFIX) and name not in OWN_VARIABLES:
            raise InvalidSettings(
                f"the unknown variable {name}",
                expected="one of " + ", ".join(sorted(OWN_VARIABLES)),
                remedy=f"correct its spelling or unset {name}",
            )


def _base_match(env: Mapping[str, str]) -> BaseMatch:
    name = "LORA_PLUGINS_BASE_MATCH"
    value = env.get(name, BaseMatch.COMPATIBLE).strip().lower()
    try:
        return BaseMatch(value)
    except ValueError:
        raise _wrong(name, env[name], "strict, compatible or off") from None


def _kernels(env: Mapping[str, str]) -> Kernels:
    name = "LORA_PLUGINS_KERNELS"
    try:
        return Kernels(env.get(name, Kernels.AUTO).strip().lower())
    except ValueError:
        raise _wrong(name, env[name], "one of " + ", ".join(Kernels)) from None


def _existing(env: Mapping[str, str], name: str, is_right: Callable[[Path], bool], expected: str) -> Path | None:
    value = env.get(name)
    if not value:
        return None
    path = _path(name, value)
    if not is_right(path):
        raise _wrong(name, value, expected)
    return path


def _count(env: Mapping[str, str], name: str, *, default: int) -> int:
    value = env.get(name, "").strip() or str(default)
    if re.fullmatch("[0-9]{1,6}", value) is None:
        raise _wrong(name, env[name], "a number, 0 to 999999")
    return int(value)


def _path(name: str, value: str) -> Path:
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError:  # ~ of a user that does not exist
        raise _wrong(name, value, "a path of this machine") from None


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = env.get(name, "").strip().lower() or choices[0]
    if value not in choices:
        raise _wrong(name, env[name], " or ".join(choices))
    return value


def _flag(env: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = env.get(name, "").strip().lower()
    if not value:
        return default
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise _wrong(name, env[name], "1 or 0")


def _names(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in env.get(name, "").split(",") if part.strip())


def _store_dir(env: Mapping[str, str]) -> Path:
    name = "LORA_PLUGINS_STORE_DIR"
    if env.get(name):
        return _path(name, env[name])
    return _path(name, env.get("XDG_CACHE_HOME") or "~/.cache") / "lora-plugins"


def _sources(env: Mapping[str, str]) -> tuple[str, ...]:
    name = "LORA_PLUGINS_SOURCES"
    order = _names(env, name) or SOURCES
    if len(set(order)) != len(order) or not set(order) <= set(SOURCES):
        raise _wrong(name, env[name], "each at most once, of " + ", ".join(SOURCES))
    return order


def _seconds(env: Mapping[str, str], name: str, *, default: float, least: float = 0.1) -> float:
    if name not in env:
        return default
    try:
        value = float(env[name])
    except ValueError:
        value = math.nan
    if not least <= value <= 86_400:
        raise _wrong(name, env[name], f"seconds, from {least:g} to 86400")
    return value


def _bytes(env: Mapping[str, str], name: str, *, default: int | None) -> int | None:
    if name not in env:
        return default
    value = bytes_of(env[name])
    if value is None:
        raise _wrong(name, env[name], "a positive number of bytes, such as 8GiB or 500MB")
    return value


def _wrong(name: str, value: str, expected: str) -> InvalidSettings:
    return InvalidSettings(f"{name}={value!r}", expected=expected, remedy=f"correct or unset {name}")
