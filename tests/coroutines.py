"""Tests that are coroutine functions: in a loop of their own, or beside what runs them."""

import asyncio
import functools
import inspect


def in_a_loop(test):
    """Makes a test of a coroutine function."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def given_by(runner):
    """Makes a test of a coroutine function whose first argument ``runner(use)`` hands to ``use``.

    ``runner`` may be the name of a fixture.
    """

    def made(test):
        first, *others = inspect.signature(test).parameters.values()

        @functools.wraps(test)
        def run(**given):
            runs = given.pop(runner) if isinstance(runner, str) else runner
            runs(lambda it: test(it, **given))

        del run.__wrapped__
        run.__signature__ = inspect.Signature(
            [first.replace(name=runner), *others] if isinstance(runner, str) else others
        )
        return run

    return made
