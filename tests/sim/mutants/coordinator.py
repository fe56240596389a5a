"""Bugs of the coordinator: leases, epochs, what is on record, decisions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from planting import Patch, mutant

from dlctl.roles.coordinator.coordinator import Coordinator
from dlctl.roles.coordinator.persistence import Lasting
from dlctl.roles.coordinator.pools.data_pool import Range
from dlctl.roles.coordinator.pools.holders import Holders
from dlctl.roles.coordinator.pools.portions import PortionPool
from dlctl.roles.coordinator.pools.streams import StreamPool
from dlctl.roles.coordinator.records import IssueTerm
from dlctl.roles.coordinator.shutdown import RunShutdown
from dlctl.roles.coordinator.supervision.failure_detector import FailureDetector
from dlctl.roles.coordinator.supervision.groups import Groups
from dlctl.roles.coordinator.supervision.registration import Registration
from dlctl.roles.coordinator.supervision.scaling import Scaling
from dlctl.roles.coordinator.training import quorum
from dlctl.roles.coordinator.training.driven import DrivenMethod
from dlctl.roles.coordinator.training.lead import MethodLead
from dlctl.roles.coordinator.training.leases import Leases
from dlctl.roles.coordinator.training.norms import Norms
from dlctl.roles.coordinator.training.quorum import Quorums
from dlctl.roles.coordinator.training.supply import DataSupply
from dlctl.runs.terms import TermLog
from dlctl.util import listing
from dlctl.wire import messages as m


@mutant(
    "a request leaves before the result it follows from is on record", "SameResult",
    scenario="sandblaster", first=22,
)  # fmt: skip
def the_journal_is_behind(patch: Patch) -> None:
    honest = DrivenMethod.to_json

    def to_json(self):
        journal = honest(self)
        return journal | {"results": journal["results"][:-1]}

    patch.setattr(DrivenMethod, "to_json", to_json)


@mutant(
    "a portion of the dead goes to nobody, although another one has a backup copy of it",
    "LivenessChecker", scenario="sandblaster", first=12,
)  # fmt: skip
def copies_die_with_the_original(patch: Patch) -> None:
    honest = Holders.give_back

    def give_back(self, slot):
        copied = [
            key for key, owner in self.leased.items() if owner == slot and self.is_copied(key)
        ]
        back = honest(self, slot)
        for key in copied:
            self.forget(key)
        return back

    patch.setattr(Holders, "give_back", give_back)


@mutant("a slot's term is not raised for its next worker", "TermsChecker")
def term_is_not_raised(patch: Patch) -> None:
    def issue_term(self, daemon):
        if daemon.role != "agent":
            daemon.term = self._terms.setdefault(daemon.name, 1)
            self.context.do(IssueTerm(daemon.name, daemon.term))

    patch.setattr(Registration, "_issue_term", issue_term)


@mutant("a term is given out before it is on record", "TermsChecker")
def term_is_not_recorded(patch: Patch) -> None:
    def issue_term(self, daemon):
        if daemon.role != "agent":
            daemon.term = self._terms[daemon.name] = self._terms.get(daemon.name, 0) + 1

    patch.setattr(Registration, "_issue_term", issue_term)


@mutant(
    "a term is given out before it is on the disk", "TermsChecker", scenario="recovery", seeds=20
)
def term_is_not_synced(patch: Patch) -> None:
    honest = TermLog.append

    def append(self):
        file = self._file
        self._file = SimpleNamespace(
            write=file.write, write_again=file.write_again, sync=lambda: None
        )
        honest(self)
        self._file = file

    patch.setattr(TermLog, "append", append)


@mutant("a portion that is leased is given to another worker, too", "LeasesChecker")
def leased_twice(patch: Patch) -> None:
    honest = PortionPool.take

    def take(self, slot, now):
        for key, owner in self.holders.leased.items():
            if owner != slot and sum(key) % 3 == 1:
                return Range(*key, *self.bounds(key[1]))
        return honest(self, slot, now)

    patch.setattr(PortionPool, "take", take)


@mutant("what a dead worker had of a stream counts as done", "StreamChecker", scenario="streams")
def dead_is_done(patch: Patch) -> None:
    honest = StreamPool.give_back

    def give_back(self, slot, *, lives=False):
        for key in honest(self, slot, lives=lives):
            self.finish(*key, 0.0)
        return []

    patch.setattr(StreamPool, "give_back", give_back)


@mutant(
    "a portion that is done is leased again when its worker dies",
    "LeasesChecker",
    seeds=30,
    first=1,
)
def done_is_leased_again(patch: Patch) -> None:
    honest = PortionPool.give_back

    def give_back(self, slot, *, lives=False):
        done = [(epoch, p) for epoch in sorted(self._done) for p in sorted(self._done[epoch])]
        self.holders.put_back(done[-1:])
        return honest(self, slot, lives=lives)

    patch.setattr(PortionPool, "give_back", give_back)


@mutant("the portions of the dead are forgotten", "LivenessChecker", first=1)
def portions_of_the_dead(patch: Patch) -> None:
    patch.setattr(Leases, "gone", lambda self, slot, now: 0)


@mutant("a portion that was given back counts as done", "SamplesChecker", seeds=30, first=4)
def given_back_is_done(patch: Patch) -> None:
    def give_back(self, slot, *, lives=False):
        back = sorted(key for key, owner in self.holders.leased.items() if owner == slot)
        for key in back:
            self.finish(*key, 0.0)
        return []

    patch.setattr(PortionPool, "give_back", give_back)


@mutant(
    "the coordinator remembers no portion", "LeasesChecker", "LivenessChecker",
    scenario="recovery", seeds=20,
)  # fmt: skip
def portions_are_not_remembered(patch: Patch) -> None:
    patch.setattr(DataSupply, "changed_portions", lambda self: iter(()))


@mutant(
    "the coordinator remembers no term that it has given out", "TermsChecker", "LivenessChecker",
    scenario="recovery", seeds=20,
)  # fmt: skip
def terms_are_not_remembered(patch: Patch) -> None:
    honest = Registration.__init__

    def begin(self, run, past):
        honest(self, run, replace(past, terms={}))

    patch.setattr(Registration, "__init__", begin)


@mutant(
    "a server that comes back has the term of the one before it", "TermsChecker", "Book",
    "LivenessChecker", scenario="recovery", seeds=20,
)  # fmt: skip
def shard_term_is_not_raised(patch: Patch) -> None:
    honest = Registration._issue_term

    def issue_term(self, daemon):
        if daemon.role == "server":
            self._terms.pop(daemon.name, None)
        honest(self, daemon)

    patch.setattr(Registration, "_issue_term", issue_term)


@mutant(
    "workers begin although it is not on record that all have come", "FullAtRelease",
    scenario="full-disks", seeds=10, first=3,
)  # fmt: skip
def training_before_the_release_is_on_record(patch: Patch) -> None:
    honest = Lasting.may_leave
    patch.setattr(
        Lasting,
        "may_leave",
        lambda self, message: isinstance(message, m.Lease) or honest(self, message),
    )


@mutant(
    "servers remove what they have kept although it is not on record that the run is over",
    "FullAtEnd", "Outcome", scenario="full-disks", seeds=9, first=6,
)  # fmt: skip
def end_is_not_on_record(patch: Patch) -> None:
    """The next coordinator goes on with the run, and needs it."""
    patch.setattr(RunShutdown, "_unrecorded", lambda self: [])


@mutant(
    "a worker that has drained for a coordinator that nobody remembers is waited for",
    "LivenessChecker", scenario="full-disks", seeds=10, first=1,
)  # fmt: skip
def drained_for_nobody(patch: Patch) -> None:
    honest = Scaling.on_drained

    def on_drained(self, worker, now):
        if worker.leaving:
            honest(self, worker, now)

    patch.setattr(Scaling, "on_drained", on_drained)


@mutant(
    "a run that has noted no portion yet saves nothing when it is stopped", "SavedChecker",
    scenario="stops", first=2,
)  # fmt: skip
def nothing_noted_nothing_saved(patch: Patch) -> None:
    honest = Coordinator.begin_checkpoint

    def begin_checkpoint(self, now, listener=None):
        if self.run.shutdown is None or self.progress.steps:
            honest(self, now, listener)

    patch.setattr(Coordinator, "begin_checkpoint", begin_checkpoint)


@mutant(
    "a group that has lost its model tries for ever", "LivenessChecker", scenario="toys",
    first=528, seeds=1,
)  # fmt: skip
def a_lost_model_is_waited_for(patch: Patch) -> None:
    patch.setattr(Groups, "_lose_model", lambda self, now: None)


@mutant(
    "a dead member is counted in the group", "LivenessChecker", scenario="toys", first=3, seeds=20
)
def the_dead_are_counted(patch: Patch) -> None:
    def wanted(self):
        return tuple((d.index, d.term) for d in self.run.members.of_role("worker"))

    patch.setattr(Groups, "_wanted", wanted)


@mutant(
    "the clock of the lead begins anew with its coordinator", "LeadChecker", scenario="toys",
    first=25,
)  # fmt: skip
def the_lead_forgets_its_clock(patch: Patch) -> None:
    def resume(self, lead):
        self.side.resume(lead.state)

    patch.setattr(MethodLead, "_resume", resume)


@mutant(
    "the next step is decided while a shard has not made this one", "QuorumChecker",
    scenario="toys", first=5, seeds=1,
)  # fmt: skip
def the_next_step_is_decided_too_early(patch: Patch) -> None:
    patch.setattr(Quorums, "_is_under_way", lambda self, known: False)


@mutant(
    "a lead is told that it has waited although it has not", "QuorumChecker", scenario="toys",
    first=11, seeds=1,
)  # fmt: skip
def the_lead_does_not_wait(patch: Patch) -> None:
    patch.setattr(quorum, "ROUNDING_S", 3600.0)


@mutant(
    "a decision is forgotten with its coordinator", "LivenessChecker", "QuorumChecker",
    scenario="toys", first=209, seeds=1,
)  # fmt: skip
def a_decision_is_forgotten(patch: Patch) -> None:
    patch.setattr(Quorums, "recall", lambda self, memory, now: None)


@mutant(
    "the norm that some shards have clipped by is forgotten with its coordinator", "NormChecker",
    scenario="sync-recovery", first=141, seeds=1,
)  # fmt: skip
def a_norm_is_forgotten(patch: Patch) -> None:
    patch.setattr(Norms, "recall", lambda self, memory, now: None)


@mutant(
    "shards have the numbers of their places in the list of each worker", "StreamChecker",
    scenario="streams",
)  # fmt: skip
def shards_are_numbered_as_listed(patch: Patch) -> None:
    patch.setattr(listing, "numbers", lambda names: list(range(len(names))))


@mutant("an error of one worker ends the run of all", "Outcome", scenario="liars", seeds=1)
def one_worker_fails_for_all(patch: Patch) -> None:
    def fail(self, worker, error, now, detail=""):
        self.control.end("failed", f"{worker.name}: {error}", now)

    patch.setattr(FailureDetector, "fail", fail)


@mutant(
    "a worker is believed about where the shards of a stream end that it does not read",
    "Outcome", scenario="liars", first=74, seeds=1,
)  # fmt: skip
def anybody_ends_a_stream(patch: Patch) -> None:
    patch.setattr(StreamPool, "on_end", lambda self, slot, *end: self.ended(*end))


@mutant(
    "one member of a group is believed that no other has the model", "GroupChecker",
    scenario="liars", first=46, seeds=1,
)  # fmt: skip
def one_member_loses_the_model(patch: Patch) -> None:
    honest = Groups.on_broken

    def on_broken(self, peer, message, now):
        if message.why == m.MODEL_LOST and message.generation == self.generation:
            self._lose_model(now)
        honest(self, peer, message, now)

    patch.setattr(Groups, "on_broken", on_broken)


@mutant(
    "what a guest had when it was taken for gone is leased to nobody",
    "LivenessChecker", scenario="joins", first=3,
)  # fmt: skip
def guests_keep_their_portions(patch: Patch) -> None:
    honest = Leases.gone

    def gone(self, slot, now):
        worker = self.run.members.get(f"worker-{slot}")
        return 0 if worker is not None and worker.key else honest(self, slot, now)

    patch.setattr(Leases, "gone", gone)
