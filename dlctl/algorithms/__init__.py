"""What methods are made of: the seam to the roles, and the parts that several methods share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlctl import outdated

if not TYPE_CHECKING:
    __getattr__ = outdated.names_of(__name__)
