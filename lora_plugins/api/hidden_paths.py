"""Error texts without the paths of the server, for clients who only ask for completions."""

from __future__ import annotations

import re

from lora_plugins.errors import LoRAPluginsError

HIDDEN = "<path>"
_SHOWN = "adapter"  # the caller's own word

# In quotes a path may have spaces. /v1/… is a route of the server, which remedies name.
_QUOTED = re.compile(r"""(?P<quote>['"])(?:file:)?/(?!v1/)[^'"]*(?P=quote)""")
_BARE = re.compile(r"""(?<![\w.~/<>:-])(?:file:/*)?/(?!v1/)[^\s'"/();,]+(?:/[^\s'"/();,]+)*/?(?<![.:])""")


def without_paths(text: str) -> str:
    """The text with `<path>` in the place of each absolute path and `file://` URI."""
    return _BARE.sub(HIDDEN, _QUOTED.sub(rf"\g<quote>{HIDDEN}\g<quote>", text))


def for_clients(error: LoRAPluginsError) -> str:
    """An error's text without the server's paths and places; its adapter's name stays as the client has written it."""
    # Rebuild the error from its fields, because the name of an adapter may look like a path and must stay.
    fields = {name: text if name == _SHOWN else without_paths(text) for name, text in error.fields().items()}
    return str(type(error)(**{**fields, "place": ""}))
