"""A simulation of buckets on a link, event by event: the oracle of the closed forms in ``ops.forecast.utilisation``."""

import numpy as np

from ops.forecast.utilisation import crossing_steps, released

#: Steps that a simulation runs for.
STEPS = 2000


def by_layer(layers, fragments):
    """Returns when the layers of each fragment are released: the last layer of the model first, each when it is done.

    Fragment p has the layers p, p + P, p + 2 P, ... ("strided", Streaming DiLoCo, section 2.2).
    """
    done = released(layers, within=1.0)
    strides = (range(p, layers, fragments) for p in range(fragments))
    return tuple(tuple(sorted(done[layers - 1 - layer] for layer in stride)) for stride in strides)


def simulate(traffic, gbps, steps=STEPS):
    """Returns the utilisation measured over so many steps, one for each bandwidth.

    Event by event: a transfer starts when its first bucket is released and the link has carried all earlier ones; a
    step starts when the previous one is computed and every transfer due by then has crossed. All bandwidths run
    side by side. Buckets of one transfer follow each other without another between them, so the last one crosses at
    max(link free + n * s, start of the step + g).
    """
    bandwidth = np.atleast_1d(np.asarray(gbps, np.float64))
    per_bucket = traffic.payload_gbit / traffic.buckets / (bandwidth * traffic.step_s)
    on_the_link = [len(releases) * per_bucket for releases in traffic.releases]
    crossing = crossing_steps(traffic, bandwidth)
    now = np.zeros_like(bandwidth)
    link_free = np.zeros_like(bandwidth)
    schedule = _schedule(traffic)
    due = {}
    for step in range(steps):
        for p in schedule[step % traffic.sync_interval_steps]:
            link_free = np.maximum(link_free + on_the_link[p], now + crossing[p])
            due[step + traffic.overlap_steps] = link_free  # the link is FIFO: the latest of a step is the last
        now = now + 1.0
        if step in due:
            now = np.maximum(now, due.pop(step))
    return steps / now


def _schedule(traffic):
    """Returns the fragments released in each step of an interval, spread as evenly as whole steps allow."""
    fragments, interval = len(traffic.releases), traffic.sync_interval_steps
    due_fragments = [[] for _ in range(interval)]
    for p in range(fragments):
        due_fragments[(p + 1) * interval // fragments - 1].append(p)
    return due_fragments


def required_on_grid(traffic, utilisation, grid):
    """Returns, for each utilisation, the first bandwidth of an ascending grid at which the simulation reaches it.

    Infinity where none does.
    """
    reached = simulate(traffic, grid)
    # A last bit of rounding must not cost a grid step.
    firsts = [np.flatnonzero(reached >= each - 1e-12) for each in utilisation]
    return [float(grid[first[0]]) if first.size else float("inf") for first in firsts]
