"""vLLM's API server lets only administrators change what is served, and keeps to the access policy.

With a policy, its entry points where a request names an adapter answer 404 for one that the key may not use. That is
decided by the name alone, before anything is looked up, so neither text nor time says what exists.

Wrapped are the loading and unloading of `OpenAIServingModels`, and with a policy also its listing,
`BaseServing._check_model` and `_maybe_get_adapters`, and `PoolingBaseServing._check_model` (0.30 to 0.33).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from lora_plugins.api.access.administrators import ADMIN_KEY, Administrators
from lora_plugins.api.access.policy import Policy, Principal
from lora_plugins.api.access.principals import KnowPrincipal, principal_of_request, require_admin
from lora_plugins.errors import InvalidSettings
from lora_plugins.ledger import Patch
from lora_plugins.log import logger
from lora_plugins.process import Process, this_process
from lora_plugins.server import declared_file
from lora_plugins.server.response_digest import note_version
from lora_plugins.settings import Settings
from lora_plugins.vllm_patches.api_server.sagemaker import keep_model_of_body


def install(app: Any, process: Process) -> None:
    """Have the API server `app` let in only those who may, by the settings and its options; again, nothing happens.

    To be called before the server adds its own middleware (an endpoint plugin's `attach_router` is).

    Raises:
        InvalidSettings: the policy cannot be right.
    """
    if getattr(app.state, "lora_plugins_administrators", None) is not None:
        return
    settings, keys, args = process.settings, _keys_of_vllm(app), getattr(app.state, "args", None)
    policy = None if settings.policy is None else Policy.read(settings.policy)
    administrators = app.state.lora_plugins_administrators = Administrators(
        policy, settings.admin_key, keys_of_vllm=tuple(keys), is_unix_socket=bool(getattr(args, "uds", None))
    )
    app.add_middleware(KnowPrincipal, administrators=administrators)
    keep_model_of_body()
    if not process.lets_in_administrators_only:
        _patch_changes()
    if policy is not None and process.policy is None:
        _patch_names()
    process.lets_in_administrators_only = True
    process.policy = policy
    _log_who_administers(administrators)
    if policy is not None:
        _log_who_is_let_in(policy, keys)
    if args is not None and keys and settings.admin_key is not None and settings.admin_key not in keys:
        args.api_key = [*keys, settings.admin_key]  # vLLM reads it after us, and asks for one of these below /v1


def require_in_force(process: Process) -> None:
    """Refuse to start a server that has a policy, a key or a declared set in its settings and does not keep to it.

    vLLM goes on without an endpoint plugin that is not named, or that it cannot load.

    Raises:
        InvalidSettings: `install` has not been called in this process.
    """
    if process.lets_in_administrators_only:
        return
    for name in configured(process.settings):
        raise InvalidSettings(
            f"{name} in a process that does not keep to it",
            expected="an API server with lora_admin",
            remedy="name lora_admin in VLLM_PLUGINS, see the log for why it does not load, or unset the variable",
        )


def configured(settings: Settings) -> list[str]:
    """The variables that are set of those that only an API server with `lora_admin` keeps to."""
    values = {
        "LORA_PLUGINS_POLICY": settings.policy,
        ADMIN_KEY: settings.admin_key,
        declared_file.VARIABLE: settings.adapters_file,
    }
    return [name for name, value in values.items() if value is not None]


def _patch_changes() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels

    for name in ("load_lora_adapter", "unload_lora_adapter"):
        setattr(OpenAIServingModels, name, _for_admins(getattr(OpenAIServingModels, name)))


def _patch_names() -> None:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
    from vllm.entrypoints.serve.engine.serving import BaseServing

    for serving in (BaseServing, PoolingBaseServing):
        serving._check_model = _checking(serving._check_model)  # noqa: SLF001 - in the ledger
    BaseServing._maybe_get_adapters = _getting(BaseServing._maybe_get_adapters)  # noqa: SLF001
    OpenAIServingModels.show_available_models = _listing(OpenAIServingModels.show_available_models)


def _principal() -> Principal:
    """Whose request this is; what runs for no request that we have seen may use what the default may."""
    policy = this_process().policy
    return principal_of_request.get() or (Principal("(none)") if policy is None else policy.default)


def _as_if_absent(serving: Any, request: Any) -> Any:
    """`serving`, or, where the request may not use the adapter that it names, the same without any adapter or resolver.

    vLLM's own code then says that there is no such model, in its own words.
    """
    name = request.model
    if not name or serving.models.is_base_model(name) or _principal().may_use(name):
        return serving
    logger.debug("%s may not use adapter %r", _principal().label, name)
    bare = copy.copy(serving)
    bare.models = copy.copy(serving.models)
    bare.models.lora_requests = {}
    bare.models.resolve_lora = _resolve_nothing
    return bare


async def _resolve_nothing(_: str) -> None:
    return None


def _checking(original: Any) -> Any:
    @functools.wraps(original)
    async def _check_model(self: Any, request: Any) -> Any:
        return await original(_as_if_absent(self, request), request)

    return _check_model


def _getting(original: Any) -> Any:
    @functools.wraps(original)
    def _maybe_get_adapters(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(_as_if_absent(self, request), request, *args, **kwargs)
        # An adapter with the name of a content part's type (`image`) comes without being named.
        if found is None or _principal().may_use(found.lora_name):
            return found
        note_version(None)  # the base model answers
        return None

    return _maybe_get_adapters


def _listing(original: Any) -> Any:
    @functools.wraps(original)
    async def show_available_models(self: Any) -> Any:
        listed = await original(self)
        principal = _principal()
        listed.data = [card for card in listed.data if self.is_base_model(card.id) or principal.may_use(card.id)]
        return listed

    return show_available_models


def _for_admins(method: Any) -> Any:
    """By whatever route they are reached (SageMaker has others); at start, vLLM loads its static modules with them."""

    @functools.wraps(method)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        await require_admin()
        return await method(*args, **kwargs)

    return guarded


def _log_who_administers(administrators: Administrators) -> None:
    if not administrators.is_by_address:
        logger.info("The admin API answers %s", administrators.in_words())
        return
    logger.warning(
        "The admin API answers %s only, as there is no policy, no --api-key and no %s. A proxy on this machine that "
        "sets no X-Forwarded-For lets everybody in. To fix: set %s",
        administrators.in_words(),
        ADMIN_KEY,
        ADMIN_KEY,
    )


def _log_who_is_let_in(policy: Policy, keys: list[str]) -> None:
    logger.info("Access policy: %d keys of %s", policy.key_count, ", ".join(policy.labels) or "no tenant")
    if not keys:
        logger.warning(
            "An access policy without --api-key: vLLM asks for no key, so everybody may use the base model, and the "
            "adapters of [default]. To fix: give vLLM the keys of the policy"
        )
        return
    known = {policy.of_key(key).label for key in keys}
    locked_out = [label for label in policy.labels if label not in known]
    if locked_out:
        logger.warning(
            "No key of %s is in --api-key, so vLLM lets none of them in. To fix: list their keys there too",
            ", ".join(locked_out),
        )


def _keys_of_vllm(app: Any) -> list[str]:
    from vllm import envs

    given = getattr(getattr(app.state, "args", None), "api_key", None)
    return [key for key in (given or [envs.VLLM_API_KEY]) if key]


LEDGER = (
    Patch(
        """
        vllm.entrypoints.serve.engine.serving:
            BaseServing._check_model(self, request)
            BaseServing._maybe_get_adapters(self, request, supports_default_mm_loras)
            BaseServing{models}
        vllm.entrypoints.pooling.base.serving:
            PoolingBaseServing._check_model(self, request)
        vllm.entrypoints.openai.models.serving:
            OpenAIServingModels.is_base_model(self, model_name)
            OpenAIServingModels.show_available_models(self)
            OpenAIServingModels.load_lora_adapter(self, request, base_model_name)
            OpenAIServingModels.unload_lora_adapter(self, request)
        vllm.envs:
            VLLM_API_KEY
        """,
        what="wrapped where there is an access policy, loading and unloading always, but for is_base_model (called) "
        "and the keys (read, to see whether vLLM asks for one, and to warn of keys of the policy that it does not "
        "accept; ours is added to args.api_key where vLLM asks for one)",
        why="an adapter that the key may not use must look like one that does not exist; only administrators change "
        "what is served. Default multimodal adapters, and pooling's unknown names, come from _maybe_get_adapters",
        remove="vLLM asks a plugin which adapters a request may use",
    ),
)
