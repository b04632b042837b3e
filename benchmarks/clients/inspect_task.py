"""The task that `inspect eval` runs in `make test-clients`."""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes


@task
def users() -> Task:
    """Two samples; an untrained model scores nothing."""
    samples = [Sample(input=f"How many {what}?", target="42") for what in ("users", "orders")]
    return Task(dataset=samples, scorer=includes())
