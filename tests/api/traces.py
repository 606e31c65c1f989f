"""Reads a trace file as a viewer would, and refuses what viewers refuse or draw wrongly.

The rules are those of the JSON trace event format: which keys each kind of event must have, that
slices of one track lie inside one another or apart, and that an arrow begins and ends in a slice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

KEYS = {
    "X": {"name", "cat", "ts", "dur", "args"},
    "M": {"name", "args"},
    "s": {"name", "cat", "id", "ts"},
    "f": {"name", "cat", "id", "ts", "bp"},
}


class Trace:
    """A trace that was checked: lives by end, their phases, the waits, and the arrows."""

    def __init__(self, path: Path) -> None:
        document = json.loads(path.read_text(encoding="utf-8"))
        self.about: list[dict[str, Any]] = document["otherData"]["asyncvmm"]
        self.events: list[dict[str, Any]] = document["traceEvents"]
        self.ends: dict[int, str] = {}
        self.lives: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.phases: dict[int, list[str]] = {}  # of a life, by its place in events
        self.waits = 0
        self.arrows: list[tuple[str, str, float]] = []
        """(from which end, to which, microseconds)"""
        tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for event in self.events:
            assert KEYS[event["ph"]] | {"ph", "pid", "tid"} == event.keys(), event
            assert isinstance(event["pid"], int), event
            assert isinstance(event["tid"], int), event
            if event["ph"] == "X":
                assert event["ts"] > 0, event
                assert event["dur"] >= 0, event
                tracks[event["pid"], event["tid"]].append(event)
            elif event["name"] == "process_name":
                self.ends[event["pid"]] = event["args"]["name"].split(", pid")[0]
        for track in tracks.values():
            self._read_track(track)
        self._read_arrows(tracks)

    def _read_track(self, track: list[dict[str, Any]]) -> None:
        """Split a track into lives and their phases, which fill them without a gap."""
        if track[0]["name"] == "wait":
            self.waits += len(track)
            self._check_apart(track)
            return
        lives = [event for event in track if event["args"]]
        self._check_apart(lives)
        for life in lives:
            inside = [
                event
                for event in track
                if not event["args"] and _begin(life) <= event["ts"] and _end(event) <= _end(life)
            ]
            assert inside, life
            assert _begin(inside[0]) == _begin(life)
            assert _end(inside[-1]) == _end(life)
            for one, other in pairwise(inside):
                assert abs(_end(one) - _begin(other)) < 0.01, (one, other)
            self.phases[id(life)] = [event["name"] for event in inside]
            self.lives[self.ends[life["pid"]]].append(life)

    def _check_apart(self, slices: list[dict[str, Any]]) -> None:
        slices.sort(key=_begin)
        for one, other in pairwise(slices):
            assert _end(one) <= _begin(other), (one, other)

    def _read_arrows(self, tracks: dict[tuple[int, int], list[dict[str, Any]]]) -> None:
        starts: dict[int, dict[str, Any]] = {}
        for event in self.events:
            if event["ph"] in "sf":
                slices = tracks[event["pid"], event["tid"]]
                assert any(_begin(s) <= event["ts"] <= _end(s) for s in slices), event
            if event["ph"] == "s":
                assert event["id"] not in starts, "two arrows begin with one id"
                assert event["id"] < 2**53, event
                starts[event["id"]] = event
        seen = set[int]()
        for event in self.events:
            if event["ph"] != "f" or event["id"] not in starts:
                continue
            assert event["id"] not in seen, "an arrow ends twice"
            seen.add(event["id"])
            start = starts[event["id"]]
            self.arrows.append(
                (self.ends[start["pid"]], self.ends[event["pid"]], event["ts"] - start["ts"])
            )


def _begin(event: dict[str, Any]) -> float:
    return float(event["ts"])


def _end(event: dict[str, Any]) -> float:
    """Return when a slice is over, to the nanosecond that a float of microseconds can tell."""
    return round(float(event["ts"] + event["dur"]), 3)
