"""Training loops in NumPy that join a hub as islands, and what its store holds of them."""

import contextlib
import threading
import time

import numpy as np

import islands
from aggregator.store.store import Store
from tests.hub import RUN, WAIT_S

TOKENS = 10  # per inner step


def stored(path):
    """The newest parameters in a store, by tensor name."""
    with Store.open(path) as store:
        loaded = store.load()
        states = {p: store.newest_file(p).state for p in loaded.fragments}
    arrays = {}
    for p, state in states.items():
        start = 0
        for row in loaded.run["manifest"][p]:
            name, shape = row[0], tuple(row[1])
            size = int(np.prod(shape, dtype=int))
            arrays[name] = state.params[start : start + size].reshape(shape).copy()  # of what lies in a file
            start += size
    return arrays


def params_of(value=1.0, dtype=np.float32):
    return {"w": np.full((40, 30), value, dtype), "b": np.full(30, value, dtype)}


def join(hub, params, **options):
    return islands.join(hub.address, params, run=RUN, timeout_s=WAIT_S, **({"tokens_per_step": TOKENS} | options))


def numpy_step(params, by=0.01):
    return {name: x - np.float32(by) for name, x in params.items()}


def train(island, params, train_step=numpy_step, *, until=lambda: False, pause_s=0.002, **options):
    """A loop of one's own, until the run is done or ``until()``; returns the parameters."""
    ends_s = time.monotonic() + WAIT_S
    while not island.done and not until():
        assert time.monotonic() < ends_s
        params = train_step(params)
        params = island.step(params, tokens=TOKENS, loss=1.0, **options)
        time.sleep(pause_s)  # plays the work of a step
    return params


@contextlib.contextmanager
def training(island, params):
    """Has an island train in a thread, until the end of the block."""
    stop = threading.Event()
    trainer = threading.Thread(target=train, args=(island, params), kwargs={"until": stop.is_set})
    trainer.start()
    try:
        yield
    finally:
        stop.set()
        trainer.join(WAIT_S)


def newest(hub):
    return list(hub.versions)
