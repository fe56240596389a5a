"""The methods: one file each, with its sides for worker, server and coordinator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl import outdated

if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
