"""The position of every key of a TOML text: `tomllib` does not report it, and errors need a line.

The text is known to be valid TOML, so this scanner only has to distinguish keys from values.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

KeyPath = tuple[str | int, ...]
PARTS_MAX = 32
"""Deeper keys count as their 32nd ancestor."""
PLACES_MAX = 50_000
"""The number of keys and array elements that are located: the first ones."""

# No group is possessive: Python before 3.11.5 (Debian 12 has 3.11.2) has a bug with such groups.
_TOKEN = re.compile(
    r'''(?P<space>[ \t\r]++|\#[^\n]*+)
      | (?P<text>"""(?:[^"\\]++|\\[\s\S]|"(?!""))*"{3,5} | \'\'\'[\s\S]*?'{3,5}
                | "(?:[^"\\\n]++|\\.)*" | '[^'\n]*+')
      | (?P<bare>[^\s\[\]{}=,"'#]++)
      | (?P<mark>[\n\[\]{}=,])''',
    re.VERBOSE,
)


def get(document: dict[str, Any], path: KeyPath) -> Any:
    """The value of a key; None if there is none."""
    value: Any = document
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class TextPlace(NamedTuple):
    """Part of a line: lines count from 1, columns from 0; `end` is exclusive."""

    line: int
    start: int
    end: int


class Spot(NamedTuple):
    """A key and its value's first token; headers have no value."""

    key: TextPlace
    value: TextPlace | None = None


def find_keys(text: str) -> dict[KeyPath, Spot]:
    """Path of every key and table of a valid TOML text -> where it is first written."""
    scanner = _Scanner()
    line, line_start = 1, 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if match.lastgroup != "space":
            start = match.start() - line_start
            scanner.take(
                token, match.lastgroup == "mark", TextPlace(line, start, start + len(token))
            )
        if "\n" in token:
            line += token.count("\n")
            line_start = match.start() + token.rindex("\n") + 1
    return scanner.found


class _Scanner:
    """Consumes tokens; tracks whether the next one belongs to a key, a header or a value."""

    def __init__(self) -> None:
        self.found: dict[KeyPath, Spot] = {}
        self._table: KeyPath = ()
        self._counts: dict[KeyPath, int] = {}
        """Array of tables -> index of its last element."""
        self._open: list[tuple[str, KeyPath]] = []
        """Open brackets of the value, and the key that each belongs to."""
        self._new_statement()

    def _new_statement(self) -> None:
        self._parts: list[str] = []
        self._place: TextPlace | None = None
        """The position of the key that is being read."""
        self._header = ""
        self._owner: KeyPath | None = None
        """The key whose value follows; None while a key is read."""

    def take(self, word: str, is_mark: bool, place: TextPlace) -> None:
        if word == "\n" and is_mark:
            if not self._open:
                self._new_statement()
        elif self._owner is not None:
            self._take_value(word, is_mark, place)
        elif not is_mark:
            self._take_key_part(word, place)
        elif word == "=":
            base = self._open[-1][1] if self._open else self._table
            self._owner = self._record(base)
        elif word == "[":
            self._header += "["
        elif word == "]" and self._parts:
            self._end_header()
        elif word == "}" and self._open:
            self._owner = self._open.pop()[1]

    def _take_key_part(self, word: str, place: TextPlace) -> None:
        quoted = word[0] in "\"'"
        parts = [_unquote(word)] if quoted else [part for part in word.split(".") if part]
        self._parts = (self._parts + parts)[:PARTS_MAX]
        self._place = self._place._replace(end=place.end) if self._place else place

    def _record(self, base: KeyPath) -> KeyPath:
        """Record the position of the key that was just read, and of the tables that it implies."""
        path = base
        for number, part in enumerate(self._parts, 1):
            path = (*path, part)
            self._note(path)
            if path in self._counts and number < len(self._parts):
                path = (*path, self._counts[path])
        return path

    def _note(self, path: KeyPath) -> None:
        if self._place and len(self.found) < PLACES_MAX:
            self.found.setdefault(path, Spot(self._place))

    def _end_header(self) -> None:
        self._table = self._record(())
        if self._header == "[[":
            self._counts[self._table] = self._counts.get(self._table, -1) + 1
            self._table = (*self._table, self._counts[self._table])
            self._note(self._table)
        self._parts = []

    def _take_value(self, word: str, is_mark: bool, place: TextPlace) -> None:
        owner = self._owner or ()
        spot = self.found.get(owner)
        if spot is None:
            if len(self.found) < PLACES_MAX:
                self.found[owner] = Spot(place, place)
        elif spot.value is None and not (is_mark and word in "]},"):
            self.found[owner] = spot._replace(value=place)
        if not is_mark:
            return
        if word in "[{":
            self._open.append((word, owner))
            self._owner = (*owner, 0) if word == "[" else None
            self._parts, self._place = [], None
        elif word in "]}" and self._open:
            self._owner = self._open.pop()[1]
        elif word == "," and self._open:
            self._next_element(owner)

    def _next_element(self, owner: KeyPath) -> None:
        bracket, base = self._open[-1]
        if bracket == "{":
            self._owner, self._parts, self._place = None, [], None
        else:
            self._owner = (*base, int(owner[-1]) + 1)


def _unquote(word: str) -> str:
    """The text of a quoted key. Keys with escapes do not occur in job files; they stay escaped."""
    return word[1:-1]
