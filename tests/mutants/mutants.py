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
        "planner: the adapter that runs the most leaves",
        "lora_plugins/scheduler/admission.py",
        "leaver = min(taking, key=lambda it: len(it.running))",
        "leaver = max(taking, key=lambda it: len(it.running))",
        ("tests/scheduler/test_planner.py",),
    ),
    Mutant(
        "planner: a full host cache takes one more",
        "lora_plugins/scheduler/host_cache.py",
        "- len(fewer) > self.max_adapters:",
        "- len(fewer) > self.max_adapters + 1:",
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
        "                self._ended.add(digest)\n                self._remove_ended()",
        "                self._ended.add(digest)",
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
        "lora_plugins/store/eviction.py",
        "    return sorted(found, key=_by_use)\n\n\ndef share_of_disk",
        "    return sorted(found, key=_by_use, reverse=True)\n\n\ndef share_of_disk",
        ("tests/store/test_eviction.py",),
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
        "api: a passing fault is the client's mistake",
        "lora_plugins/api/http_errors.py",
        "return HTTPException(error.http_status, text, headers)",
        "return HTTPException(400, text, headers)",
        ("tests/api/test_http_errors.py",),
    ),
    Mutant(
        "api: a pattern's last star needs a character",
        "lora_plugins/api/access/name_patterns.py",
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
)
