"""Every door of vLLM's API server through which a request names an adapter, with the access policy before it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from lora_plugins.api.access.decoys import Decoys
from lora_plugins.api.access.policy import Policy, Principal
from lora_plugins.api.access.principals import FORBIDDEN, KnowPrincipal, principal_of_request
from lora_plugins.errors import InvalidSettings
from lora_plugins.ledger import Patch
from lora_plugins.log import logger
from lora_plugins.settings import Settings

_guard: _Guard | None = None


def install(app: Any, settings: Settings) -> None:
    """Have the API server `app` keep to the policy that the settings name; without one, or again, nothing happens.

    To be called before the server adds its own middleware (an endpoint plugin's `attach_router` is).

    Raises:
        InvalidSettings: the policy cannot be right.
    """
    global _guard
    if settings.policy is None or getattr(app.state, "lora_plugins_policy", None) is not None:
        return
    policy = Policy.read(settings.policy)
    app.state.lora_plugins_policy = policy
    app.add_middleware(KnowPrincipal, policy=policy)
    if _guard is None:
        _guard = _Guard()
        _guard.stand()
    _guard.policy = policy
    _say_who_is_let_in(policy, app)


def require_in_force() -> None:
    """End the start of a server that was told of a policy and does not keep to it.

    vLLM goes on without an endpoint plugin that is not named, or that it cannot load.

    Raises:
        InvalidSettings: `install` has not been called in this process.
    """
    if _guard is None:
        raise InvalidSettings(
            "LORA_PLUGINS_POLICY in a process that does not keep to it",
            expected="an API server with lora_admin",
            remedy="name lora_admin in VLLM_PLUGINS, see the log for why it does not load, or unset the variable",
        )


async def require_admin() -> None:
    """Let only administrators in; a FastAPI dependency. Without a policy everybody is one.

    Raises:
        HTTPException: 403.
    """
    principal = principal_of_request.get()
    if principal is not None and not principal.is_admin:
        from fastapi import HTTPException

        raise HTTPException(403, FORBIDDEN)


class _Guard:
    """Stands before vLLM's methods, for the policy of this process."""

    def __init__(self) -> None:
        self.policy = Policy(Principal("(nobody)"), {})
        self._decoys = Decoys()

    def stand(self) -> None:
        """Wrap vLLM's methods; once in a process."""
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
        from vllm.entrypoints.serve.engine.serving import BaseServing

        for serving in (BaseServing, PoolingBaseServing):
            serving._check_model = self._check_model(serving._check_model)  # noqa: SLF001 - in the ledger
        BaseServing._maybe_get_adapters = self._maybe_get_adapters(BaseServing._maybe_get_adapters)  # noqa: SLF001
        OpenAIServingModels.show_available_models = self._show(OpenAIServingModels.show_available_models)
        for name in ("load_lora_adapter", "unload_lora_adapter"):
            setattr(OpenAIServingModels, name, _for_admins(getattr(OpenAIServingModels, name)))

    def _principal(self) -> Principal:
        # What runs for no request that we have seen may use what everybody may.
        return principal_of_request.get() or self.policy.default

    @contextmanager
    def _unknown(self, models: Any, request: Any) -> Iterator[str | None]:
        """Inside, the request names its adapter only if it may, else a decoy; yields what it names.

        Whoever wraps these methods too sees the decoy, and errors that are raised speak of what was asked for. Yields
        None where nobody would learn anything: for the base model, what is served, and administrators.
        """
        name, principal = request.model, self._principal()
        may = principal.may_use(name or "")
        if not name or models.is_base_model(name) or principal.is_admin or (may and name in models.lora_requests):
            yield None
            return
        decoy = self._decoys.of(name, principal)  # where it is not needed too, so that both take the same time
        if may:
            yield name
            return
        request.model = decoy
        logger.debug("%s may not use adapter %r; it is asked for as %r", principal.label, name, decoy)
        try:
            yield decoy
        except Exception as error:
            error.args = tuple(_put_back(argument, decoy, name) for argument in error.args)
            if hasattr(error, "detail"):  # an HTTPException
                error.detail = _put_back(error.detail, decoy, name)
            raise
        finally:
            request.model = name

    def _check_model(self, check_model: Any) -> Any:
        @functools.wraps(check_model)
        async def checked(serving: Any, request: Any) -> Any:
            with self._unknown(serving.models, request) as named:
                refused = await check_model(serving, request)
            if named is None or refused is None:
                return refused
            error = refused.error
            message = _put_back(error.message, named, request.model)
            # Made anew: vLLM takes some of a name out of its texts, and must see this one. Where the name was its own,
            # only the time is wanted.
            anew = serving.create_error_response(message, error.type, HTTPStatus(error.code), error.param)
            return refused if named == request.model else anew

        return checked

    def _maybe_get_adapters(self, maybe_get_adapters: Any) -> Any:
        @functools.wraps(maybe_get_adapters)
        def got(serving: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            with self._unknown(serving.models, request):
                found = maybe_get_adapters(serving, request, *args, **kwargs)
            # An adapter that is called as a content part's type is (`image`) comes without being named.
            return found if found is None or self._principal().may_use(found.lora_name) else None

        return got

    def _show(self, show_available_models: Any) -> Any:
        @functools.wraps(show_available_models)
        async def shown(models: Any) -> Any:
            listed = await show_available_models(models)
            principal = self._principal()
            listed.data = [card for card in listed.data if models.is_base_model(card.id) or principal.may_use(card.id)]
            return listed

        return shown


def _for_admins(method: Any) -> Any:
    """By whatever route they are reached (SageMaker has others); at start, vLLM loads its static modules with them."""

    @functools.wraps(method)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        await require_admin()
        return await method(*args, **kwargs)

    return guarded


def _put_back(text: Any, decoy: str, name: str) -> Any:
    return text.replace(decoy, name) if isinstance(text, str) else text


def _say_who_is_let_in(policy: Policy, app: Any) -> None:
    logger.info("Access policy: %d keys of %s", policy.key_count, ", ".join(policy.labels) or "nobody")
    keys = _keys_of_vllm(app)
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
            BaseServing.create_error_response(message, err_type, status_code, param)
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
        what="wrapped where there is an access policy, but for is_base_model and create_error_response (called) and "
        "the key (read, to warn of keys of the policy that vLLM does not accept)",
        why="an adapter that the key may not use must look like one that does not exist; only administrators change "
        "what is served. Default multimodal adapters, and pooling's unknown names, come from _maybe_get_adapters",
        remove="vLLM asks a plugin which adapters a request may use",
    ),
)
