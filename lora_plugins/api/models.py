"""Bodies of the admin API's requests and answers, as pydantic models; the command line reads answers with them too.

FastAPI makes vLLM's OpenAPI page from the models, so `description` and the docstrings of models are text for users.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lora_plugins.adapter.mixture import canonical
from lora_plugins.adapter.names import MIN_PREFIX

# An adapter's name in a route. The names of equal mixtures, whose parts come in any order, become one name.
Name = Annotated[str, AfterValidator(canonical)]


class ServedState(StrEnum):
    """The state of a name for new requests."""

    # Clients compare these texts, so the texts are a part of the API and stay as they are.
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    BLOCKED = "blocked"


class AdapterSource(BaseModel):
    """Where an adapter comes from."""

    model_config = ConfigDict(extra="forbid")

    uri: str = Field(description="file://, s3:// or hf:// below a prefix of LORA_PLUGINS_ALLOWED_URIS", max_length=2048)


class LoadAdapterRequest(BaseModel):
    """Serve an adapter under a name; without a source, the server's own sources are asked for the name."""

    model_config = ConfigDict(extra="forbid")

    lora_name: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(canonical)]
    source: AdapterSource | None = None


class SwapRequest(BaseModel):
    """The fate of running requests at a swap."""

    model_config = ConfigDict(extra="forbid")

    running: Literal["finish", "inflight"] = Field(
        default="finish", description="whether they finish on the weights that they began with, or go on with the new"
    )

    @property
    def moves(self) -> bool:
        """Whether running requests go on with the new weights."""
        return self.running == "inflight"


class RollbackRequest(SwapRequest):
    """The version to go back to; without a digest, the version before."""

    digest: str | None = Field(
        default=None, description="the beginning of a kept version's digest", pattern=f"^[0-9a-f]{{{MIN_PREFIX},64}}$"
    )


class AdapterStatus(BaseModel):
    """The result of a request of the admin API."""

    status: str = Field(description='"success"; "draining" while requests still run, "resumed" if a pause ended early')
    message: str
    lora_name: str
    lora_id: int = Field(description="derived from the name: the same on every replica and after every restart")


class VersionStatus(AdapterStatus):
    """The result of a load, a refresh or a rollback, with the version that new requests get."""

    digest: str | None = Field(default=None, description="of the version that is served now; null if unknown")
    previous_digest: str | None = Field(default=None, description="of the one that was served before the call")
    swapped: bool = Field(default=False, description="whether the call has exchanged one for the other")
    elapsed_ms: float = Field(default=0.0, description="of the call, waiting for others that change the name included")


class PushTimings(BaseModel):
    """Durations of a push's steps, in milliseconds."""

    waited_ms: float = Field(description="for a place to be received, and for an earlier push of the name")
    received_ms: float = Field(description="until all bytes were in the store's file system")
    served_ms: float = Field(description="until they were verified, loaded, and what new requests get")


class PushStatus(VersionStatus):
    """The result of a push."""

    timings: PushTimings


class LastError(BaseModel):
    """The last error of an adapter that goes on serving, or that could not be served."""

    code: str
    message: str
    at: float = Field(description="seconds since 1970")


class ChatView(BaseModel):
    """What an adapter brings for chats in the place of the base model's, or beside it."""

    template: bool = Field(description="whether it has a chat template of its own")
    special_tokens: dict[str, str] = Field(description="for its template, by their names there")
    end_token: str | None = Field(description="that ends its answers, beside the base model's")
    end_ids: list[int] = Field(description="of further end tokens")
    added_tokens: dict[str, int] = Field(description="ids by text, of tokens that only the adapter's tokenizer has")
    lost_tokens: dict[str, int] = Field(description="likewise, of tokens that the server cuts as the base model does")
    unused: list[str] = Field(default_factory=list, description="files and keys that are not used, and why")


class AdapterView(BaseModel):
    """One adapter as this server knows it."""

    lora_name: str
    lora_id: int
    state: ServedState
    source: str | None = Field(default=None, description="label of the source; null if unknown")
    uri: str | None = None
    version: str | None = Field(default=None, description="at the source: a commit, or a digest of names, sizes, ETags")
    digest: str | None = Field(default=None, description="SHA-256 over the served files")
    path: str | None = None
    size_bytes: int = Field(default=0, description="of the files; in host memory where only workers have the files")
    rank: int | None = None
    tiers: list[str] = Field(default_factory=list, description='those that it is in: "store", "host", "slot"')
    requests_in_flight: int = Field(default=0, description="of all versions: running")
    requests_held: int = Field(default=0, description="of all versions: waiting for a load, a slot, a row, or a resume")
    last_used_at: float | None = Field(default=None, description="when the last request came; seconds since 1970")
    pinned: bool = Field(default=False, description="stays in host memory and slot until it is unpinned")
    pinned_digest: str | None = Field(
        default=None, description="the version that it was rolled back to, or loaded in by its path, and stays at"
    )
    previous_digests: list[str] = Field(
        default_factory=list, description="that a rollback can go to, the last one first"
    )
    last_error: LastError | None = None
    chat: ChatView | None = Field(default=None, description="null in lists, and where it brings nothing")
    warnings: list[str] = Field(default_factory=list, description="that it was trained on another base model, by name")


class DeclaredState(StrEnum):
    """The state of an adapter of the declared set."""

    SERVED = "served"
    FAILED = "failed"
    WAITING = "waiting"


class DeclaredView(BaseModel):
    """One adapter of the declared set."""

    lora_name: str
    state: DeclaredState
    error: str | None = None


class DeclaredSetView(BaseModel):
    """The set of adapters that LORA_PLUGINS_ADAPTERS_FILE declares."""

    loras: list[DeclaredView]
    file_error: str | None = Field(default=None, description="why what the file says now is not followed")


class AdapterList(BaseModel):
    """All adapters that this server serves or has blocked, or a page of them."""

    loras: list[AdapterView]
    count: int = Field(description="of all, on every page")
    is_paused: bool = Field(default=False, description="vLLM's /pause holds all requests, until /resume")
    short_of: str = Field(
        default="", description="the flag of vllm serve that makes requests wait while memory is left"
    )
    declared: DeclaredSetView | None = Field(
        default=None, description="null without LORA_PLUGINS_ADAPTERS_FILE, and on every page but the first"
    )
    next: str | None = Field(default=None, description="`after` of the next page; null where this is the last")
