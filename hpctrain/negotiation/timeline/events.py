"""From what was recorded to trace events: one row per tensor, as Horovod's timeline has them."""

import enum
import json
import time
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from hpctrain.comm.communicator import Traffic


class What(enum.Enum):
    """What was recorded."""

    NEGOTIATE = "negotiate"
    READY = "ready"
    START = "start"
    PHASE = "phase"
    END = "end"
    """Of the innermost of the three above that is open."""
    CYCLE = "cycle"

    __hash__ = object.__hash__  # Enum's own is a function in Python


Record = tuple[int, What, str, Any, Any]
"""When in nanoseconds of ``time.perf_counter_ns``, what, name of the tensor, two details."""


class _Row(NamedTuple):
    """A tensor in the file."""

    number: int
    open: list[int]
    """When each slice that has not ended began, the outermost first."""


class Events:
    """Turns records into events; keeps which tensors there are and what of each is open."""

    def __init__(self, rank: int, size: int) -> None:
        self._origin_ns = time.perf_counter_ns()
        self._began_us = time.time_ns() // 1000
        self._rank, self._size = rank, size
        self._rows: dict[str, _Row] = {}

    def head(self) -> list[str]:
        """Return the events that a file begins with."""
        about = {
            "start_time_since_epoch_in_micros": self._began_us,
            "rank": self._rank,
            "size": self._size,
        }
        return [
            _metadata("process_name", 0, {"name": f"rank {self._rank}"} | about),
            _metadata("process_sort_index", 0, {"sort_index": 0}),
        ]

    def of(self, record: Record) -> Iterator[str]:
        """Return the events of one record."""
        when, what, name, first, second = record
        if what is What.CYCLE:
            yield f'{{"ph":"i","name":"CYCLE_START","s":"g",{self._place(when, 0)}}}'
            return
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = _Row(len(self._rows) + 1, [])
            yield _metadata("process_name", row.number, {"name": name})
            yield _metadata("process_sort_index", row.number, {"sort_index": row.number})
        place = self._place(when, row.number)
        if what is What.READY:
            yield f'{{"ph":"X","name":"{first}","cat":"RANK_READY","dur":0,{place}}}'
        elif what is What.END:
            yield from self._end(row, when, first)
        else:
            row.open.append(when)
            yield f'{{"ph":"B","name":{_title(what, first)},{place}{_size(second)}}}'

    def _end(self, row: _Row, when: int, moved: Traffic | None) -> Iterator[str]:
        if not row.open:
            return  # it began before the timeline did
        began = row.open.pop()
        place, args = self._place(when, row.number), ""
        if moved is not None and any(moved):
            args = (
                f',"args":{{"node_bytes":{moved.node_bytes},"rail_bytes":{moved.rail_bytes},'
                f'"waited_s":{moved.waited_s:.9f},"rail_s":{moved.rail_s:.9f}}}'
            )
            for title, start, nanoseconds in _parts(began, when, moved):
                inside = self._place(start, row.number)
                yield f'{{"ph":"X","name":"{title}","dur":{nanoseconds / 1000:.3f},{inside}}}'
        yield f'{{"ph":"E",{place}{args}}}'

    def _place(self, when: int, number: int) -> str:
        return f'"ts":{(when - self._origin_ns) / 1000:.3f},"pid":{number},"tid":0'


def _parts(began: int, ended: int, moved: Traffic) -> Iterator[tuple[str, int, int]]:
    """Divide a phase into what it waited, what its rail took and the rest.

    Their lengths are what was measured, all in all; that they follow each other is not: a phase
    may have many waits.
    """
    whole = ended - began
    waited = min(int(moved.waited_s * 1e9), whole)
    rail = min(int(moved.rail_s * 1e9), whole - waited)
    if not moved.node_bytes:
        rail = whole - waited if moved.rail_bytes else 0
    node = whole - waited - rail if moved.node_bytes else 0
    for title, length in (("WAIT", waited), ("RAIL", rail), ("NODE", node)):
        if length:
            yield title, began, length
        began += length


@cache
def _title(what: What, title: object) -> str:
    text = (title.name if isinstance(title, enum.Enum) else str(title)).upper()
    return json.dumps(f"NEGOTIATE_{text}" if what is What.NEGOTIATE else text)


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f',"args":{{"bytes":{num_bytes}}}'


def _metadata(name: str, number: int, args: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": number, "tid": 0, "args": args})
