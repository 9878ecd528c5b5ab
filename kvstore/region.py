"""One buffer that several processes of a host see, and that is gone when the last of them lets go.

An anonymous memory file (memfd) has no name in any file system: nothing is left behind however a process ends,
and the size of /dev/shm does not matter. Others open it through the creator's /proc entry.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RegionAddress:
    """Where a region can be opened: on `host`, as descriptor `fd` of process `pid`."""

    host: str
    pid: int
    fd: int
    nbytes: int


class SharedRegion:
    """A shared, writable mapping. Keep the object for as long as views of `buffer` are used."""

    def __init__(self, buffer: mmap.mmap, address: RegionAddress) -> None:
        self.buffer = buffer
        self.address = address

    @classmethod
    def create(cls, nbytes: int) -> SharedRegion:
        """A new zeroed region; its pages take memory only once they are written."""
        fd = os.memfd_create("cosmoray-pool", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        return cls(mmap.mmap(fd, nbytes), RegionAddress(host_id(), os.getpid(), fd, nbytes))

    @classmethod
    def attach(cls, address: RegionAddress) -> SharedRegion:
        """Map the region of another process.

        Raises:
            OSError: it is on another host, its process is gone, or this user may not look into it.
        """
        if address.host != host_id():
            raise OSError(f"region is on host {address.host}, this is {host_id()}")
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(fd, address.nbytes), address)
        finally:
            os.close(fd)


def host_id() -> str:
    """Equal in two processes exactly when they run on one kernel and see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
