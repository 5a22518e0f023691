"""Memory in huge pages: what is moved, and that a server has it moved."""

from __future__ import annotations

import gc

import pytest

from router import serve
from router.huge_pages import gather_in_huge_pages, huge_ranges

MIB = 1 << 20


def test_whole_huge_pages_of_the_heap_and_of_memory_without_a_name_are_gathered():
    maps = [
        "00100000-00500000 rw-p 00000000 00:00 0                                  [heap]",
        "10000000-10400000 rw-p 00000000 00:00 0 ",
        "20000000-203fffff rw-p 00000000 00:00 0 ",
        "30100000-302ff000 rw-p 00000000 00:00 0 ",  # no whole one
        "40000000-40400000 r--p 00000000 00:00 0 ",
        "50000000-50400000 rw-s 00000000 00:00 0 ",
        "60000000-60400000 rw-p 00000000 08:01 123                                /usr/lib/lib with a space.so",
        "70000000-70400000 rw-p 00000000 00:00 0                                  [stack]",
    ]
    assert list(huge_ranges(maps)) == [
        (2 * MIB, 4 * MIB),
        (0x10000000, 0x10400000),
        (0x20000000, 0x20200000),
    ]


def test_what_is_gathered_stays_what_it_is():
    kept = bytes(range(256)) * (8 * MIB // 256)
    copy = bytearray(kept)
    gather_in_huge_pages()
    assert copy == kept


async def test_a_server_has_what_it_holds_from_the_start_gathered_once_garbage_is_out(monkeypatch: pytest.MonkeyPatch):
    num_frozen: list[int] = []
    monkeypatch.setattr(serve, "gather_in_huge_pages", lambda: num_frozen.append(gc.get_freeze_count()))
    thresholds = gc.get_threshold()
    try:
        await serve.set_apart_what_stays()
        assert num_frozen[0] > 0
        assert len(num_frozen) == 1
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
