"""What this process does in threads. While it traces a model: reading files and loading libraries, for which a thread
does not hold the interpreter. Behind its first step: what the next start will want.

Nothing but time depends on it: whatever was not done, or failed, happens again where it is wanted.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from fxshard.log import LOG

_begun: dict[str, threading.Thread] = {}
_behind: list[threading.Thread] = []


def begin(name: str, act: Callable[[], object], *, torch: bool = False) -> None:
    """Do something in a thread, once in a process, and wait for nothing.

    ``torch``: it calls torch, and a program that ends waits for it. Python ends threads that do not hold the
    interpreter where they are, which code that is not Python's may not survive.
    """
    if name not in _begun:
        thread = threading.Thread(target=attempt, args=(act,), name=f"fxshard: {name}", daemon=True)
        if _started(thread):
            _begun[name] = thread
            if torch:
                atexit.register(thread.join)


def behind(act: Callable[[], None]) -> None:
    """Do something in a thread, and wait for it only where the program ends, whichever thread asks for it: autograd's
    have daemons, if nothing is said.
    """
    thread = threading.Thread(target=attempt, args=(act,), name="fxshard: behind the first step", daemon=False)
    if _started(thread):
        _behind.append(thread)


def _started(thread: threading.Thread) -> bool:
    try:
        thread.start()
    except RuntimeError as error:  # there are too many, or the program ends
        LOG.debug("%s is left out: %s", thread.name, error)
        return False
    return True


def attempt(act: Callable[[], object]) -> None:
    """Do something that nothing but time depends on."""
    try:
        act()
    except Exception as error:  # of any kind: it will come again, to somebody who can be told
        LOG.debug("something could not be done beside the program: %s: %s", type(error).__name__, error)


def finish() -> None:
    """Wait for all that was begun: what comes next would do the same once more."""
    for thread in list(_begun.values()):
        thread.join()


def finish_all() -> None:
    """Wait for everything."""
    finish()
    while _behind:
        _behind.pop().join()
