"""What a process has open, to count what a step opens."""

import contextlib
import os


def open_links(*kinds: str) -> set[str]:
    """Return the sockets and pipes of this process by kind and inode, of these ``kinds`` ("socket", "pipe").

    Compare sets, not their sizes: the garbage collector may close meanwhile what other tests of this process have left.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {link for link in found if link.startswith(tuple(f"{kind}:" for kind in kinds))}
