"""`inspect`: the facts of adapters, and whether a server would serve them.

Runs in the command's process. In: directories; URIs, whose adapters are fetched into the store first; or names and
digests of adapters in the store. Out: files, configuration, tensors and chat parts of each adapter, and the verdict of
the verification that a server makes. Each of these parts is read by itself, so a broken part hides no other part.
*Beside* means what an adapter has besides the matrices A and B, such as DoRA's magnitudes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from glob import escape, glob
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer

from lora_plugins.absence import without_login
from lora_plugins.adapter.chat import TOOLS_FILE, Chat, few, read_chat
from lora_plugins.adapter.config import (
    CONFIG_FILE,
    IA3,
    MAX_CONFIG_BYTES,
    ORIGINAL_CONFIG_FILE,
    AdapterConfig,
    parse_config,
)
from lora_plugins.adapter.files import map_os_error, open_regular
from lora_plugins.adapter.fit import BaseModel, warnings_of
from lora_plugins.adapter.names import is_prefix
from lora_plugins.adapter.safetensors_header import TensorInfo
from lora_plugins.adapter.verify import VerifiedAdapter, choose_weights, verify_adapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE, open_weights
from lora_plugins.adapter.weights import LoraPair, Weights, pair_weights
from lora_plugins.adapter.writers import by_keys
from lora_plugins.cli import Exit, exit_of
from lora_plugins.cli.base_model import BaseModelPath, MaxRank, ServedNames, base_of_options
from lora_plugins.cli.fit_verdict import compared_with, why_not_compared, would_be_served
from lora_plugins.cli.lookup import bring
from lora_plugins.cli.name_arguments import NamesFile, is_pattern, wanted
from lora_plugins.cli.output import Output, Result, error_fields, line, listed, number, short, size
from lora_plugins.cli.store_view import StoreView
from lora_plugins.errors import AdapterNotFound, InvalidAdapter, LoRAPluginsError, describing
from lora_plugins.resolvers.sources.source import choose_files
from lora_plugins.settings import Settings
from lora_plugins.store.manifest import Manifest


@dataclass(slots=True)
class Found:
    """The readable facts of an adapter; a part that cannot be read keeps its default.

    Attributes:
        verified: the result of the verification; None where the verification has failed with `error`.
    """

    config: AdapterConfig | None = None
    tensors: tuple[TensorInfo, ...] = ()
    weights: Weights = field(default_factory=lambda: Weights(()))
    verified: VerifiedAdapter | None = None
    error: LoRAPluginsError | None = None
    warnings: tuple[str, ...] = ()
    chat: Chat = field(default_factory=Chat)


def inspect(
    output: Output,
    adapters: Annotated[
        list[str] | None,
        typer.Argument(help="Directories, URIs; of what is in the store names, or beginnings of digests."),
    ] = None,
    *,
    file: NamesFile = None,
    base_model: BaseModelPath = None,
    served_model_name: ServedNames = None,
    max_lora_rank: MaxRank = None,
) -> Result:
    """Say what adapters are, and whether they would be served.

    Examples:
        inspect ./out/checkpoint-500
        inspect hf://org/repo@main --json
        inspect team/sql
    """
    settings = Settings.from_env()
    base = base_of_options(settings, base_model, served_model_name, max_lora_rank)
    answers: list[Result] = []
    for asked in wanted(adapters, file):
        text = asked.uri or asked.name
        shown = without_login(text)
        try:
            # An error about a path names the path itself.
            with describing(adapter=shown if "://" in text else ""):
                places = _find(output, settings, text)
            for path, uri in places:
                looked = _look(path, settings, base)
                if looked.error is not None:  # several adapters of one name or pattern: say which one is meant
                    looked.error.adapter = looked.error.adapter or (shown if len(places) == 1 else uri or str(path))
                answers.append(_result(path, uri, looked, base))
        except LoRAPluginsError as error:
            if not os.path.isabs(error.file):  # an absolute path in the error says which adapter is meant
                error.adapter = error.adapter or shown
            answers.append(_nothing(shown, error))
    return listed(answers, blank_between=True)


def _find(output: Output, settings: Settings, text: str) -> list[tuple[Path, str | None]]:
    """Return the directories that a path, a pattern of paths, a URI, or a name or digest of the store stands for.

    Each directory comes with the URI that its adapter was fetched from; None for a directory outside the store.

    Raises:
        AdapterNotFound: there is no such directory.
        LoRAPluginsError: the adapter of a URI cannot be had.
    """
    if "://" in text:
        stored = bring(output, settings, text)
        return [(stored.adapter.path, stored.manifest.uri)]
    path = Path(text)
    # A path of this machine goes before a name in the store.
    if not path.exists():
        if is_pattern(text) and (found := sorted(filter(os.path.isdir, glob(text)))):
            return [(Path(one).absolute(), None) for one in found]
        view = StoreView(settings)
        if is_prefix(text):
            return [_stored(view, view.select(text)[0].digest)]
        with suppress(AdapterNotFound):  # no such name either: the error below says what was looked for
            return [_stored(view, entry.digest) for entry in view.select(text)]
    path = path.absolute()
    with describing(file=str(path)):
        if not path.is_dir():
            remedy = "give the adapter's directory, a URI with '://', or a name or digest that 'lora-plugins ls' shows"
            is_there = path.exists()
            raise AdapterNotFound(
                "no directory, but a file" if is_there else "no such directory",
                expected=f"a directory with {CONFIG_FILE} and {WEIGHTS_FILE}",
                remedy=f"lora-plugins inspect {quote(str(path.parent))}" if is_there else remedy,
            )
        try:
            os.listdir(path)
            os.stat(path / os.curdir)
        except OSError as error:  # this user may not list or enter the directory
            raise map_os_error(error) from None
    return [(path, None)]


def _stored(view: StoreView, digest: str) -> tuple[Path, str]:
    path = view.layout.adapter(digest)
    return path, Manifest.read(path).uri


def _look(path: Path, settings: Settings, base: BaseModel | None) -> Found:
    """Verify the adapter, and read every readable part, whatever else is wrong.

    `base` is None where no base model was given: nothing is compared then.
    """
    found = Found()
    # Each part by itself: a broken configuration must not hide the tensors, nor the reverse.
    with suppress(LoRAPluginsError), open_regular(_of_source(path, CONFIG_FILE)) as (file, _):
        found.config = parse_config(file.read(MAX_CONFIG_BYTES + 1))
    with suppress(LoRAPluginsError):
        # Never open a pickle here, even where the settings let a server serve pickles.
        weights = choose_weights(_files(path), replace(settings, allow_pickle=False))
        with open_weights(path, weights) as opened:
            found.tensors = tuple(tensor for _, _, some in opened for tensor in some)
    with suppress(LoRAPluginsError):
        if found.config is not None and found.tensors:
            found.weights = pair_weights(found.tensors, found.config)
    with suppress(LoRAPluginsError):
        if settings.adapter_chat.reads_files:
            found.chat = read_chat(path)
    if found.config is not None and base is not None:
        found.warnings = warnings_of(found.config, base, settings.base_match)
    try:
        found.verified = verify_adapter(path, base, settings)
        found.warnings = found.verified.warnings
    except LoRAPluginsError as error:
        # For a folder of adapters, a path to each adapter helps more than what the folder itself lacks.
        found.error = _of_folder(path) or error
    return found


def _of_folder(path: Path) -> AdapterNotFound | None:
    """Return an error where a directory is no adapter and holds adapters, at most two folders deep; else None."""
    if _files(path):
        return None
    for below in (path / "*", path / "*" / "*"):
        found = glob(str(Path(escape(str(path))) / below.relative_to(path) / CONFIG_FILE))
        if found:
            return AdapterNotFound(
                f"no adapter, but a folder of {number(len(found), 'adapter')}",
                expected="an adapter's own directory",
                remedy=f"lora-plugins inspect {quote(str(below))}",
                file=str(path),
            )
    return None


def _of_source(path: Path, name: str) -> Path:
    """Return the path of an adapter's file as the source has it: the store keeps a configuration that it replaces."""
    kept = path / ORIGINAL_CONFIG_FILE
    return kept if name == CONFIG_FILE and os.path.lexists(kept) else path / name


def _files(path: Path) -> list[str]:
    """Return the names of an adapter's files in a directory; none where the directory cannot be read."""
    with suppress(OSError):
        return choose_files([TOOLS_FILE, *os.listdir(path)])
    return []


def _nothing(name: str, error: LoRAPluginsError) -> Result:
    """Return the result for an adapter that cannot be looked at, because of `error`."""
    verdict = {Exit.NOT_FOUND: "no adapter", Exit.UNAVAILABLE: "unavailable"}.get(exit_of(error), "refused")
    end = line(f"verdict      {verdict}", "bold red")
    fields = {"name": name, "verdict": verdict, "error": error_fields(error)}
    return Result(fields, [line(f"adapter      {name}"), end, error])


def _result(path: Path, uri: str | None, found: Found, base: BaseModel | None) -> Result:
    fields, code, style = _fields(path, uri, found, base), Exit.OK, "bold green"
    lines = [line(text) for text in _lines(fields, found, base)]
    if found.error is not None:
        fields |= {"verdict": "refused", "error": error_fields(found.error)}
        return Result(fields, [*lines, line("verdict      would be refused", "bold red"), found.error])
    said = would_be_served(base, 0 if found.config is None else found.config.max_rank)
    if reason := why_not_compared(base, _files(path)):  # empty where the adapter was compared with the base model
        fields["verdict"], code, style = "not compared", Exit.NOT_COMPARED, "bold yellow"
        said = f"whole, and not compared: {reason}"
    return Result(fields, [*lines, line(f"verdict      {said}", style)], code)


def _fields(path: Path, uri: str | None, found: Found, base: BaseModel | None) -> dict[str, Any]:
    files = {name: _of_source(path, name).stat().st_size for name in _files(path) if (path / name).is_file()}
    conversion, converted, chat = found.verified.conversion if found.verified else None, None, found.chat
    with suppress(InvalidAdapter):
        # What the store has changed, and the original's digest. Only directories of the store have a manifest.
        converted = Manifest.read(path).converted
    # None where no engine has listed the base model's modules in this store.
    modules = None if base is None or base.model is None else len(base.model.modules.places)
    return {
        "path": str(path),
        "uri": uri,
        "files": [{"name": name, "size_bytes": size_bytes} for name, size_bytes in files.items()],
        "size_bytes": sum(files.values()),
        "config": None if found.config is None else _config(found.config),
        "dtypes": dict(Counter(tensor.dtype for tensor in found.tensors)),
        "modules": [_module(pair) for pair in found.weights.pairs],
        "beside": [
            {"module": one.module, "tensor": one.kind.end, "shape": list(one.tensor.shape), "dtype": one.tensor.dtype}
            for one in found.weights.beside
        ],
        "chat": {
            "template": bool(chat.templates),
            "eos_token": chat.special_tokens.get("eos_token"),
            "end_ids": list(chat.end_ids),
            "added_tokens": {token.text: token.id for token in chat.added_tokens},
        },
        "base": None if base is None else {"path": base.path, "modules": modules, "max_rank": base.max_rank},
        "verdict": "served",  # `_result` replaces the verdict where the adapter is refused or was not compared
        "notes": list(found.verified.notes) if found.verified else [],
        "warnings": [*found.warnings, *([chat.warning] if chat.warning else [])],
        "to_convert": list(conversion.changes) if conversion else [],
        "converted": None if converted is None else asdict(converted),
    }


def _module(pair: LoraPair) -> dict[str, Any]:
    shapes = {"rank": pair.a.shape[0], "in": pair.a.shape[-1], "out": pair.b.shape[0]}
    return {"module": pair.module, **shapes, "dtype": pair.a.dtype}


def _config(config: AdapterConfig) -> dict[str, Any]:
    targets = sorted(config.targets) if isinstance(config.targets, frozenset) else config.targets
    patterns = {"rank_pattern": dict(config.rank_pattern), "alpha_pattern": dict(config.alpha_pattern)}
    same = {name: getattr(config, name) for name in ("base_model", "rank", "max_rank", "alpha")}
    return {**same, "rslora": config.use_rslora, **patterns, "target_modules": targets}


def _lines(fields: dict[str, Any], found: Found, base: BaseModel | None) -> Iterator[str]:
    yield f"adapter      {fields['uri'] or fields['path']}"
    files = ", ".join(f"{file['name']} {size(file['size_bytes'])}" for file in fields["files"])
    yield f"files        {files or 'none'}"
    if (config := found.config) is not None:
        yield f"base model   {config.base_model or 'not named'}"
        patterns = f", up to {config.max_rank} by rank_pattern" if config.max_rank != config.rank else ""
        more = ", ".join(["", *(["rsLoRA"] if config.use_rslora else []), *sorted(config.beside)])
        ranks = f"{config.rank}{patterns}, alpha {config.alpha:g}{more}"
        yield f"rank         {'none, by ' + IA3 if IA3 in config.beside else ranks}"
    if (form := by_keys(tensor.name for tensor in found.tensors)) is not None:
        yield f"recognised   {form.name}"
    if fields["dtypes"]:
        yield "tensors      " + ", ".join(f"{count} {dtype}" for dtype, count in sorted(fields["dtypes"].items()))
    if pairs := found.weights.pairs:
        kinds = Counter(pair.module.rpartition(".")[2] for pair in pairs)
        yield f"modules      {len(pairs)}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if beside := found.weights.beside:
        kinds = Counter(f"{one.module.rpartition('.')[2]}.{one.kind.end}" for one in beside)
        yield "beside       " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    chat, added = fields["chat"], found.chat.added_tokens
    brings = [
        "a template" if chat["template"] else "",
        f"eos token {chat['eos_token']}" if chat["eos_token"] else "",
        f"end ids {' '.join(map(str, chat['end_ids']))}" if chat["end_ids"] else "",
        f"{number(len(added), 'added token')} with the base model's: {few(added)}" if added else "",
    ]
    yield f"chat         {', '.join(filter(None, brings)) or 'nothing of its own'}"
    to = "no base model (--base-model)" if base is None else f"{base.path}: {compared_with(base)}"
    yield f"compared with {to}"
    if (done := fields["converted"]) is not None:
        yield f"converted    from {short(done['original_digest'])}: {', '.join(done['changes'])}"
    if fields["to_convert"]:
        yield f"to convert   {', '.join(fields['to_convert'])}; the store does so when it is served"
    yield from (f"{head:12} {text}" for head in ("warning", "note") for text in fields[f"{head}s"])
