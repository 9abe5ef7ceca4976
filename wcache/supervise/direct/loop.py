"""One selector and what is done when a descriptor has something to say."""

import selectors
from collections.abc import Callable


class Loop:
    """Descriptors and their actions; an action may add and remove descriptors, its own too."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._actions: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, action: Callable[[], None], *, write: bool = False) -> None:
        """Calls ``action`` when ``fd`` can be read or, with ``write``, written. Once per fd."""
        self._selector.register(fd, _events(write), action)
        self._actions[fd] = action

    def watch_writing(self, fd: int, write: bool) -> None:
        self._selector.modify(fd, _events(write), self._actions[fd])

    def unwatch(self, fd: int) -> None:
        """Before ``fd`` is closed; one that is not watched is passed over."""
        if self._actions.pop(fd, None):
            self._selector.unregister(fd)

    def step(self, timeout_s: float) -> None:
        """Waits for at most ``timeout_s`` and acts on what happened."""
        for key, _ in self._selector.select(timeout_s):
            # An action before this one may have closed the descriptor, or its number may already
            # be another's.
            action = self._actions.get(key.fd)
            if action is not None and action is key.data:
                action()

    def close(self) -> None:
        self._selector.close()


def _events(write: bool) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if write else 0)
