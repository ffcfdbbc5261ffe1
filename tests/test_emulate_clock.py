"""The emulated device's accounts, on a clock that only the test moves: what is exposed, late and charged."""

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cuboid.comm.transport.sharing import PR_GET_TIMERSLACK, SLACK, late_timers
from cuboid.emulate import device as device_module
from cuboid.emulate.device import BLOCKED, FIRST, Device, Emulated
from cuboid.emulate.slow_motion import parse

FIGURES = parse("fp32=1e9,stream=1e6").hardware


class Clock:
    """In place of the module `time`."""

    def __init__(self) -> None:
        self.now, self.own, self.others = 100.0, 5.0, 3.0  # this thread's processor seconds, and the other threads'
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.own

    def process_time(self) -> float:
        return self.own + self.others

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def passes(self, now: float = 0.0, own: float = 0.0, others: float = 0.0) -> Callable[[], str]:
        """Something that takes so long."""

        def act() -> str:
            self.now, self.own, self.others = self.now + now, self.own + own, self.others + others
            return "result"

        return act


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(device_module, "time", found)
    return found


def busy_for_half_a_second(**changes: Any) -> Emulated:
    """From now on."""
    found = Emulated(replace(Device(FIGURES), **changes))
    x = torch.zeros(125_000)
    with found:
        x.neg_()  # 500,000 bytes
    assert found.busy == 0.5
    return found


def test_emulated_wait_is_exposed_from_when_the_device_was_free(clock: Clock) -> None:
    device = busy_for_half_a_second(latency=0.25)
    assert device._await(clock.passes(now=2.0), done=False) == "result"
    assert (device.exposed, device.free) == (2.0 - 0.5 + 0.25, 102.25)


@pytest.mark.parametrize(
    ("waited", "done"),
    [
        pytest.param(0.25, False, id="landed while the device was busy"),
        pytest.param(BLOCKED / 2, False, id="landed already"),
        pytest.param(2.0, True, id="known to have landed"),
    ],
)
def test_emulated_wait_is_not_exposed(waited: float, done: bool, clock: Clock) -> None:
    device = busy_for_half_a_second()
    clock.passes(now=0.0 if waited == 0.25 else 1.0)()
    device._await(clock.passes(now=waited), done)
    assert (device.exposed, device.free) == (0.0, 100.5)


def test_emulated_message_leaves_when_the_device_is_done(clock: Clock) -> None:
    device = busy_for_half_a_second(host=0.1)  # one launch before, and this one
    device._launch(clock.passes())
    assert clock.slept == [pytest.approx(0.6)]  # the device began when the host had launched
    assert device.late == 0.0


def test_emulated_message_is_late_if_the_process_is(clock: Clock) -> None:
    device = busy_for_half_a_second()
    clock.passes(now=0.75)()
    device._launch(clock.passes())
    assert clock.slept == []
    assert (device.late, device.free) == (0.25, 100.5)  # the device itself does not wait


@pytest.mark.parametrize(("sends", "free"), [(True, 100.75), (False, 100.5)])
def test_emulated_core_is_charged_for_what_it_sends(sends: bool, free: float, clock: Clock) -> None:
    device = busy_for_half_a_second(sends=sends)
    device._launch(clock.passes(own=0.25))
    assert device.free == free


@pytest.mark.parametrize(("sends", "free"), [(True, 100.75), (False, 100.5)])
def test_emulated_core_is_charged_for_threads_that_send_while_it_works(sends: bool, free: float, clock: Clock) -> None:
    device = busy_for_half_a_second(sends=sends)
    clock.passes(others=0.25)()
    device._launch(clock.passes())
    assert device.free == free
    device._launch(clock.passes())
    assert device.free == free  # once


def test_emulated_core_is_charged_while_it_waits_only_if_it_is_busy(clock: Clock) -> None:
    device = busy_for_half_a_second(sends=True)
    device._await(clock.passes(now=0.25, others=0.25), done=False)  # landed before the device is done
    assert device.free == 100.75
    device._await(clock.passes(now=1.75, others=0.5), done=False)  # it had nothing to do but to wait
    assert (device.free, device.exposed) == (102.0, 1.25)
    device._launch(clock.passes())
    assert device.free == 102.0  # what was sent meanwhile is not charged later


# Priority and timers


def test_emulated_device_comes_first_inside_its_context_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every thread's priority would be, where it may be changed."""
    niceness, before = dict[int, int](), os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "setpriority", lambda which, thread, value: niceness.__setitem__(thread, value))
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    with Emulated(Device(FIGURES)):
        inside = dict(niceness)
        other.start()  # such a thread inherits the priority
    stop.set()
    other.join()
    assert threading.get_native_id() in inside
    assert set(inside.values()) == {FIRST}
    assert niceness.keys() >= inside.keys() | {other.native_id}
    assert set(niceness.values()) == {before}


def test_emulated_device_may_be_without_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with Emulated(Device(FIGURES)) as device:
        torch.zeros(10)
    assert device.busy > 0


def slack() -> int:
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK))


@pytest.mark.skipif(sys.platform != "linux", reason="timer slack is Linux's")
def test_late_timers_are_those_of_threads_started_within() -> None:
    before, found = slack(), list[int]()
    with late_timers():
        assert slack() == SLACK
        thread = threading.Thread(target=lambda: found.append(slack()))
        thread.start()
        thread.join()
    assert found == [SLACK]
    assert slack() == before != SLACK
