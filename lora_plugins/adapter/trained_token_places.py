"""Finds where the rows of an adapter's trained tokens go: into the table of the embedding, of the head, or of both.

Runs in the API server and on the command line, for the errors alone, and in workers, which write the rows into tables.
In go the tensors with the rows, the configuration with the tokens' ids, and the engine's description of its model; out
come the rows of the embedding and of the head.

PEFT trains single rows of an embedding or of a head (`trainable_token_indices`), in the place of the base model's rows.
A head with the embedding's own weight has the embedding's rows too, unless the adapter has rows of the head
(`set_additional_trainable_modules` in peft/utils/other.py, 0.21).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lora_plugins.adapter.config import AdapterConfig
from lora_plugins.adapter.model_modules import ModelModules, TokenPlaces
from lora_plugins.adapter.weights import Beside, BesideKind
from lora_plugins.errors import IncompatibleAdapter

MAX_TOKENS = 256  # rows of a slot's table, for which a GPU has memory from the start
_MERGE = "merge the adapter into the base model"


def token_rows(
    beside: Iterable[Beside], config: AdapterConfig, modules: ModelModules, read: Callable[[str], str | None]
) -> tuple[Beside | None, Beside | None]:
    """Return the rows of the embedding and the rows of the head; None where the adapter trains none.

    Args:
        beside: of the adapter's weights.
        config: the adapter's.
        modules: the engine's.
        read: returns the engine's name for the module of an A's name, or None.

    Raises:
        IncompatibleAdapter: tokens that the model lacks, rows of another size, or a model whose rows nothing replaces.
    """
    found: dict[str, Beside] = {}
    places = modules.tokens
    for one in beside:
        if one.kind is not BesideKind.TOKENS:
            continue
        if places is None:
            what = "trained tokens (trainable_token_indices)"
            raise IncompatibleAdapter(what, expected=f"none, {modules.without_tokens}", remedy=_MERGE)
        # By the last part: trainers and engines put different prefixes before the only embedding.
        last = (read(one.name_of_a) or one.module).rpartition(".")[2]
        place = next((name for name in places.names if name.rpartition(".")[2] == last), None)
        if place is None or place in found:
            raise _misfit(f"trained tokens of '{one.module}'", f"of {' and '.join(map(repr, places.names))}, once each")
        _check_sizes(one, config.tokens_of(one.module), places)
        found[place] = one
    if places is None or not found:  # no trained tokens
        return None, None
    embedding, head = found.get(places.embedding), found.get(places.head)
    if not places.is_tied and len(config.token_ids) > len(found):
        raise _misfit("trained tokens of the embedding, shared with the head", f"rows of '{places.head}' too")
    return embedding, head or (embedding if places.is_tied else None)


def _check_sizes(one: Beside, ids: tuple[int, ...], places: TokenPlaces) -> None:
    for is_wrong, found, expected in (
        (max(ids) >= places.words, f"token {max(ids)}", f"ids below {places.words}, the model's words"),
        (len(ids) > places.most, f"{len(ids)} tokens", f"at most {places.most}"),
        (one.tensor.shape[1] != places.features, f"rows of {one.tensor.shape[1]}", f"{places.features} features"),
    ):
        if is_wrong:
            raise _misfit(f"{found} trained in '{one.module}'", expected)


def _misfit(found: str, expected: str) -> IncompatibleAdapter:
    remedy = f"serve it with the base model that it was trained on, or {_MERGE}"
    return IncompatibleAdapter(found, expected=expected, remedy=remedy)
