"""Read what others have made in processes of their own, under limits, so that nothing in it can stop a server.

`children.py` is the server's side, `child.py` the other process's, `messages.py` what they say to each other.

Whatever resolves adapters goes this way: servers, workers, vLLM's `LLM`, and `lora-plugins resolve` and `pull`, which
share a store with servers. `lora-plugins inspect` alone reads in its own process: a person runs it on one adapter,
wants what can be read whatever else is wrong, and can end it.
"""
