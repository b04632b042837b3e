"""Pages whose blocks are run or read by tests of another kind: with an index of packages, Ray, or an image."""

from __future__ import annotations

from tests.walkthroughs.reader import Do, Step, Walk

INSTALLED = "needs an index of packages; tests/installation/test_install.py installs the wheel beside a vLLM"
NO_IMAGE = "no container engine here; tests/test_manifests.py runs the image's steps and reads the compose files"
REPLICAS = "starts Ray and two servers; tests/ray/test_real_engine.py does"
SHELL = 'pip install "lora-plugins[ray] @ git+$REPOSITORY"'
CURL = "curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\"


IMAGE = Walk(
    "docs/get-started/image.md",
    [
        Step("make wheel", Do.LEAVE_OUT, NO_IMAGE),
        Step("docker run --rm --gpus all --shm-size 8g -p 127.0.0.1:8000:8000 \\", Do.LEAVE_OUT, NO_IMAGE),
        Step(CURL, Do.LEAVE_OUT, "asks the container; tests/walkthroughs/test_hobbyist.py asks a server the same"),
    ],
    {},
)

DOCKER = Walk(
    "docs/guides/docker.md",
    [
        Step("make wheel                                    # dist/lora_plugins-*.whl", Do.LEAVE_OUT, NO_IMAGE),
        Step("docker run --rm --gpus all --shm-size 8g -p 127.0.0.1:8000:8000 \\", Do.LEAVE_OUT, NO_IMAGE),
        Step("export COMPOSE_FILE=examples/docker/compose.yaml", Do.LEAVE_OUT, NO_IMAGE),
        Step("docker compose exec vllm lora-plugins doctor", Do.LEAVE_OUT, NO_IMAGE),
    ],
    {},
)

ROUTING = Walk("docs/guides/routing.md", [Step(SHELL, Do.LEAVE_OUT, REPLICAS)], {})
