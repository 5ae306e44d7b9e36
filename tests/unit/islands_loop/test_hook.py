"""The hook for trainers with callbacks: what it passes on, and what becomes of Ctrl-C, with an island that notes."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from broker.base.errors import ConfigError, LocalProtocolError
from broker.wire.messages import Departure
from islands import hook as module
from islands.hook import Hook


class NotedIsland:
    """Stands in for an island: adds one to the parameters, and notes the rest."""

    def __init__(self, address, params, **options):
        self.address, self.options = address, options
        self.calls, self.done, self.reset_optimizer, self.inner_step = [], False, False, 0

    def restore(self, params, state):
        self.calls.append(("restore",))
        return params + 1, state

    def step(self, params, *, tokens, loss, state):
        self.inner_step += 1
        self.calls.append(("step", tokens, loss, state))
        return params + 1

    def pause(self, params, state, *, reason):
        self.calls.append(("pause", float(params), state, reason))

    def close(self, params):
        self.calls.append(("close", float(params)))
        return params + 1

    def leave(self, reason, departure):
        self.calls.append(("leave", reason, departure))

    def __exit__(self, kind, error, trace):
        self.calls.append(("exit", kind))


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    monkeypatch.setattr(module, "join", NotedIsland)


def begun(state=None, **options):
    hook = Hook("tcp://hub:7001", **options)
    hook.start(np.float32(0), state)
    return hook


def test_the_three_callbacks_join_step_and_close():
    hook = Hook("tcp://hub:7001", run="demo", tokens_per_step=8, kinds={"w": "mean"})
    assert not hook.done
    params, state = hook.start(np.float32(0), "adam")
    assert (hook.island.address, hook.island.options["run"]) == ("tcp://hub:7001", "demo")
    assert (hook.island.options["tokens_per_step"], hook.island.options["kinds"]) == (8, {"w": "mean"})
    params, state = hook.step(params, state, loss=0.5)
    params, state = hook.step(params, state, tokens=3)
    assert (params, state) == (3.0, "adam")
    assert hook.finish() == 4.0
    assert hook.island.calls == [
        ("restore",),
        ("step", 8, 0.5, ("adam", None)),
        ("step", 3, None, ("adam", None)),
        ("close", 3.0),
    ]


def test_without_a_state_nothing_is_saved_and_the_last_parameters_may_be_given():
    hook = begun(tokens_per_step=8)
    assert hook.step(np.float32(1)) == (2.0, None)
    assert hook.finish(np.float32(7)) == 8.0
    assert hook.island.calls[1] == ("step", 8, None, None)


@pytest.mark.parametrize("call", [lambda hook: hook.step(1.0, tokens=1), lambda hook: hook.finish()])
def test_a_call_before_start_says_so(call):
    with pytest.raises(LocalProtocolError, match="call start first"):
        call(Hook("tcp://hub:7001"))


def test_start_is_called_once():
    with pytest.raises(LocalProtocolError, match="start was called twice"):
        begun().start(np.float32(0))


def test_tokens_that_nobody_told_are_asked_for():
    with pytest.raises(ConfigError, match=r"tokens.*give tokens_per_step"):
        begun().step(1.0)


def test_spoilt_parameters_get_a_fresh_state_and_without_fresh_the_log_says_that_it_is_kept(caplog):
    for fresh, state in ((lambda params: f"fresh for {params:g}", "fresh for 7"), (None, "spoilt")):
        caplog.clear()
        hook = begun("spoilt", tokens_per_step=8, fresh=fresh)
        hook.island.reset_optimizer = True
        assert hook.step(np.float32(6), "spoilt") == (7.0, state)
        assert "hook.reset" in caplog.text
    assert "give fresh=" in caplog.text


def train(hook, number, reached, times=1):
    with hook:
        params, state = hook.start(np.float32(0), "adam")
        for _ in range(times):
            os.kill(os.getpid(), number)
            reached.append("the step that runs")
        hook.step(params, state)
        reached.append("the next one")


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_ends_the_step_that_runs_and_then_pauses(number, error):
    before, reached, hook = signal.getsignal(number), [], Hook("tcp://hub:7001", tokens_per_step=8)
    with pytest.raises(error):
        train(hook, number, reached)
    assert reached == ["the step that runs"]
    reason = f"interrupted by {number.name}"
    assert hook.island.calls[2:4] == [("pause", 2.0, ("adam", None), reason), ("leave", reason, Departure.PAUSED)]
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_does_not_wait_for_the_step():
    reached, hook = [], Hook("tcp://hub:7001", tokens_per_step=8)
    with pytest.raises(KeyboardInterrupt):
        train(hook, signal.SIGINT, reached, times=2)
    assert reached == ["the step that runs"]
    assert hook.island.calls[1:] == [
        ("leave", "interrupted by SIGINT", Departure.PAUSED),
        ("exit", KeyboardInterrupt),
    ]


def test_ctrl_c_ends_the_wait_for_a_run(monkeypatch):
    def never_joins(address, params, *, check, **options):
        os.kill(os.getpid(), signal.SIGINT)
        check()
        pytest.fail("check did not raise")

    monkeypatch.setattr(module, "join", never_joins)
    with pytest.raises(KeyboardInterrupt), Hook("tcp://hub:7001") as hook:
        hook.start(np.float32(0))


def test_handlers_of_the_program_stay():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Hook("tcp://hub:7001", tokens_per_step=8) as hook:
            hook.start(np.float32(0))
            os.kill(os.getpid(), signal.SIGINT)
            hook.step(1.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_on_another_thread_it_does_without_signals():
    def stepped():
        with Hook("tcp://hub:7001", tokens_per_step=8) as hook:
            hook.start(np.float32(0))
            return hook.step(1.0)

    with ThreadPoolExecutor(1) as thread:  # Python raises a ValueError where a thread sets a handler
        assert thread.submit(stepped).result() == (2.0, None)


def test_the_callback_of_the_document_serves_a_trainer():
    text = (Path(__file__).parents[3] / "docs" / "your-model.md").read_text()
    code = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "class Atoll" in block)
    names = {"Callback": object}
    exec(code, names)
    hook = Hook("tcp://hub:7001", tokens_per_step=8)
    callback = names["Atoll"](hook)
    trainer = SimpleNamespace(params=np.float32(0), opt_state="adam", loss=0.5, should_stop=False)
    callback.on_train_begin(trainer)
    callback.on_step_end(trainer)
    assert (trainer.params, trainer.should_stop) == (2.0, False)
    hook.island.done = True
    callback.on_step_end(trainer)
    callback.on_train_end(trainer)
    assert (trainer.params, trainer.opt_state, trainer.should_stop) == (4.0, "adam", True)
    assert hook.island.calls[1:3] == [("step", 8, 0.5, ("adam", None))] * 2
