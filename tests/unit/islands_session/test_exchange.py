"""What passes between the training thread and the communication thread."""

from collections import deque

from islands.session.exchange import Exchange, Install, Moment, take_newest
from islands.session.training_state import Position


class DeviceScalar:
    """A loss on a device, as JAX shows it."""

    def __init__(self, value, *, ready=True, deleted=False):
        self.value, self.ready, self.deleted = value, ready, deleted

    def is_ready(self):
        return self.ready

    def is_deleted(self):
        return self.deleted

    def __float__(self):
        assert self.ready, "reading it would wait for the device"
        assert not self.deleted
        return self.value


def test_the_newest_loss_that_is_ready_and_was_not_donated_is_taken_and_newer_ones_are_left_for_later():
    late, donated = DeviceScalar(3.0, ready=False), DeviceScalar(9.0, deleted=True)
    losses = deque([DeviceScalar(1.0), DeviceScalar(2.0), late, donated])
    assert take_newest(losses) == 2.0
    late.ready = True
    assert take_newest(losses) == 3.0
    assert take_newest(losses) is None
    assert take_newest(deque([late, donated])) == 3.0


def exchange():
    woken = []
    found = Exchange()
    found.wake = lambda: woken.append(True)
    return found, woken


def moment(step, **fields):
    return Moment(at=Position(step, step), **fields)


def test_the_other_thread_is_woken_for_what_a_round_waits_for_and_at_the_end():
    found, woken = exchange()
    found.urgent = frozenset({2})
    for step, fields in enumerate(({"copied": {1: ()}}, {"copied": {1: (), 2: ()}}, {"stopped": True})):
        found.tell(moment(step, **fields), 10.0)
        assert len(woken) == step
    assert [m.at.step for m in found.moments] == [0, 1, 2]


def test_the_other_thread_is_woken_for_what_was_installed_where_versions_wait_for_its_room():
    found, woken = exchange()
    install = Install(fragment_id=0, fragment_version=1, keep=1.0, placed=(), shift=(), dtypes=())
    found.tell(moment(1, installed=((install, ()),)), 10.0)
    found.held_back = True
    found.tell(moment(2), 10.1)
    assert not woken
    found.tell(moment(3, installed=((install, ()),)), 10.2)
    assert len(woken) == 1
