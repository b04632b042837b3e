"""The names of our plugins: the entry points in `pyproject.toml`, and the names that `VLLM_PLUGINS` lists."""

EVERYTHING = "lora_plugins"  # all plugins below; of the sources, those whose own variable is set

FILESYSTEM = "lora_filesystem_resolver"
S3 = "lora_s3_resolver"
HUB = "lora_hf_hub_resolver"
OTHERS = "lora_sources"
MANAGER = "lora_lru_manager"
KERNELS = "lora_kernels"
ADMIN = "lora_admin"

# By plugin, the variable without which the plugin serves nothing.
NEEDS = {FILESYSTEM: "VLLM_LORA_RESOLVER_CACHE_DIR", S3: "S3_PATH_TEMPLATE", HUB: "VLLM_LORA_RESOLVER_HF_REPO_LIST"}
# By plugin, the source's name in settings, logs and metrics.
SOURCES = {FILESYSTEM: "filesystem", S3: "s3", HUB: "hub"}
RESOLVERS = (*SOURCES, OTHERS)
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
