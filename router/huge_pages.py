"""Has the kernel keep what a process holds in huge pages: objects of Python lie scattered, and to find the page of each
takes as long as to read it, above all on virtual machines.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path

_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
"""Of Linux 6.1: gather pages now, and leave what comes later as it is. Python's `mmap` does not know it."""
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def gather_in_huge_pages() -> None:
    """Move the memory that this process has by now into huge pages, as far as there are any.

    Takes up to a second, in which other threads go on, and some 15 MB. Does nothing where the kernel cannot do it or is
    set never to.
    """
    with contextlib.suppress(OSError, AttributeError):
        if "[never]" in _SETTING.read_text():
            return
        madvise = ctypes.CDLL(None).madvise
        for start, end in huge_ranges(Path("/proc/self/maps").read_text().splitlines()):
            # What it cannot move stays where it is.
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)


def huge_ranges(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """The whole huge pages within the heap and other private memory that is no file's, as first bytes and ends."""
    for line in maps:
        span, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode == "rw-p" and inode == "0" and (not name or name[0] == "[heap]"):
            start, end = (int(bound, 16) for bound in span.split("-"))
            start, end = start + -start % _HUGE_PAGE_BYTES, end - end % _HUGE_PAGE_BYTES
            if start < end:
                yield start, end
