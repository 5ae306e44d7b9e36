"""``up`` while it waits: a healthy start is told from a run of which nothing can be seen any more."""

import asyncio
from types import SimpleNamespace

import pytest

from broker.wire.errors import Unavailable
from ops.run.up import LocalRun


def registry(read):
    """A registry that reads what is given here."""

    async def answer():
        return read()

    return SimpleNamespace(read=answer, address="redis://127.0.0.1:6379")


def unavailable():
    raise Unavailable("Redis is away", definite=True)


@pytest.mark.parametrize(
    ("read", "missing"),
    [
        (lambda: SimpleNamespace(empty=True), "waiting for the aggregator's first report"),
        (unavailable, "Redis is away"),
    ],
)
def test_what_there_is_no_status_for_is_said(read, missing):
    with asyncio.Runner() as loop:
        assert LocalRun._status(registry(read), loop) == (None, missing)
