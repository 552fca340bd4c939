"""The thread that copies along."""

from __future__ import annotations

import os
import signal
import threading
import weakref

import pytest

from kvbridge.client.copy_helper import OFFERS_MAX, CopyHelper, copy_helper
from tests.harness import wait_for

PATIENCE_SECONDS = 30


class Gate:
    """Work that lasts until it is opened."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        if is_open:
            self.opened.set()

    def help(self) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_SECONDS)


def _busy(helper: CopyHelper) -> Gate:
    gate = Gate(is_open=False)
    helper.offer(gate)
    assert gate.reached.wait(PATIENCE_SECONDS)
    return gate


def test_one_thread_takes_part_in_one_work_after_the_other() -> None:
    """However many offer at once, there is one thread."""
    helper, start = CopyHelper(), threading.Barrier(8)
    before = _helper_threads()
    works = [Gate() for _ in range(8)]

    def offer(work: Gate) -> None:
        start.wait(PATIENCE_SECONDS)
        helper.offer(work)

    threads = [threading.Thread(target=offer, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = Gate()
    helper.offer(last)
    assert last.reached.wait(PATIENCE_SECONDS)
    assert len(_helper_threads() - before) == 1


def test_work_that_is_done_is_not_kept() -> None:
    """What a busy helper has not looked at yet goes with whoever offered it."""
    helper = CopyHelper()
    gate, forgotten = _busy(helper), Gate()
    helper.offer(forgotten)
    gone = weakref.ref(forgotten)
    del forgotten
    assert gone() is None
    kept = Gate()
    helper.offer(kept)
    gate.opened.set()
    assert kept.reached.wait(PATIENCE_SECONDS)


def test_a_busy_helper_takes_few_offers() -> None:
    """Whoever comes later does without, and waits for nothing."""
    helper = CopyHelper()
    gate = _busy(helper)
    works = [Gate() for _ in range(OFFERS_MAX + 3)]
    for work in works:
        helper.offer(work)
    gate.opened.set()
    assert works[OFFERS_MAX - 1].reached.wait(PATIENCE_SECONDS)
    wait_for(lambda: not helper.snapshot().waiting)
    last = Gate()
    helper.offer(last)
    assert last.reached.wait(PATIENCE_SECONDS)
    assert [work.reached.is_set() for work in works] == [True] * OFFERS_MAX + [False] * 3


def test_without_a_thread_there_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that gives no thread costs nothing else, and is asked again next time."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    helper, work = CopyHelper(), Gate()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        helper.offer(work)
    assert not helper.snapshot().running
    helper.offer(work)
    assert work.reached.wait(PATIENCE_SECONDS)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_helper_of_its_own() -> None:
    """The parent's thread does not exist there, and a lock that it held would never be released."""
    parents = copy_helper()
    gate = _busy(parents)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(PATIENCE_SECONDS)
            work = Gate()
            copy_helper().offer(work)
            if copy_helper() is not parents and work.reached.wait(PATIENCE_SECONDS):
                status = 0
        finally:
            os._exit(status)
    gate.opened.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert copy_helper() is parents


def _helper_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "kvbridge-copy"}
