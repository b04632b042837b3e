"""Directories and files that the settings name: the store, the policy."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from lora_plugins.api.access.policy import Policy
from lora_plugins.cli.amounts import number, size
from lora_plugins.cli.doctor.findings import Finding, State, problem_of
from lora_plugins.errors import InvalidSettings
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.server.declared_file import parse, read_bytes
from lora_plugins.settings import Settings
from lora_plugins.store.eviction import entries
from lora_plugins.store.file_system import try_file_system
from lora_plugins.store.layout import Layout
from lora_plugins.store.owners import check_owners

_LOW_BYTES = 1 << 30
_MOVE = "set LORA_PLUGINS_STORE_DIR to a directory that the server's user can write"


def check_store(settings: Settings) -> Iterator[Finding]:
    """Whether the store can be written, links and locks files as servers do, and has room."""
    layout = Layout(settings.store_dir)
    place = _existing(layout.root)
    if not place.is_dir():
        yield Finding("store", State.PROBLEM, f"{place} is in the way of the store: it is no directory", _MOVE)
        return
    scratch = layout.folder("tmp")
    is_made = scratch.is_dir()
    probe = (scratch if is_made else place) / f".lora-plugins-doctor-{os.getpid()}"
    try:
        check_owners(layout.root)
        try_file_system(probe, probe.with_name(f"{probe.name}.link"), folder=scratch if is_made else None)
    except InvalidSettings as error:
        yield problem_of("store", error)
        return
    except OSError as error:
        yield Finding("store", State.PROBLEM, f"{place} cannot be written: {error.strerror}", _MOVE)
        return
    used_bytes, count = _used(layout)
    free_bytes = shutil.disk_usage(place).free
    budget = settings.store_max_bytes
    there = number(count, "adapter") if layout.root.is_dir() else "will be made"
    limit = "budget a share of the disk" if budget is None else f"budget {size(budget)}"
    summary = f"{layout.root}: {there}, {size(used_bytes)} used, {limit}, {size(free_bytes)} free on its disk"
    if budget is not None and budget - used_bytes > free_bytes:
        yield Finding(
            "store",
            State.WARNING,
            f"{summary}: the disk is full before the budget is",
            "lower LORA_PLUGINS_STORE_MAX_BYTES, or free space",
        )
    elif budget is None and free_bytes < _LOW_BYTES:
        yield Finding(
            "store",
            State.WARNING,
            f"{summary}: little room, of which a part is kept free",
            "free space, or set LORA_PLUGINS_STORE_DIR",
        )
    else:
        yield Finding("store", State.OK, summary)


def check_adapters_file(settings: Settings) -> Iterator[Finding]:
    """Whether the file of declared adapters can be read, where there is one."""
    path = settings.adapters_file
    if path is None:
        return
    try:
        found = parse(read_bytes(path), path, AllowedUris.parse(settings.allowed_uris))
    except InvalidSettings as error:
        yield problem_of("adapters", error)
    else:
        yield Finding("adapters", State.OK, f"{path}: {number(len(found), 'adapter')} declared")


def check_policy(settings: Settings) -> Finding:
    """Whether the policy can be read."""
    path = settings.policy
    if path is None:
        return Finding("policy", State.OFF, "LORA_PLUGINS_POLICY is unset: every key may use every adapter")
    try:
        policy = Policy.read(path)
        everybody_may_read = bool(path.stat().st_mode & stat.S_IROTH)
    except InvalidSettings as error:
        return problem_of("policy", error)
    summary = f"{path}: {number(policy.key_count, 'key')} of {number(len(policy.labels), 'tenant')}"
    if everybody_may_read:
        return Finding(
            "policy", State.WARNING, f"{summary}, and everybody on this host may read it", f"chmod o-r {path}"
        )
    return Finding("policy", State.ON, summary)


def _existing(path: Path) -> Path:
    """The directory itself, or the nearest one above it that is there."""
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def _used(layout: Layout) -> tuple[int, int]:
    if not layout.root.is_dir():
        return 0, 0
    try:
        known = entries(layout)
    except OSError:
        return 0, 0
    return sum(entry.size_bytes for entry in known), len(known)
