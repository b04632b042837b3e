"""Mistakes that reviews find, each put into one file of the product, and the tests that must fail with it."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which `file` has exactly once, becomes `new`; pytest runs `targets` in their order up to a failure."""

    name: str
    file: str
    old: str
    new: str
    targets: tuple[str, ...]


MUTANTS = (
    Mutant(
        "kernels: vLLM groups rows in each step of a GPU, and waits for the device",
        "lora_plugins/kernels/punica_triton.py",
        "self._some_by_vllm = False",
        "self._some_by_vllm = True",
        ("tests/kernels/test_punica_triton.py",),
    ),
    Mutant(
        "planner: the adapter that runs the most leaves",
        "lora_plugins/scheduler/slots.py",
        "state.leave(min(taking, key=lambda it: len(it.running)), now)",
        "state.leave(max(taking, key=lambda it: len(it.running)), now)",
        ("tests/scheduler/test_planner.py",),
    ),
    Mutant(
        "planner: a full host cache takes one more",
        "lora_plugins/scheduler/host_cache.py",
        "while places_over > 0 or bytes_over > 0:",
        "while places_over > 1 or bytes_over > 0:",
        ("tests/scheduler/test_host_cache.py",),
    ),
    Mutant(
        "policy: a use does not move an adapter back",
        "lora_plugins/scheduler/policies.py",
        "        if key in self._order:\n            self._order.move_to_end(key)",
        "        if key in self._order:\n            self._order.move_to_end(key, last=False)",
        ("tests/scheduler/test_policies.py",),
    ),
    Mutant(
        "store: an adapter's files are not synced",
        "lora_plugins/store/layout.py",
        "            os.fchmod(descriptor, 0o444)\n        os.fsync(descriptor)",
        "            os.fchmod(descriptor, 0o444)",
        ("tests/store/test_power_cut.py",),
    ),
    Mutant(
        "store: the last holder keeps its lease",
        "lora_plugins/store/leases.py",
        "            self._ended.add(digest)\n        self._remove_ended()",
        "            self._ended.add(digest)",
        ("tests/store/test_leases.py",),
    ),
    Mutant(
        "store: a promised digest is not compared",
        "lora_plugins/store/store.py",
        "if file.size_bytes != size_bytes or (sha256 and file.sha256 != sha256):",
        "if file.size_bytes != size_bytes:",
        ("tests/store/test_store.py",),
    ),
    Mutant(
        "store: what was used last goes first",
        "lora_plugins/store/inventory.py",
        "            self._order = [(used_at, digest) for",
        "            self._order = [(-used_at, digest) for",
        ("tests/store/test_inventory.py",),
    ),
    Mutant(
        "store: a leased adapter is removed",
        "lora_plugins/store/eviction.py",
        "        if leases.holders(digest):\n            return False",
        "        if not leases.holders(digest):\n            return False",
        ("tests/store/test_eviction.py",),
    ),
    Mutant(
        "verification: files are opened without a limit",
        "lora_plugins/verification/child.py",
        "    _limit(resource.RLIMIT_NOFILE, MAX_FILES)\n",
        "",
        ("tests/verification/test_limits.py",),
    ),
    Mutant(
        "verification: what takes too much memory is read again",
        "lora_plugins/verification/child.py",
        "        yield Refused(too_much_memory().plain())\n",
        "        raise\n",
        ("tests/verification/test_limits.py",),
    ),
    Mutant(
        "api: a passing fault is the client's mistake",
        "lora_plugins/api/http_errors.py",
        "return HTTPException(error.http_status, text, headers)",
        "return HTTPException(400, text, headers)",
        ("tests/api/test_http_errors.py",),
    ),
    Mutant(
        "api: a pattern's last star needs a character",
        "lora_plugins/api/access/policy.py",
        'return not pattern[of:].strip("*")',
        "return not pattern[of:]",
        ("tests/api/access/test_name_patterns.py",),
    ),
    Mutant(
        "kernels: an adapter's rank is one less",
        "lora_plugins/kernels/ranks.py",
        "        return tuple(min(int(lora_a.shape[0]), most) for most in largest)",
        "        return tuple(min(int(lora_a.shape[0]) - 1, most) for most in largest)",
        ("tests/kernels/test_ranks.py",),
    ),
    Mutant(
        "kernels: PyTorch's part leaves the scale out",
        "lora_plugins/kernels/cpu.py",
        "into.addmm_(shrunk, b_t, alpha=scale)",
        "into.addmm_(shrunk, b_t)",
        ("tests/kernels/test_cpu.py",),
    ),
    Mutant(
        "kernels: the compiled part leaves the scale out",
        "lora_plugins/kernels/compiled/lora.c",
        "if (w->scale != 1)",
        "if (w->scale == 1)",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutant(
        "adapter: rsLoRA scales like any other",
        "lora_plugins/adapter/config.py",
        "return alpha / (math.sqrt(rank) if self.use_rslora else rank)",
        "return alpha / rank",
        ("tests/adapter/test_config.py",),
    ),
    Mutant(
        "adapter: infinity counts as a number",
        "lora_plugins/adapter/finite.py",
        "if of_tensor >= infinity:",
        "if of_tensor > infinity:",
        ("tests/adapter/test_finite.py",),
    ),
    Mutant(
        "adapter: a name leaves its root",
        "lora_plugins/adapter/names.py",
        'if segment[0] in ".-":',
        'if segment[0] in "-":',
        ("tests/adapter/test_names.py",),
    ),
    Mutant(
        "adapter: the server's largest rank is refused",
        "lora_plugins/adapter/fit.py",
        "config.max_rank > base.max_rank",
        "config.max_rank >= base.max_rank",
        ("tests/adapter/test_fit.py",),
    ),
    Mutant(
        "adapter: weights may have holes",
        "lora_plugins/adapter/safetensors_header.py",
        "if tensor.begin != expected:",
        "if tensor.begin < expected:",
        ("tests/adapter/test_safetensors_header.py",),
    ),
    Mutant(
        "resolvers: a flight that has ended goes on",
        "lora_plugins/resolvers/single_flight.py",
        "        del self._flights[key]\n        self._check(flight)",
        "        self._check(flight)",
        ("tests/resolvers/test_single_flight.py",),
    ),
    Mutant(
        "resolvers: a source that is down has nothing",
        "lora_plugins/resolvers/search.py",
        "        looked.error = unavailable\n",
        "",
        ("tests/resolvers/test_resolver.py",),
    ),
    Mutant(
        "resolvers: a lost mount has no adapter",
        "lora_plugins/resolvers/sources/filesystem.py",
        "            if error.errno in ABSENT:\n                self._check_root()\n",
        "            if error.errno in ABSENT:\n",
        ("tests/resolvers/sources/test_filesystem.py",),
    ),
    Mutant(
        "resolvers: one less may wait for a source",
        "lora_plugins/resolvers/places.py",
        "if self._waiting > self._limits.waiting:",
        "if self._waiting >= self._limits.waiting:",
        ("tests/resolvers/test_places.py", "tests/resolvers/test_look_ups.py"),
    ),
    Mutant(
        "engine core: keys of prefixes stay another version's",
        "lora_plugins/vllm_patches/engine_core/request.py",
        "    if before.lora_path != path:\n        request.block_hashes.clear()\n",
        "    if before.lora_path != path:\n",
        ("tests/vllm_patches/engine_core/test_request.py",),
    ),
    Mutant(
        "engine core: a session that waits keeps its KV cache",
        "lora_plugins/vllm_patches/engine_core/scheduler.py",
        "        if self._waiting_with_kv:\n            self._preempt_waiting()\n",
        "",
        ("tests/vllm_patches/engine_core/test_held_requests.py",),
    ),
    Mutant(
        "server: a load that fails keeps its lease",
        "lora_plugins/server/lifecycle.py",
        "            self.server.release(name, version)\n            raise\n        adapter = ServedAdapter",
        "            raise\n        adapter = ServedAdapter",
        ("tests/server/test_lifecycle.py",),
    ),
    Mutant(
        "server: the version before stays loaded",
        "lora_plugins/server/swapping.py",
        "    if not moves:\n        server.retire(old_id)\n",
        "",
        ("tests/server/test_swapping.py",),
    ),
    Mutant(
        "server: a load takes no lock of its name",
        "lora_plugins/server/lifecycle.py",
        "lock(name):\n            adapter = self.registry.get(name)\n"
        "            _require_version(name, adapter, expects)\n"
        "            if adapter is None:\n                adapter = await self._load(name, uri, ",
        "lock(object()):\n            adapter = self.registry.get(name)\n"
        "            _require_version(name, adapter, expects)\n"
        "            if adapter is None:\n                adapter = await self._load(name, uri, ",
        ("tests/server/test_lifecycle.py",),
    ),
    Mutant(
        "server: a share takes one adapter more",
        "lora_plugins/server/shares.py",
        "return Most(max(1, int(part * self._all)),",
        "return Most(1 + max(1, int(part * self._all)),",
        ("tests/server/test_shares.py",),
    ),
    Mutant(
        "api: a link leads into another folder",
        "lora_plugins/api/access/policy.py",
        " and _folder_of(name) == _folder_of(place))",
        ")",
        ("tests/api/access/test_policy.py",),
    ),
    Mutant(
        "worker: a slot keeps rows of a larger adapter",
        "lora_plugins/worker/slot_copy.py",
        "        if before != ranks:\n",
        "        if before is None:\n",
        ("tests/worker/test_slot_copy.py",),
    ),
    Mutant(
        "worker: a copy leaves the scale out",
        "lora_plugins/worker/host_memory.py",
        "return torch.mul(tensor, scaling, out=place)",
        "return place.copy_(tensor)",
        ("tests/worker/test_manager.py",),
    ),
    Mutant(
        "worker: bytes of another digest are loaded",
        "lora_plugins/worker/materialise.py",
        "if resolved.path.name != digest:",
        "if not resolved.path.name:",
        ("tests/worker/test_materialise.py",),
    ),
    Mutant(
        "engine core: an aborted request keeps its slot",
        "lora_plugins/vllm_patches/engine_core/scheduler.py",
        "        self.planner.ended([request.request_id for request in finished], time.monotonic())\n",
        "",
        ("tests/vllm_patches/engine_core/test_scheduler.py",),
    ),
    Mutant(
        "api server: what policy withholds is served",
        "lora_plugins/vllm_patches/api_server/base_serving.py",
        "return adapter if adapter is None or may_use(adapter.lora_name) else None",
        "return adapter",
        ("tests/vllm_patches/api_server/test_access.py",),
    ),
    Mutant(
        "cli: gc without room succeeds",
        "lora_plugins/cli/store.py",
        "return Result(fields, [*shown, end, why], Exit.NO_ROOM)",
        "return Result(fields, [*shown, end, why])",
        ("tests/cli/test_store.py",),
    ),
    Mutant(
        "cli: a source that is down is no such adapter",
        "lora_plugins/cli/exits.py",
        '"L006": Exit.UNAVAILABLE',
        '"L006": Exit.NOT_FOUND',
        ("tests/cli/test_lookup.py",),
    ),
    Mutant(
        "routing: what has ended counts in all",
        "lora_plugins/routing/load.py",
        "            self._ours[replica] -= 1\n            self.total -= 1",
        "            self._ours[replica] -= 1",
        ("tests/routing/test_load.py",),
    ),
    Mutant(
        "routing: a replica that has left keeps its points",
        "lora_plugins/routing/rendezvous.py",
        "strict=True) if owner != replica]",
        "strict=True) if owner]",
        ("tests/routing/test_rendezvous.py",),
    ),
    Mutant(
        "ray: an error of a healthy server is a server that is gone",
        "lora_plugins/ray/replica.py",
        "answer.status_code >= 500 and not await",
        "answer.status_code >= 500 and await",
        ("tests/ray/test_ingress.py",),
    ),
    Mutant(
        "ray: a replica starts without its secrets",
        "lora_plugins/ray/replica.py",
        "missing = [name for name in names if name not in here]",
        'missing = [name for name in names if here.get(name) == ""]',
        ("tests/ray/test_replica.py",),
    ),
    Mutant(
        "observability: one label too many",
        "lora_plugins/observability/adapter_labels.py",
        "if len(self._labels) >= self._max_adapters:",
        "if len(self._labels) > self._max_adapters:",
        ("tests/observability/test_adapter_labels.py",),
    ),
    Mutant(
        "observability: a name forges a line of the log",
        "lora_plugins/observability/logs.py",
        '    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)\n',
        "    shown = cut\n",
        ("tests/observability/test_unknown_names.py",),
    ),
    Mutant(
        "settings: 1Ki is 1000 bytes",
        "lora_plugins/variables.py",
        '("i", 1024)',
        '("i", 1000)',
        ("tests/test_settings.py",),
    ),
    Mutant(
        "settings: an error shows a key",
        "lora_plugins/variables.py",
        ' if self.kind.is_secret else f"{self.name}={text!r}",',
        ' if not text else f"{self.name}={text!r}",',
        ("tests/test_settings.py",),
    ),
)
