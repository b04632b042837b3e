"""Reads adapters in separate processes, under limits, so that no adapter's content can stop a server.

`children.py` is the server's side, `child.py` the other process's; `protocol.py` has the messages between both.

All code that resolves adapters goes this way: servers, workers, vLLM's `LLM`, and `lora-plugins why` and `pull`,
which share a store with servers. `lora-plugins inspect` alone reads in its own process: a person runs the command on
one adapter, wants every readable fact about a faulty adapter, and can end the command.
"""
