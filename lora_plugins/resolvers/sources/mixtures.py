"""The source of mixtures: sums of adapters, such as `sql*0.7+style*0.3`, made of the versions that the parts have now.

Runs on the event loop of an API server. `locate` leases the parts, fetching them if need be, and plans the tensors;
`fetch` has a reading process write the sum, which is then verified like any fetched adapter. The version of a mixture
is its terms, with digests in the place of names: so a new version of a part is a new version of the mixture.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path

from cachetools import LRUCache

from lora_plugins.absence import Absence
from lora_plugins.adapter.canonical import canonical_bytes
from lora_plugins.adapter.chat import CHAT_FILES
from lora_plugins.adapter.config import CONFIG_FILE
from lora_plugins.adapter.fit import BaseModel, check_config, warnings_of
from lora_plugins.adapter.layouts.mixing import PartOfMixture, plan_mixture
from lora_plugins.adapter.layouts.tensors import NewTensor
from lora_plugins.adapter.layouts.writing import weights_bytes
from lora_plugins.adapter.mixture import Term, terms_of
from lora_plugins.adapter.names import AdapterName
from lora_plugins.adapter.verify import VerifiedAdapter
from lora_plugins.adapter.weight_files import WEIGHTS_FILE
from lora_plugins.errors import AdapterNotFound, IncompatibleAdapter, describing
from lora_plugins.resolvers.converted_version import write_made
from lora_plugins.resolvers.sources.source import RemoteAdapter, SourceFile, VersionChanged
from lora_plugins.settings import Settings
from lora_plugins.store.partial_download import PartialDownload
from lora_plugins.store.store import Store

LABEL = "mixture"
_OTHER_CHATS = "its parts bring different files for chats, so the base model's template and end tokens are used"
_PLANNED = 20  # plans, with a few hundred tensors each
# Leases the version that a part has now for a holder, and returns its directory; None where nobody has the part.
Lease = Callable[[str, str, Hashable], Awaitable[Path | None]]
# Reads a leased version in a place of the running request's principal.
Read = Callable[[Path], Awaitable[VerifiedAdapter]]


@dataclass(frozen=True, slots=True)
class Mixture(RemoteAdapter):
    """A mixture before it is written.

    Attributes:
        config: the bytes of the configuration.
        tensors: the tensors to write, from files whose paths begin at the first part.
        parts: the directories of the parts; files for chats are the first's.
    """

    config: bytes = field(default=b"", repr=False)
    tensors: tuple[NewTensor, ...] = field(default=(), repr=False)
    parts: tuple[Path, ...] = ()


class MixtureSource:
    """Makes mixtures of versions in the store.

    Attributes:
        base: the served model, whose largest rank a mixture must not exceed; None where unknown.
    """

    label = LABEL
    remote = False

    def __init__(
        self, settings: Settings, store: Store, lease: Lease, read: Read, base: Callable[[], BaseModel | None]
    ) -> None:
        self._settings, self._store, self._lease, self._read, self._base = settings, store, lease, read, base
        self._planned: LRUCache[tuple[str, str], Mixture] = LRUCache(_PLANNED)

    async def locate(self, name: AdapterName, base_model_name: str) -> RemoteAdapter | Absence:
        """Find the versions that the parts have now, in the store or at their sources, from where they are fetched."""
        terms, holder, parts = terms_of(str(name)) or (), object(), list[Path]()
        try:
            for term in terms:
                with describing(adapter=term.name):
                    directory = await self._lease(term.name, base_model_name, holder)
                if directory is None:
                    cause = AdapterNotFound(
                        f"no adapter '{term.name}', a part of the mixture",
                        expected="parts that are served, or that a source has",
                        remedy="correct the name of the part; see /v1/models",
                        adapter=str(name),
                    )
                    return Absence(LABEL, "", cause.found, cause=cause)
                parts.append(directory)
            version = "+".join(str(Term(part.name, term.weight)) for part, term in zip(parts, terms, strict=True))
            key = str(name), version
            if (planned := self._planned.get(key)) is None:
                planned = self._planned[key] = await self._plan(name, version, terms, parts)
            return planned
        finally:
            for part in parts:
                self._store.release(holder, part)

    async def fetch(self, adapter: RemoteAdapter, download: PartialDownload) -> None:
        """Write the files, with leases of the parts."""
        if not isinstance(adapter, Mixture):
            raise TypeError(type(adapter))
        holder = object()
        try:
            for part in adapter.parts:
                if await asyncio.to_thread(self._store.acquire, part.name, holder) is None:
                    raise VersionChanged("a part that the store has removed", remedy="ask again")
            names = [file.name for file in adapter.files]
            await write_made(download, names, adapter.config, adapter.tensors, adapter.parts[0])
        finally:
            for part in adapter.parts:
                self._store.release(holder, part)

    async def _plan(self, name: AdapterName, version: str, terms: tuple[Term, ...], parts: list[Path]) -> Mixture:
        read = [await self._read(part) for part in parts]
        mixed = [PartOfMixture(*term, part.name, one) for term, part, one in zip(terms, parts, read, strict=True)]
        config, tensors = await asyncio.to_thread(plan_mixture, mixed)  # tens of milliseconds for large models
        warnings = list[str]()
        if (base := self._base()) is not None:
            match = self._settings.base_match
            try:
                check_config(config, base, match)
            except IncompatibleAdapter as error:
                error.found += f", the sum of {', '.join(map(str, mixed))}"
                raise
            # The first part's base model is the mixture's too, of which the store's check warns.
            first, *others = (warnings_of(part.config, base, match) for part in read)
            warnings += dict.fromkeys(text for texts in others for text in texts if text not in first)
        data = canonical_bytes(config)
        files = [SourceFile(CONFIG_FILE, len(data)), SourceFile(WEIGHTS_FILE, weights_bytes(tensors))]
        if all(part.chat == read[0].chat for part in read):
            chats = ((name, parts[0] / name) for name in CHAT_FILES)
            files += (SourceFile(name, path.stat().st_size) for name, path in chats if path.is_file())
        else:
            warnings.append(_OTHER_CHATS)
        return Mixture(
            name,
            LABEL,
            f"{LABEL}://{name}",
            version,
            tuple(files),
            warnings=tuple(warnings),
            config=data,
            tensors=tensors,
            parts=tuple(parts),
        )
