"""Deliberate bugs, one function each, that the simulator has to find: the proof that it looks.

A mutant is switched on for all daemons of a run. It is caught when a run of its scenario breaks a
promise within `seeds` seeds, and by one of the checkers that are named: a bug that is found only by
chance, by another one, is a promise that nobody guards.

A module has the bugs of one part of the system. `MUTANTS` has all of them, by name.
"""

from planting import MUTANTS as MUTANTS

from mutants import commits as commits
from mutants import coordinator as coordinator
from mutants import methods as methods
from mutants import recuts as recuts
from mutants import server as server
from mutants import shards as shards
from mutants import shared as shared
from mutants import split as split
from mutants import worker as worker
