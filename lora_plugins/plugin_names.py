"""The names of our plugins: the entry points in `pyproject.toml`, and the names that `VLLM_PLUGINS` lists.

Each kind of source is a row of `SOURCES`; whatever names the kinds of sources, in other modules, reads the table.
"""

from typing import NamedTuple

EVERYTHING = "lora_plugins"  # all plugins below; of the sources, those whose own variable is set

FILESYSTEM = "lora_filesystem_resolver"
OTHERS = "lora_sources"  # sources of other packages, by entry points
MANAGER = "lora_lru_manager"
KERNELS = "lora_kernels"
ADMIN = "lora_admin"


class SourceKind(NamedTuple):
    """A kind of source, and the plugin that serves from it.

    Attributes:
        plugin: the plugin's name. label: the source's name in settings, logs and metrics.
        setting: the field of `Settings` without which the plugin serves nothing.
        scheme: of the URIs of the source's versions.
        module: below `lora_plugins.resolvers.sources`; the module's `configured` makes the source.
        builtin: vLLM's module with a resolver of the plugin's name, if any.
    """

    plugin: str
    label: str
    setting: str
    scheme: str
    module: str
    builtin: str = ""


_VLLM = "vllm.plugins.lora_resolvers"
SOURCES = (
    SourceKind(FILESYSTEM, "filesystem", "filesystem_root", "file", "filesystem", f"{_VLLM}.filesystem_resolver"),
    SourceKind("lora_s3_resolver", "s3", "s3_path_template", "s3", "object_store"),
    SourceKind("lora_hf_hub_resolver", "hub", "hub_repos", "hf", "hub", f"{_VLLM}.hf_hub_resolver"),
)
RESOLVERS = (*(kind.plugin for kind in SOURCES), OTHERS)
OURS = (*RESOLVERS, MANAGER, KERNELS, ADMIN)

# Where vLLM 0.30 to 0.33 look for plugins.
PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.endpoint_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)


def how_to_install(extra: str = "") -> str:
    """Return the command, for remedies: the package is on no index, so `pip install lora-plugins` finds nothing."""
    package = f"lora-plugins[{extra}]" if extra else "lora-plugins"
    return f'pip install "{package} @ git+$REPOSITORY", where REPOSITORY is the address of its git repository'
