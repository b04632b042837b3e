"""Plans how the tensors of an adapter in another form than the engine's modules become tensors in the engine's form.

Runs in the API server and on the command line, after an adapter was verified and before the adapter is compared with
the engine's modules (`verify.fit_adapter`). In go the pairs by names and shapes, and the engine's description of its
model; out comes a `Conversion`: kept tensors, new tensors with their sources and moves, and a changed configuration.
Nothing is read or written here: `writing.py` writes the tensors in the reading process.

First each rule (`_RULES`) takes the pairs whose form the rule knows. If pairs are left, other spellings of all names
are tried, and a spelling counts only if every tensor lands by it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from lora_plugins.adapter.canonical import with_exact_patterns
from lora_plugins.adapter.config import ADALORA, IA3, AdapterConfig, malformed
from lora_plugins.adapter.landing import Model, Respell, check_landing
from lora_plugins.adapter.layouts import experts, fused
from lora_plugins.adapter.layouts.tensors import Change, Move, Names, NewPair, NewTensor, Part, Placed, Scaled, new_pair
from lora_plugins.adapter.paced_work import paced
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.vector_places import NEUTRAL, vectors_of
from lora_plugins.adapter.weights import PREFIX, Beside, BesideKind, LoraPair, Weights
from lora_plugins.adapter.writers import in_words, unwrapped, wrappers_in
from lora_plugins.errors import IncompatibleAdapter, InvalidAdapter

_RENAMED = "keys renamed"
_MODEL = "model."
_TINKERS_HEAD = re.compile(r"\b(model\.)?unembed_tokens$")  # `build_name_remaps` of tinker-cookbook has the same step
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<layers>[^.]+)\.\d+\.")  # a module of a layer, such as `model.layers.0.`

_Spelling = tuple[Respell, str]  # another spelling of names, and its description


@dataclass(frozen=True, slots=True)
class Conversion:
    """An adapter in the engine's form.

    Attributes:
        weights: the adapter's pairs, including pairs that are still to be written.
        config: with ranks and alphas by which each pair computes the same as before.
        kept: unchanged tensors. made: pairs that are still to be written.
        vectors: tensors beside A and B of the made pairs, such as biases and magnitudes, still to be written.
        changes: a line for each kind of change; empty where the adapter has the engine's form already.
    """

    weights: Weights
    config: AdapterConfig
    kept: tuple[TensorInfo, ...] = ()
    made: tuple[NewPair, ...] = ()
    changes: tuple[str, ...] = ()
    vectors: tuple[NewTensor, ...] = ()


def plan_conversion(weights: Weights, config: AdapterConfig, model: Model) -> Conversion:
    """Bring the pairs that do not land in the model into a form that lands, where a rule knows a form.

    Pairs without a rule stay unchanged, for `check_landing` to refuse.

    Raises:
        InvalidAdapter: two pairs of the adapter are for one module of the engine.
        IncompatibleAdapter: experts of another rank than the configuration's, or of an unknown layout.
    """
    if IA3 in config.beside:
        return _of_factors(weights, config, model)
    names = Names(config, model)
    experts.check_ranks(weights.pairs, names)
    names.exchanged = experts.exchanged(weights.pairs, names)
    if names.exchanged:  # every rule writes the present layout
        config = replace(config, peft_version=experts.FIRST_PRESENT)
    # Landed pairs are in the engine's form already; the pairs that are left need a rule.
    landed: list[LoraPair] = []
    left: list[LoraPair] = []
    # AdaLoRA's pairs are always made again: the engine has no place for the singular values beside A and B.
    # `factors` has the singular values (`lora_E`) by the name of A.
    factors = {pair.a.name: factor for pair, factor in _with(BesideKind.SINGULAR, weights)}
    for pair in paced(weights.pairs):
        (landed if names.lands(pair) and pair.a.name not in factors else left).append(pair)
    plan = _by_rules(left, names, model.respellings)
    # Spellings come last: a rule that fits proves more than a renaming of all keys.
    if plan.left:
        plan = _spelled(left, landed, names, model, weights) or plan
    left, made, changes = plan.left, plan.made, plan.changes
    if copies := list(_copies(landed, made, names)):
        made += copies
        changes["pairs given as well to the module that has the same weight"] = len(copies)
    if factors:
        made = [replace(new, a=_multiplied(new.a, factors)) for new in paced(made)]
        changes["AdaLoRA's singular values multiplied into A"] = len(made)
        config = replace(config, beside=config.beside - {ADALORA})
    # Sorted, so that an adapter is described in the same words each time.
    described = [f"{text} ({count} modules)" for text, count in sorted(changes.items())]
    return _conversion([*landed, *left], made, weights, config, described)


def _conversion(
    unchanged: Sequence[LoraPair], made: Sequence[NewPair], weights: Weights, config: AdapterConfig, changes: list[str]
) -> Conversion:
    """Return the conversion with these pairs, and with what modules have beside A and B.

    Without `changes`, and with all weights in one file, the result has nothing to write: the adapter as it is.

    Raises:
        InvalidAdapter: two pairs are for one module: a rule may make a pair for a module that another pair has.
        IncompatibleAdapter: as `_vectors`.
    """
    vectors = list(_vectors(made, weights))
    # Modules whose pairs a rule has taken: `vectors` has their tensors beside A and B, under the new modules' names.
    taken = {pair.module for pair in weights.pairs} - {pair.module for pair in unchanged}
    beside = tuple(one for one in weights.beside if one.module not in taken and one.kind is not BesideKind.SINGULAR)
    others = (*weights.others, *(one.tensor for one in beside))
    files = {tensor.file for pair in weights.pairs for tensor in (pair.a, pair.b)} | {one.file for one in others}
    if files != {""}:  # a single file has no name here
        changes = [*changes, f"{len(files)} files of weights joined into one"]
    if not changes:
        return Conversion(weights, config)
    pairs = (*unchanged, *(new.pair for new in made))
    for module, count in Counter(pair.module for pair in pairs).most_common(1):
        if count > 1:
            raise malformed(
                f"two forms of module '{module}', fused and in parts, or under two names", "each module once"
            )
    return Conversion(
        replace(weights, pairs=pairs, name_in_keys=None, beside=(*beside, *(one for one, _ in vectors))),
        with_exact_patterns(config, pairs) if made else config,
        (*(tensor for pair in unchanged for tensor in (pair.a, pair.b)), *others),
        tuple(made),
        tuple(changes),
        tuple(tensor for _, tensor in vectors),
    )


def _of_factors(weights: Weights, config: AdapterConfig, model: Model) -> Conversion:
    """Plan the conversion of IA3's factors, which move as the only column of a B of their module would.

    Each factor gets a pair that exists only for the plan, of rank 1, with the factor as B and an A that no file has.
    """
    pairs = [
        LoraPair(one.module, replace(one.tensor, name=one.name_of_a), one.tensor, rank=1, alpha=1.0)
        for one in paced(weights.beside)
        if ".experts" not in one.module
    ]
    # The names of the invented As, which must not count as tensors to keep.
    made_up = {pair.a.name for pair in pairs}
    found = plan_conversion(replace(weights, pairs=tuple(pairs)), replace(config, beside=frozenset()), model)
    kept = {one.name: one for one in paced(found.kept) if one.name not in made_up}
    return replace(found, weights=replace(found.weights, pairs=()), config=config, kept=tuple(kept.values()), made=())


@dataclass(frozen=True, slots=True)
class _ByRules:
    """The pairs that the rules make, and the pairs that no rule takes."""

    left: list[LoraPair]
    made: list[NewPair]
    changes: Counter[str]


def _by_rules(pairs: Sequence[LoraPair], names: Names, respellings: Sequence[Respell]) -> _ByRules:
    """Apply every rule to the pairs, first under their own names and then under each of `respellings`."""
    left = list(pairs)
    made: list[NewPair] = []
    changes: Counter[str] = Counter()
    as_it_is: Respell = str
    for respell in (as_it_is, *respellings):
        for rule in _RULES:
            gone: set[str] = set()
            respelled = [replace(pair, module=respell(pair.module)) for pair in left]
            for taken, new, text in paced(rule(respelled, names)):
                gone |= {pair.a.name for pair in taken}
                made += new
                changes[text] += len(new)
            # A's name in the file identifies a pair: a spelling changes modules' names, never tensors' names.
            left = [pair for pair in left if pair.a.name not in gone]
    return _ByRules(left, made, changes)


def _vectors(made: Iterable[NewPair], weights: Weights) -> Iterator[tuple[Beside, NewTensor]]:
    """Yield the vectors of pairs that are made, whose elements move as the rows of B do.

    Raises:
        IncompatibleAdapter: rows of a made B that have no element.
    """
    for kind in NEUTRAL:
        of_pair = {pair.b.name: vector for pair, vector in _with(kind, weights)}
        for new in made:
            sources = [of_pair[source.name] for source in new.b.sources if source.name in of_pair]
            if not sources:
                continue
            move, outputs = new.b.make, (new.b.info.shape[0], *sources[0].shape[1:])
            is_whole = len(sources) == len(new.b.sources)
            if isinstance(move, Part) and not move.shape:  # some rows of one B, without another order of axes
                rows: Move = Part(move.slices[:1])
            # Several Bs are placed in one. Rows without an element would be 0: right for a bias of a part that is not
            # adapted, and wrong for a magnitude, which is a norm.
            elif (
                isinstance(move, Placed)
                and is_whole
                and len({one.dtype for one in sources}) == 1  # elements are moved as bits
                and (kind is BesideKind.B_BIAS or sum(one.shape[0] for one in sources) == outputs[0])
            ):
                rows = Placed(outputs, tuple(place[:1] for place in move.places))
            else:
                raise IncompatibleAdapter(
                    f"'{sources[0].name}' ({kind.key}) in another layout than the engine's",
                    expected="the vectors of all parts of a fused module in one dtype, or none",
                    remedy="train all parts of the module, or merge the adapter into the base model",
                )
            # In no file yet, so without a place.
            info = TensorInfo(f"{PREFIX}{new.module}.{kind.end}", sources[0].dtype, outputs, begin=0, end=0)
            yield Beside(new.module, kind, info), NewTensor(info, tuple(sources), rows)


def _with(kind: BesideKind, weights: Weights) -> Iterator[tuple[LoraPair, TensorInfo]]:
    """Yield the pairs whose module has a tensor of this kind, each with the tensor."""
    tensors = {one.module: one.tensor for one in weights.beside if one.kind is kind}
    yield from ((pair, tensors[pair.module]) for pair in paced(weights.pairs) if pair.module in tensors)


def _multiplied(a: NewTensor, factors: Mapping[str, TensorInfo]) -> NewTensor:
    """Return A with each source multiplied by its singular values, whose tensors follow the sources (`Scaled`)."""
    sources = (*a.sources, *(factors[source.name] for source in a.sources))
    move = Scaled(cast("Part | Placed", a.make), tuple(source.dtype for source in sources))
    return NewTensor(replace(a.info, dtype="F32"), sources, move)


def _copies(landed: Sequence[LoraPair], made: Sequence[NewPair], names: Names) -> Iterator[NewPair]:
    """Yield a pair for each module that shares its weight with an adapted module, and that no pair is for."""
    if not names.model.modules.copies:
        return
    new = [*(_same(pair.module, pair) for pair in paced(landed)), *made]
    present = {names.read(one.module) for one in paced(new)}
    for one in paced(new):
        module = names.copy_of(one.pair)
        if module is not None and names.read(module) not in present:
            a, b = ((side.sources, side.info.shape, side.make) for side in (one.a, one.b))
            yield new_pair(module, a, b, one.rank, one.alpha)


def _spelled(
    left: Sequence[LoraPair], landed: Sequence[LoraPair], names: Names, model: Model, weights: Weights
) -> _ByRules | None:
    """Return the plan of the only other spelling by which every tensor lands and fits; None without such a spelling."""
    for kind in _spellings(left, landed, names):
        found: dict[tuple[str, ...], _ByRules] = {}
        for respell, text in kind:
            respelled = [replace(pair, module=respell(pair.module)) for pair in left]
            plan = _by_rules(respelled, names, model.respellings)
            made = [*plan.made, *_copies(landed, plan.made, names)]
            if not plan.left and _fit(landed, made, weights, model):
                plan.changes[text] += sum(respell(pair.module) != pair.module for pair in left)
                del plan.changes[_RENAMED]  # the spelling's own text says so already
                # Spellings that lead to the same modules are one.
                found[tuple(names.read(new.module) for new in plan.made)] = plan
        # Two spellings that fit would be a guess: refuse instead.
        if len(found) == 1:
            return found.popitem()[1]
    return None


def _spellings(left: Sequence[LoraPair], landed: Sequence[LoraPair], names: Names) -> Iterator[list[_Spelling]]:
    """Yield spellings of the names that land nowhere, by kinds; of a kind at most one spelling holds.

    Args:
        left: pairs that land nowhere.
        landed: the other pairs of the adapter.
        names: where names land.
    """
    wrappers = wrappers_in(pair.module for pair in left)
    texts = [f"{in_words(wrappers)} taken out of keys"] if wrappers else []
    inner: Respell = unwrapped if wrappers else str
    if any(_TINKERS_HEAD.search(pair.module) for pair in left):
        texts.append("Tinker's 'unembed_tokens' is now 'lm_head'")
        inner = _then(inner, partial(_TINKERS_HEAD.sub, "lm_head"))
    if texts:
        yield [(inner, ", ".join(texts))]
    # Where some pairs land with numbers of layers, or the model has a module that it cannot adapt, the adapter's names
    # are this model's: another prefix is not the cause, and would be a guess.
    if any(_NUMBERED.match(pair.module) for pair in landed) or any(
        names.model.modules.why_unadapted(names.read(pair.module)) for pair in left
    ):
        return
    kind = []
    for old, new in _prefixes([inner(pair.module) for pair in left], names):
        text = f"'{old}' in keys is now '{new}'" if old else f"'{new}' put before keys"
        kind.append((_then(inner, partial(_moved, old, new)), ", ".join([*texts, text])))
    yield kind


def _then(first: Respell, second: Respell) -> Respell:
    """Return the spelling that applies `first`, and then `second` to the result."""
    return lambda module: second(first(module))


def _prefixes(modules: Sequence[str], names: Names) -> Iterator[tuple[str, str]]:
    """Yield prefixes of an adapter's names (`AutoModel`, a text model), each with a prefix of the engine's names."""
    found = [match for module in modules if (match := _NUMBERED.match(module))]
    old = {match["prefix"] for match in found}
    if old != {_MODEL}:
        yield "", _MODEL
    if old in ({""}, {_MODEL}):  # the adapter's layers are all below one of these two prefixes
        layers = {match["layers"] for match in found}
        (before,) = old
        others = (_NUMBERED.match(name) for name in paced(names.model.modules.places))
        known = {match["prefix"] for match in others if match and match["layers"] in layers}
        # The engine's prefixes of layers with the same name; the pair left out was yielded above.
        yield from ((before, new) for new in sorted(known - {before}) if (before, new) != ("", _MODEL))


def _moved(old: str, new: str, module: str) -> str:
    """Return the name with the prefix `new` in the place of `old`.

    A name that does not begin with `old` is of a module beside the layers, as a head: it gets what stands before
    `model.` in `new`.
    """
    if module.startswith(old):
        return new + module.removeprefix(old)
    return new.removesuffix(_MODEL) + module


def _fit(landed: Sequence[LoraPair], made: Sequence[NewPair], weights: Weights, model: Model) -> bool:
    """Return whether every pair, landed or made, has a module of the model with its sizes."""
    try:
        if any(one.kind.key == IA3 for one in weights.beside):  # the pairs are made up, see `_of_factors`
            list(vectors_of((one for one, _ in _vectors(made, weights)), model.modules, model.read))
        else:
            check_landing(replace(weights, pairs=(*landed, *(new.pair for new in made))), model, about="")
    except (IncompatibleAdapter, InvalidAdapter):
        return False
    return True


def _rename(pairs: Sequence[LoraPair], names: Names) -> Iterator[Change]:
    """Yield pairs that already land, once their tensors have the names that PEFT gives: renamed, and nothing else."""
    for pair in paced(pairs):
        if names.place(pair.module, is_looked_up=pair.is_looked_up) is None or pair.a.name in names.exchanged:
            continue
        yield [pair], [_same(pair.module, pair)], _RENAMED


def _same(module: str, pair: LoraPair) -> NewPair:
    """Return the same A and B as a new pair, for `module`."""
    a, b = (([side], side.shape, Part()) for side in (pair.a, pair.b))
    return new_pair(module, a, b, pair.rank, pair.alpha, is_looked_up=pair.is_looked_up)


_RULES: tuple[Callable[[Sequence[LoraPair], Names], Iterator[Change]], ...] = (
    _rename,
    fused.split,
    fused.join,
    experts.regroup,
    experts.stack,
)
