"""LoRA adapters for vLLM, found, verified and served by name.

Importing this package imports neither vLLM nor torch; `make ledger` lists the symbols of vLLM that we touch.
"""

from lora_plugins.adapter.names import AdapterName
from lora_plugins.errors import (
    AdapterNotFound,
    IncompatibleAdapter,
    InvalidAdapter,
    InvalidSettings,
    LoRAPluginsError,
    NoFreeSlot,
    NotAllowed,
    OutOfMemory,
    PushSuperseded,
    RateExceeded,
    ReplicaLost,
    SlowBody,
    SourceUnavailable,
    VersionMismatch,
)

__version__ = "0.1.0"

__all__ = [
    "AdapterName",
    "AdapterNotFound",
    "IncompatibleAdapter",
    "InvalidAdapter",
    "InvalidSettings",
    "LoRAPluginsError",
    "NoFreeSlot",
    "NotAllowed",
    "OutOfMemory",
    "PushSuperseded",
    "RateExceeded",
    "ReplicaLost",
    "SlowBody",
    "SourceUnavailable",
    "VersionMismatch",
    "__version__",
]
