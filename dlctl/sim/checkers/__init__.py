"""The invariants of every run, whatever faults it has. A checker observes and raises.

One invariant per file: `ledger` (nothing acknowledged is lost or applied twice), `acks` (no ack
before its push would survive), `durable` (nobody sees a version that would not survive), `bases`
(journals are started over, and not too often), `terms` (the fencing tokens), `samples` (every
sample, one living holder), `staleness` (as reported), `clock` (its bound with a barrier), `fetches`
(a model equals the shard), `liveness` (the run makes progress after all faults), `own_steps` (local
SGD loses none of its steps), `tables` (those beside the parameters), `quorum` (all shards make a
step with the same pushes), `norms` (they clip by the same norm), `streams` (every sample of a
stream once), `recuts` (exactly once while the model is cut anew), `totals` (the samples that the
shards count), `leftovers`. Two are shared: `book` records the workers' pushes, `versions` what
servers were at the versions that they answer with.
"""

from dlctl.sim.checkers.acks import AcksChecker
from dlctl.sim.checkers.base import Checker, PromiseBroken
from dlctl.sim.checkers.bases import BasesChecker
from dlctl.sim.checkers.book import Book
from dlctl.sim.checkers.clock import ClockChecker
from dlctl.sim.checkers.durable import DurableChecker
from dlctl.sim.checkers.fetches import FetchesChecker
from dlctl.sim.checkers.ledger import LedgerChecker
from dlctl.sim.checkers.leftovers import NothingLeft
from dlctl.sim.checkers.liveness import LivenessChecker
from dlctl.sim.checkers.norms import NormChecker
from dlctl.sim.checkers.own_steps import OwnStepsChecker
from dlctl.sim.checkers.quorum import QuorumChecker
from dlctl.sim.checkers.recuts import GlobalBook, RecutChecker
from dlctl.sim.checkers.samples import LeasesChecker, SamplesChecker
from dlctl.sim.checkers.saved import SavedChecker
from dlctl.sim.checkers.staleness import StalenessChecker
from dlctl.sim.checkers.streams import StreamChecker
from dlctl.sim.checkers.tables import (
    AnswersChecker,
    BufferedChecker,
    GroupChecker,
    LeadChecker,
    TablesChecker,
)
from dlctl.sim.checkers.terms import TermsChecker
from dlctl.sim.checkers.totals import TotalsChecker

__all__ = [
    "AcksChecker",
    "AnswersChecker",
    "BasesChecker",
    "Book",
    "BufferedChecker",
    "Checker",
    "ClockChecker",
    "DurableChecker",
    "FetchesChecker",
    "GlobalBook",
    "GroupChecker",
    "LeadChecker",
    "LeasesChecker",
    "LedgerChecker",
    "LivenessChecker",
    "NormChecker",
    "NothingLeft",
    "OwnStepsChecker",
    "PromiseBroken",
    "QuorumChecker",
    "RecutChecker",
    "SamplesChecker",
    "SavedChecker",
    "StalenessChecker",
    "StreamChecker",
    "TablesChecker",
    "TermsChecker",
    "TotalsChecker",
]
