"""The descriptors that are kept for one rank while its daemon comes and goes."""

import os

# Two generations of 4,096 descriptors each, and a few more.
MAX_STORED = 8448
# execve(2) takes at most 128 KiB for one variable, and LISTEN_FDNAMES= must name them all.
MAX_NAMES_BYTES = 120 * 1024


class DescriptorStore:
    """Owns what it holds. Like systemd's, except that it never polls a descriptor for its end."""

    def __init__(self, limit: int = MAX_STORED) -> None:
        self._limit = limit
        self._names: dict[int, str] = {}
        self._by_name: dict[str, list[int]] = {}
        self._names_bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def in_order(self) -> list[tuple[int, str]]:
        """(descriptor, name), by descriptor."""
        return sorted(self._names.items())

    def add(self, name: str, fd: int) -> str:
        """Takes ``fd`` over; returns why it was closed instead, or an empty string.

        The same file under the same name is a repetition and takes the older one's place.
        """
        status = os.fstat(fd)
        for other in list(self._by_name.get(name, ())):
            if os.path.samestat(status, os.fstat(other)):
                self._drop(other)
        if len(self._names) >= self._limit:
            os.close(fd)
            return f"{self._limit} descriptors are stored, more are not taken"
        if self._names_bytes + len(name) + 1 > MAX_NAMES_BYTES:
            os.close(fd)
            return "the names of the stored descriptors are too long together"
        self._names[fd] = name
        self._by_name.setdefault(name, []).append(fd)
        self._names_bytes += len(name) + 1
        return ""

    def remove(self, name: str) -> int:
        """Closes every descriptor of that name; returns how many there were."""
        found = list(self._by_name.get(name, ()))
        for fd in found:
            self._drop(fd)
        return len(found)

    def clear(self) -> int:
        """Closes them all; returns how many there were."""
        count = len(self._names)
        for fd in list(self._names):
            self._drop(fd)
        return count

    def _drop(self, fd: int) -> None:
        name = self._names.pop(fd)
        self._names_bytes -= len(name) + 1
        alike = self._by_name[name]
        alike.remove(fd)
        if not alike:
            del self._by_name[name]
        os.close(fd)
