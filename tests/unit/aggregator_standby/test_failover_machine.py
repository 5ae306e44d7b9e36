"""Failover against everything at once: cores of one leader and its standbys, a model lease, and a network that lies.

No driver, no clock, no socket. Each step lets one thing happen that may happen: a message arrives, in any order; a
request reaches Redis, however late; a write ends; a process ticks, dies, or starts again. What must hold is checked as
it happens, and at the end everything is healed, and somebody must lead with everybody in sync.
"""

from functools import partial

import pytest

from tests.failover_models import NAMES
from tests.failover_world import World
from tests.worlds import MOST, brief_runs, long_run

pytestmark = pytest.mark.timeout(600)  # it computes: the limit is for a hang, not for a busy machine

FRAGMENTS = (0, 1)

#: How likely each is, beside the others.
STEPS = {
    "time": 8, "tick": 12, "write": 12, "message": 25, "request": 14, "reply": 14, "commit": 6, "calm": 2,
    "lose_message": 3, "copy_message": 1, "lose_reply": 2, "give_up": 3, "crash": 1, "start": 3, "broker": 1,
    "save_run": 1, "clock": 1, "redis": 1, "dark": 1,
}  # fmt: skip


def step(world, kind, a, b):
    """One thing happens; ``a`` and ``b`` say which."""
    name = NAMES[a % len(NAMES)]
    match kind:
        case "time":
            world.now_s += (0.05, 0.25, 0.5, 1.5, 4.0)[a % 5]
        case "tick":
            world.tick(name)
        case "write":
            world.write_ends(name)
        case "message" if world.messages:
            world.message_arrives(a % len(world.messages))
        case "lose_message" if world.messages:
            world.messages.pop(a % len(world.messages))
        case "copy_message" if world.messages:
            world.messages.append(world.messages[a % len(world.messages)])
        case "request" if world.requests:
            world.request_arrives(a % len(world.requests))
        case "reply" if world.replies:
            world.reply_arrives(a % len(world.replies))
        case "lose_reply" if world.replies:
            world.replies.pop(a % len(world.replies))
        case "give_up":
            world.give_up(name)
        case "commit":
            world.commit(name, FRAGMENTS[b % len(FRAGMENTS)])
        case "save_run":
            world.save_run(name)
        case "crash":
            world.crash(name, b % 4)
        case "start":
            world.start(name)
        case "calm":  # otherwise nothing gets far
            for _ in range(a % 30):
                world.now_s += 0.05
                for each in NAMES:
                    world.tick(each)
                world._settle()
        case "broker" if not world.forgetful:
            world.restart_broker()
        case "clock":
            world.jump_clock((-30.0, -0.5, 0.5, 30.0)[a % 4])
        # Before the first version is published, a Redis that is emptied may give epoch 1 twice: to nobody's harm.
        case "dark" if world.dark and world.promised:
            world.blackout(b % 4, name)
        case "redis" if world.forgetful and world.delivered:
            world.snapshot() if b % 3 else world.lose_redis(a)
    if len(world.messages) > MOST:
        del world.messages[:a]


#: Every other step of a brief run is the arrival of a message.
KINDS = [*STEPS, *["message"] * len(STEPS)]
TestFailover = brief_runs(World, step, KINDS, runs=15, steps=40)
TestFailoverWithAForgetfulRedis = brief_runs(partial(World, forgetful=True), step, KINDS, runs=15, steps=40)
TestFailoverWithPowerCuts = brief_runs(partial(World, dark=True), step, KINDS, runs=15, steps=40)


@pytest.mark.parametrize("traits", [{}, {"forgetful": True}, {"dark": True}], ids=str)
def test_nothing_published_is_lost_whatever_happens(traits):
    epochs = commits = 0
    for seed in range(3, 9):  # in which everything happens that speaks against a candidate
        world = long_run(World(**traits), step, STEPS, seed=seed, steps=1500)
        epochs, commits = epochs + world.terms, commits + world.published
    assert epochs > 20  # else it was no test
    assert commits > 40
