"""All forms, by what they run on; in the order in which one engine is taken through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from testbed.frameworks.engines import Engine, Said
from testbed.frameworks.versions import Files

Run = Callable[[Engine, Files], AsyncIterator[tuple[str, Said]]]
LLM, ASYNC, ASYNC_TP, SERVE = "LLM", "AsyncLLM", "AsyncLLM, two workers", "vllm serve"
SET_FIRST, SET_LAST = "LLM, classes set first", "LLM, classes set last"
WITHOUT_LORA, OF_TRL, OF_VERL = "LLM without LoRA", "TRL's own class", "AsyncLLM, verl's own extension"
KINDS = (LLM, ASYNC, ASYNC_TP, SERVE, SET_FIRST, SET_LAST, WITHOUT_LORA, OF_TRL, OF_VERL)
PACKAGED = (OF_TRL, OF_VERL)  # with code from `packages`


@dataclass(frozen=True)
class Form:
    """A way of handing adapters to vLLM.

    Attributes:
        framework: whose; the row of the matrix.
        run: its place in this package, `module:function`, which names each answer's right version and the answer.
        stock: whose answers vLLM gives without plugins, in order, where they are not the right ones.
        right: whose answers are right, in order. A request that runs while weights change finishes on the old ones.
    """

    framework: str
    kind: str
    run: str
    note: str
    right: tuple[str, ...] = ("v1", "v2")
    stock: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.run.partition(':')[2]} ({self.kind})"


def _on(kinds: tuple[str, ...], framework: str, run: str, note: str, **more: tuple[str, ...]) -> list[Form]:
    return [Form(framework, kind, run, note, **more) for kind in kinds]


BOTH = (LLM, ASYNC)
ALL = (LLM, ASYNC, ASYNC_TP)
OWN = "vLLM's own calls"
FORMS = (
    *_on(ALL, "verl", "workers:verl", "workers remove and add tensors; requests with a stub path"),
    *_on((OF_VERL,), "verl", "of_verl:updated_by_its_extension", "0.9.1's own code, `simon_lora_path`",
         right=("base", "v1", "v2")),
    *_on((LLM,), "ms-swift", "tensors:swift_in_process", "`add_lora` of tensors in place, in this process"),
    *_on(ALL, "ms-swift", "workers:swift_server", "workers add tensors in place; requests with a stub path"),
    *_on((LLM,), "verl", "tensors:in_the_request", "tensors in the request, vLLM's loader patched"),
    *_on(BOTH, "SkyRL", "fixed_id:stub_path", "before July 2026: `add_lora` of a real path, requests with a stub"),
    *_on(BOTH, "SkyRL", "fixed_id:in_place_at_one_path", "prefix cache reset, one path, `load_inplace`"),
    *_on(BOTH, "SkyRL", "fixed_id:in_place_with_its_cache", "the same without the reset", stock=("v1", "none")),
    *_on((SERVE,), "SkyRL", "served:into_the_table", "a route that fills vLLM's table of names"),
    *_on(ALL, "prime-rl", "steps:same_id_in_flight", "same id, new path, a request runs",
         right=("v1", "v2", "v1"), stock=("v1", "v2", "none")),
    *_on((SERVE,), "prime-rl", "served:in_place_in_flight", "its route: same name, new path, a request runs",
         right=("v1", "v2", "v1"), stock=("v1", "v2", "none")),
    *_on((ASYNC,), "ART", "steps:a_name_for_each_step", "a name and path for each step, in a pause",
         right=("v1", "v2", "v1")),
    *_on((SERVE,), "ART", "served:a_name_for_each_step", "`/v1/load_lora_adapter`, a name for each step",
         right=("v1", "v2", "v2")),
    *_on(BOTH, "ART", "fixed_id:removed_and_added", "until 2025: `remove_lora` and `add_lora` of one id"),
    *_on((SET_FIRST,), "Unsloth", "other_manager:tensors_in_the_request", "the package's own classes"),
    *_on((SET_LAST,), "Unsloth", "other_manager:tensors_in_the_request", "the package's own classes"),
    *_on((WITHOUT_LORA,), "TRL, OpenRLHF", "merged:merged_weights", "merged weights pushed",
         right=("base", "v1", "v2")),
    *_on((OF_TRL,), "TRL, OpenRLHF", "merged:trl_merges", "`VLLMGeneration` pushes merged weights",
         right=("base", "v1", "v2")),
    *_on((SERVE,), OWN, "served:in_place_at_one_path", "`/v1/load_lora_adapter` in place, new files at one path",
         stock=("v1", "none")),
    *_on(BOTH, OWN, "own_calls:in_place_in_the_request", "`load_inplace` in the request, after a reset"),
    *_on(BOTH, OWN, "own_calls:an_id_means_what_is_loaded", "another path for a loaded id", right=("v1", "v1")),
    *_on(BOTH, OWN, "own_calls:another_path_is_added", "`add_lora` of another path for a loaded id",
         stock=("v1", "v1")),
    *_on(ALL, OWN, "own_calls:workers_reload_a_path", "workers remove and add one path with new files"),
    *_on(BOTH, OWN, "own_calls:in_place_while_it_runs", "`load_inplace` at one path, a request runs",
         right=("v1", "v2"), stock=("none", "v2")),
    *_on((ASYNC,), OWN, "own_calls:in_place_in_a_pause", "pause with `keep`, `load_inplace`, resume",
         right=("v1", "v2"), stock=("none", "v2")),
    *_on(BOTH, OWN, "own_calls:overwritten_and_evicted", "files overwritten after the load, then evicted",
         right=("v1", "v1"), stock=("v1", "none")),
    *_on(BOTH, OWN, "own_calls:deleted_and_evicted", "files deleted after the load, then evicted",
         right=("v1", "v1"), stock=("v1", "error")),
)  # fmt: skip
