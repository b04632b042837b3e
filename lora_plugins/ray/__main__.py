"""`python -m lora_plugins.ray --replicas 2 -- MODEL --enable-lora …`: replicas of `vllm serve` on Ray.

The command of a machine without a Serve configuration: starts Ray or joins a cluster, deploys the application, and
waits for Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence

from lora_plugins.settings import default_for_children, environment, is_secret, variables_of_servers


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m lora_plugins.ray",
        description="Replicas of vllm serve on Ray Serve; requests go where their adapter is. "
        "Environment variables are passed on to the servers, but for secrets, which Ray's nodes must have themselves.",
        epilog="What follows -- is given to vllm serve.",
    )
    made.add_argument("--replicas", type=int, default=1, help="how many (1)")
    made.add_argument("--max-replicas", type=int, help="with this, Ray scales between --replicas and it")
    made.add_argument("--busy-requests", type=int, default=16, help="so many in flight are never too many (16)")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    made.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    made.add_argument("--address", help="of a running Ray cluster; without it one is started here")
    made.add_argument("--num-cpus", type=float, default=1.0, help="Ray's CPUs for each replica (1)")
    made.add_argument("--num-gpus", type=float, default=0.0, help="Ray's GPUs for each replica (0)")
    made.add_argument("arguments", nargs="+", metavar="ARGUMENT", help="of vllm serve, the model first")
    return made


def passed_on() -> dict[str, str]:
    """Return the environment of servers on other machines; servers on this machine have the whole environment.

    Secrets stay out: Ray stores and shows what Ray is given. Secrets belong in the environment of Ray's nodes.
    """
    here = environment()
    return {name: here[name] for name in variables_of_servers() if not is_secret(name)}


def main(given: Sequence[str] | None = None) -> int:
    """Start the replicas, and wait for Ctrl-C or SIGTERM."""
    parsed = parser().parse_args(given)
    # Ray reports usage to its makers unless the variable is 0; a variable that the user has set wins.
    default_for_children("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    from lora_plugins.ray.application import Options, build

    if parsed.address is not None:
        ray.init(address=parsed.address)
    elif not ray.is_initialized():
        # A CPU more than the replicas need: Ray's own actors and the ingress need room too.
        wanted = parsed.num_cpus * (parsed.max_replicas or parsed.replicas)
        ray.init("local", num_cpus=max(os.cpu_count() or 1, int(wanted) + 1), include_dashboard=False)
    options = Options(
        arguments=parsed.arguments,
        env=passed_on(),
        secrets=[name for name in variables_of_servers() if is_secret(name)],
        replicas=parsed.replicas if parsed.max_replicas is None else (parsed.replicas, parsed.max_replicas),
        busy_requests=parsed.busy_requests,
        resources={"num_cpus": parsed.num_cpus, "num_gpus": parsed.num_gpus},
    )
    # The handlers only set an event: `serve.shutdown` must not run within a signal handler.
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    serve.start(http_options={"host": parsed.host, "port": parsed.port})
    try:
        serve.run(build(options), name="lora-plugins", route_prefix="/")
        sys.stdout.write(f"{parsed.replicas} replicas answer on http://{parsed.host}:{parsed.port}/v1\n")
        sys.stdout.flush()
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
