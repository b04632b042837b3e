"""Settings, read from the environment; no other module reads the environment.

Each variable is declared once, as a field of `Settings` with a docstring: name, kind, default, meaning. The fields give
the check for unknown variables, the doctor's list, and docs/reference/settings.md (`tools/write_settings_doc.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path

from lora_plugins import plugin_names
from lora_plugins.errors import InvalidSettings
from lora_plugins.variables import (
    BYTES,
    FILE,
    FLAG,
    KEY,
    LABELLED,
    NAMES,
    PATH,
    PATHS,
    PREFIX,
    RESTORE,
    TEXT,
    VLLM_FLAG,
    Variable,
    choice,
    closest,
    member,
    optional,
    order,
    required,
    seconds,
)

SOURCE_LABELS = tuple(kind.label for kind in plugin_names.SOURCES)
HOST_POLICIES = ("lru", "lrfu")


class BaseMatch(StrEnum):
    """How an adapter's `base_model_name_or_path` is compared with the served model."""

    STRICT = "strict"
    COMPATIBLE = "compatible"
    OFF = "off"


class AdapterChat(StrEnum):
    """Whose chat template and end tokens an adapter's requests get; strict: the base model's, or a refusal."""

    ADAPTER = "adapter"
    TOKENS = "tokens"
    BASE = "base"
    STRICT = "strict"

    @property
    def reads_files(self) -> bool:
        return self is not AdapterChat.BASE


class Kernels(StrEnum):
    """Which kernels compute adapters."""

    AUTO = "auto"
    CPU = "cpu"
    TRITON = "triton"
    REFERENCE = "reference"
    VLLM = "vllm"


PLUGINS = Variable("VLLM_PLUGINS", NAMES, None)
"""Plugins to load, separated by commas; `lora_plugins` stands for all of ours. Ours run only when named here: while
unset, a server behaves as if lora-plugins were not installed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the environment; the defaults are an empty environment's."""

    runtime_lora_updating: bool = required("VLLM_ALLOW_RUNTIME_LORA_UPDATING", VLLM_FLAG, "0")
    """`1` lets vLLM ask resolvers for unknown names. Otherwise nothing is ever resolved, and a warning says so."""
    untested_vllm: bool = required("LORA_PLUGINS_UNTESTED_VLLM", FLAG, "0")
    """`1`: start in a vLLM release unknown to lora-plugins; otherwise the start is refused
    ([versions](errors.md#a-vllm-that-we-do-not-know))."""
    hub_repos: tuple[str, ...] = required("VLLM_LORA_RESOLVER_HF_REPO_LIST", NAMES, "")
    """The repositories of `lora_hf_hub_resolver` ([sources](../guides/sources.md#the-hugging-face-hub))."""
    use_modelscope: bool = required("VLLM_USE_MODELSCOPE", VLLM_FLAG, "0")
    """`1` lets vLLM load base models from ModelScope; `lora_hf_hub_resolver` has no ModelScope, and startup fails."""
    s3_path_template: str | None = optional("S3_PATH_TEMPLATE", TEXT)
    """Where `lora_s3_resolver` finds an adapter, as in vLLM's documentation
    ([sources](../guides/sources.md#s3-and-every-url-that-fsspec-knows))."""
    local_path_template: str | None = optional("LOCAL_PATH_TEMPLATE", TEXT)
    """Where `lora_s3_resolver` links to the current version, as in vLLM's documentation."""
    filesystem_root: Path | None = optional("VLLM_LORA_RESOLVER_CACHE_DIR", PATH)
    """The directory of adapters of `lora_filesystem_resolver`; `team/sql` is `<directory>/team/sql`."""
    base_match: BaseMatch = required("LORA_PLUGINS_BASE_MATCH", member(BaseMatch), "compatible")
    """How an adapter's `base_model_name_or_path` is compared with the served model: `strict`, `compatible` or `off`
    ([verification](verification.md#base-model))."""
    base_aliases: tuple[str, ...] = required("LORA_PLUGINS_BASE_ALIASES", NAMES, "")
    """Further names, separated by commas, under which adapters may know the served base model."""
    adapter_chat: AdapterChat = required("LORA_PLUGINS_ADAPTER_CHAT", member(AdapterChat), "adapter")
    """Whose chat template, special tokens and end tokens an adapter's requests get: the `adapter`'s, where the adapter
    brings them; of the adapter only the `tokens`, with the server's template (`--chat-template`, or the base model's);
    always the `base` model's; or `strict`: the base model's, and a refusal for adapters that bring others
    ([chats](../guides/chat.md))."""
    adapter_fields: str = required("LORA_PLUGINS_ADAPTER_FIELDS", choice("refuse", "ignore"), "refuse")
    """A request for the base model that names an adapter in a field of other servers (`adapter_id`, `lora_name`,
    `lora_request`, `adapters` and the like, also in `parameters`, `extra_body` and `nvext`): `refuse` it, or `ignore`
    the field as vLLM does."""
    link_roots: tuple[Path, ...] = required("LORA_PLUGINS_LINK_ROOTS", PATHS, "")
    """Directories, separated by commas, to which symlinks below the root may lead too; `/`: anywhere
    ([links](../guides/sources.md#a-directory))."""
    allow_pickle: bool = required("LORA_PLUGINS_ALLOW_PICKLE", FLAG, "0")
    """`1`: serve `adapter_model.bin` and `.pt`. Loading a pickle can run code, and its weights are not verified."""
    check_finite: bool = required("LORA_PLUGINS_CHECK_FINITE", FLAG, "1")
    """`0`: skip the pass over every weight, the check for NaN and infinity."""
    check_md5: bool = required("LORA_PLUGINS_CHECK_MD5", FLAG, "1")
    """`0`: compare S3 objects neither with ETags like an MD5 nor with checksums, for stores whose ETags are no MD5."""
    max_adapter_bytes: int = required("LORA_PLUGINS_MAX_ADAPTER_BYTES", BYTES, "8GiB")
    """Size limit of an adapter's configuration and weights together."""
    store_dir: Path = required("LORA_PLUGINS_STORE_DIR", PATH, "~/.cache/lora-plugins")
    """The [store](../operate/store.md); with `XDG_CACHE_HOME`, the default is `$XDG_CACHE_HOME/lora-plugins`.
    A user without a home directory, or with `/` as one, must set the variable."""
    store_max_bytes: int | None = optional("LORA_PLUGINS_STORE_MAX_BYTES", replace(BYTES, none="a share of the disk"))
    """The store's budget; unset, 80 % of the store's size and the free space beside the store at start, less where
    fewer than 1 GiB or 5 % of the disk would stay free ([store](../operate/store.md))."""
    sources: tuple[str, ...] = required("LORA_PLUGINS_SOURCES", order(*SOURCE_LABELS), ",".join(SOURCE_LABELS))
    """The order in which sources are asked; sources left out are asked last."""
    allowed_uris: tuple[str, ...] = required("LORA_PLUGINS_ALLOWED_URIS", NAMES, "")
    """Prefixes, separated by commas, of URIs for clients to have fetched
    ([sources](../guides/sources.md#by-uri))."""
    fetch_timeout_s: float = required("LORA_PLUGINS_FETCH_TIMEOUT_S", seconds(least=0.1), "300")
    """How long a source may take to find an adapter, and how long no byte may come in a fetch, retries included, or
    in a push ([deadlines](../guides/sources.md#deadlines))."""
    fetch_max_s: float | None = optional("LORA_PLUGINS_FETCH_MAX_S", replace(seconds(least=0.1), none="no limit"))
    """How long a fetch or the body of a push may take in all, however fast its bytes come."""
    absent_ttl_s: float = required("LORA_PLUGINS_ABSENT_TTL_S", seconds(least=0.0), "15")
    """How long a remote source's "no such adapter" is believed."""
    list_models: str = required("LORA_PLUGINS_LIST", choice("served", "all"), "served")
    """The adapters in `/v1/models`, beside the base model: `served` adapters, or `all` names of the sources too, the
    first 1,000, for each caller the permitted names only; `all` needs `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`
    ([pickers](../guides/first-request.md#a-picker-of-models))."""
    revalidate_s: float = required("LORA_PLUGINS_REVALIDATE_S", seconds(least=0.0), "60")
    """How long a remote source is not asked again for a name found there."""
    host_max_bytes: int | None = optional("LORA_PLUGINS_HOST_MAX_BYTES", BYTES)
    """Budget of each worker's [host cache](../explanation/manager.md), beside `--max-cpu-loras`."""
    host_policy: str = required("LORA_PLUGINS_HOST_POLICY", choice(*HOST_POLICIES), "lru")
    """The adapter that leaves the host cache first: `lru` or `lrfu` ([policies](../benchmarks/policies.md))."""
    load_inplace: str = required("LORA_PLUGINS_LOAD_INPLACE", choice("finish", "inflight"), "finish")
    """Running requests, when vLLM's own calls replace their version: requests `finish` on the weights of their
    beginning, or go on with the new weights (`inflight`)
    ([hot swap](../guides/admin.md#running-requests))."""
    unmatched: str = required("LORA_PLUGINS_UNMATCHED", choice("refuse", "warn"), "refuse")
    """An adapter with some modules outside of the model: `refuse` the adapter, or serve the rest and
    `warn`. An adapter without any match is always refused."""
    kernels: Kernels = required("LORA_PLUGINS_KERNELS", member(Kernels), "auto")
    """The kernels of `lora_kernels`: `auto`, `cpu`, `triton`, `reference` or `vllm`; startup
    fails where the chosen kernels are not available ([kernels](../explanation/kernels.md))."""
    preload: tuple[str, ...] = required("LORA_PLUGINS_PRELOAD", NAMES, "")
    """Names, separated by commas, for `lora_admin` to serve before `/health` is ready
    ([admin](../guides/admin.md#start-and-restart))."""
    adapters_file: Path | None = optional("LORA_PLUGINS_ADAPTERS_FILE", FILE)
    """A YAML file of adapters that `lora_admin` serves: from startup, and again whenever the file changes
    ([admin](../guides/admin.md#a-declared-set))."""
    restore: str = required("LORA_PLUGINS_RESTORE", RESTORE, "0")
    """`1`: serve from startup the adapters of this replica's last run
    ([restarts](../guides/admin.md#start-and-restart)); `living`: the same, and a replica with a new name serves what
    the living replicas serve ([lists](../operate/store.md#lists-of-replicas))."""
    replica: str | None = optional("LORA_PLUGINS_REPLICA", TEXT)
    """This replica's name among the replicas of the store, after a restart too: each has a list for
    `LORA_PLUGINS_RESTORE`. Unset, the name is the host's name and the port."""
    refresh_s: float = required("LORA_PLUGINS_REFRESH_S", seconds(least=0.0), "60")
    """How often `lora_admin` looks for new versions of served adapters; `0`: never
    ([hot swap](../guides/admin.md#hot-swap))."""
    drain_timeout_s: float = required("LORA_PLUGINS_DRAIN_TIMEOUT_S", seconds(least=0.0), "60")
    """How long an operator's unload waits for requests before the unload ends them."""
    policy: Path | None = optional("LORA_PLUGINS_POLICY", FILE)
    """A TOML file with the adapters of each API key ([access](../guides/access.md));
    needs `lora_admin`."""
    admin_key: str | None = optional("LORA_PLUGINS_ADMIN_KEY", KEY)
    """The key for `lora_admin`, sent as `Authorization: Bearer …`; without the key, `--api-key` and a policy, only
    callers on the server's machine may administer ([admin](../guides/admin.md#who-may-administer))."""
    url: str = required("LORA_PLUGINS_URL", TEXT, "http://127.0.0.1:8000")
    """The server of the command line where `--url` is not given; servers do not read the variable
    ([the command line](../guides/command-line.md#a-running-server))."""
    metrics_adapters: float | Path = required("LORA_PLUGINS_METRICS_ADAPTERS", LABELLED, "200")
    """The adapters with a label of their own in [metrics](metrics.md#names-and-their-number); the others share
    `_other`. A number, for the first so many; `all`; or a file with a name on each line, read again as it changes."""
    aws: Mapping[str, str] = field(default_factory=dict, repr=False)  # the AWS_* variables; never logged

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the process's environment, or `env` in its place.

        Raises:
            InvalidSettings: a value that is not of its variable's kind, or an unknown `LORA_PLUGINS_*` variable.
        """
        env = dict(os.environ if env is None else env)
        for name in env:
            if is_unknown(name):
                raise unknown_variable(name)
        if not env.get("LORA_PLUGINS_STORE_DIR") and env.get("XDG_CACHE_HOME"):
            env["LORA_PLUGINS_STORE_DIR"] = env["XDG_CACHE_HOME"] + "/lora-plugins"
        values = {attribute: variable.value(env.get(variable.name)) for attribute, variable in _ATTRIBUTES.items()}
        return cls(**values, aws={name: value for name, value in env.items() if name.startswith("AWS_")})


_ATTRIBUTES: Mapping[str, Variable] = {
    attribute.name: attribute.metadata["variable"] for attribute in fields(Settings) if attribute.metadata
}
# By plugin, the variable without which the plugin serves nothing.
NEEDS = {kind.plugin: _ATTRIBUTES[kind.setting].name for kind in plugin_names.SOURCES}
VARIABLES: Mapping[str, Variable] = {variable.name: variable for variable in (PLUGINS, *_ATTRIBUTES.values())}
OWN_VARIABLES = frozenset(name for name, variable in VARIABLES.items() if variable.is_ours)


# Kubernetes sets these variables in every pod for a Service called lora-plugins, or lora-plugins-something.
_OF_A_SERVICE = re.compile(PREFIX + r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


# Only the process that answers HTTP acts on these variables: they decide who may do what, and the declared set.
OF_API_SERVERS = frozenset(f"{PREFIX}{name}" for name in ("ADMIN_KEY", "POLICY", "ADAPTERS_FILE"))
_OF_STORES = {
    **dict.fromkeys(("s3", "s3a"), ("S3_", "AWS_")),
    **dict.fromkeys(("gs", "gcs"), ("GOOGLE_",)),
    **dict.fromkeys(("abfs", "abfss", "az", "adl"), ("AZURE_",)),
}
_SECRETS = frozenset({f"{PREFIX}ADMIN_KEY", "VLLM_API_KEY"})
# Between underscores or ends: TOKENIZERS_PARALLELISM is no secret.
_SECRET = re.compile(
    r"(^|_)(SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|STORAGE_KEY|CONNECTION_STRING|SAS|CREDENTIALS?)(_|$)"
)


def is_unknown(name: str) -> bool:
    """Return whether a variable has our prefix, and is no variable of ours."""
    return name.startswith(PREFIX) and name not in OWN_VARIABLES and _OF_A_SERVICE.fullmatch(name) is None


def unknown_variable(name: str) -> InvalidSettings:
    """Return the error of a `LORA_PLUGINS_*` variable that does not exist, with a similar name."""
    close = closest(name.removeprefix(PREFIX), (known.removeprefix(PREFIX) for known in OWN_VARIABLES))
    close = close and PREFIX + close
    return InvalidSettings(
        f"the unknown variable {name}",
        expected="" if close else "one of the variables that the page on settings lists",
        remedy=f"did you mean {close}? If not, unset {name}" if close else f"unset {name}, or correct its spelling",
    )


def named_in_environment(plugin: str, env: Mapping[str, str] | None = None) -> bool:
    """Return whether `VLLM_PLUGINS` names `plugin`, or everything; False where unset, though vLLM then loads all.

    Everything is all plugins but the sources without their own variable. Never raises.
    """
    env = os.environ if env is None else env
    named, needs = names_of_plugins(env), NEEDS.get(plugin)
    return plugin in named or (plugin_names.EVERYTHING in named and (needs is None or bool(env.get(needs))))


def names_of_plugins(env: Mapping[str, str]) -> list[str]:
    """Return the very names in `VLLM_PLUGINS`, as vLLM splits the text (vllm/envs.py, 0.30 to 0.33). Never raises."""
    return env.get(PLUGINS.name, "").split(",")


def environment() -> Mapping[str, str]:
    """Return the variables of this process as they are, to pass them on or to read no settings from them."""
    return dict(os.environ)


def variables_of_workers() -> list[str]:
    """Return the names of set variables that engines and workers need, vLLM's own left out.

    A worker without an adapter's files fetches the files itself, so the worker needs the variables of the configured
    object stores; variables about rights are an API server's alone.
    """
    prefixes = (PREFIX, *_prefixes_of_stores())
    known = {*VARIABLES, "XDG_CACHE_HOME"} - OF_API_SERVERS
    return sorted(
        name
        for name in os.environ
        if name not in OF_API_SERVERS and not name.startswith("VLLM_") and (name in known or name.startswith(prefixes))
    )


def variables_of_servers() -> list[str]:
    """Return the names of set variables that a server with our plugins and libraries reads."""
    others = (name for name in os.environ if name.startswith(("VLLM_", "HF_")) or name in OF_API_SERVERS)
    return sorted({*others, *variables_of_workers()})


def is_secret(name: str) -> bool:
    """Return whether a variable's text gives its holder rights."""
    return name in _SECRETS or _SECRET.search(name) is not None


def _prefixes_of_stores() -> list[str]:
    """Return the prefixes of the variables for the configured object stores."""
    places = [os.environ.get("S3_PATH_TEMPLATE", ""), *os.environ.get(f"{PREFIX}ALLOWED_URIS", "").split(",")]
    schemes = {place.strip().partition("://")[0].lower() for place in places if "://" in place} - {"file", "hf"}
    found = {prefix for scheme in schemes for prefix in _OF_STORES.get(scheme, ())}
    # fsspec reads FSSPEC_* for every file system.
    return sorted({*found, "FSSPEC_"} if schemes else found)


def set_for_children(name: str, text: str) -> None:
    """Set another package's variable, which this process and its children then read."""
    os.environ[name] = text


def default_for_children(name: str, text: str) -> None:
    """Set another package's variable like `set_for_children`, unless the operator has set the variable."""
    os.environ.setdefault(name, text)
