"""Who may do what on vLLM's API server: administrators alone change the served adapters, and the access policy holds.

`install` runs as the API server makes its application, called by `endpoint_plugin.py`: it reads the policy and adds a
middleware, which knows whose key a request has. `base_serving.py` and `openai_serving_models.py` then ask which
adapters a key may use; the latter, and the middleware, who may change adapters. A stored response
(`VLLM_ENABLE_RESPONSES_API_STORE`) is that of its own key alone.

`VLLM_API_KEY` or `--api-key` says whether vLLM asks for a key, and which keys of the policy vLLM does not accept.
Where vLLM asks, our admin key joins `args.api_key`.

Touches: vllm.envs: VLLM_API_KEY
Why: the rights of a key count only where vLLM lets the key in.
Until: vLLM lets a plugin authenticate requests.
"""

from __future__ import annotations

from collections import UserDict
from typing import Any

from lora_plugins.api.access.administrators import ADMIN_KEY, Administrators
from lora_plugins.api.access.policy import Policy
from lora_plugins.api.access.principals import KnowPrincipal, label_of_request
from lora_plugins.errors import RateExceeded
from lora_plugins.events import KeyRefused
from lora_plugins.lifecycle.principal_limits import Rate
from lora_plugins.log import logger
from lora_plugins.process import Process
from lora_plugins.vllm_patches.wrapping import wrap

_STORES = ("response_store", "msg_store", "event_store", "background_tasks")


def install(app: Any, process: Process) -> None:
    """Have `app` let only administrators change adapters, and apply a policy; a second call changes nothing.

    Call before the server adds its own middleware (an endpoint plugin's `attach_router` runs before).

    Raises:
        InvalidSettings: the policy cannot be right.
    """
    if getattr(app.state, "lora_plugins_administrators", None) is not None:
        return
    settings, keys, args = process.settings, _keys_of_vllm(app), getattr(app.state, "args", None)
    # Read first: a policy with a fault must stop the start before anything is patched.
    policy = None if settings.policy is None else Policy.read(settings.policy)
    administrators = app.state.lora_plugins_administrators = Administrators(
        policy, settings.admin_key, keys_of_vllm=tuple(keys), is_unix_socket=bool(getattr(args, "uds", None))
    )

    async def admit(rate: Rate) -> None:
        try:
            await process.rates.admit(rate)
        except RateExceeded as error:
            process.events.emit(KeyRefused(rate.label, error))
            raise

    app.add_middleware(KnowPrincipal, administrators=administrators, admit=admit)
    process.lets_in_administrators_only = True
    process.policy = policy
    _log_who_administers(administrators)
    if policy is not None:
        patch_stores()
        _log_who_is_let_in(policy, keys)
    if args is not None and keys and settings.admin_key is not None and settings.admin_key not in keys:
        args.api_key = [*keys, settings.admin_key]  # vLLM reads the list later, for paths below /v1


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

    # As vLLM (vllm/entrypoints/serve/middleware/register.py, 0.30 to 0.33): the option replaces the variable.
    given = getattr(getattr(app.state, "args", None), "api_key", None)
    return [key for key in (given or [envs.VLLM_API_KEY]) if key]


def patch_stores() -> None:
    """Give each principal of this process ids of its own; a second call changes nothing."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses

    wrap(OpenAIServingResponses, "__init__", _init_responses)


def _init_responses(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the stores mappings with a part for each principal: a body may choose its response's id.

    Touches:
        vllm.entrypoints.openai.responses.serving:
            OpenAIServingResponses{response_store, msg_store, event_store, background_tasks,
                __init__(self, engine_client, models, ...)}
    Why: ids are the callers' choice, so keys could read, continue, cancel and replace others' responses.
    Until: vLLM keeps stored responses apart by key.
    """
    original(self, *args, **kwargs)
    for name in _STORES:
        setattr(self, name, _OfThePrincipal())


class _OfThePrincipal(UserDict[str, Any]):
    """A mapping with the entries of the present request's principal; a request's tasks are of its principal too."""

    def __init__(self) -> None:
        self._of: dict[str | None, dict[str, Any]] = {}

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override] # all methods of a UserDict work on it
        return self._of.setdefault(label_of_request(), {})
