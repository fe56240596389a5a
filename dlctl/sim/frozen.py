"""A replica's frozen parameters, as `daemons/worker/frozen_parameters.py` keeps, writes and loads
them."""

from __future__ import annotations

from dlctl.model import frozen
from dlctl.roles.protocol.effects import FrozenLoaded, FrozenWritten, LoadFrozen, WriteFrozen
from dlctl.roles.protocol.files import FilesMissing, WantedFile
from dlctl.sim.arrays import LOAD_S, FilesDriver
from dlctl.sim.hostfiles import sha256
from dlctl.sim.objectives import HasFrozen, Objective
from dlctl.sim.process import Process
from dlctl.util.names import HOME_AGENT


class FrozenDriver:
    def __init__(self, process: Process, objective: Objective, files: FilesDriver) -> None:
        self.process = process
        self.objective = objective
        self.files = files
        self.values: list[bytes] = []
        """The bytes of each frozen parameter in the model."""
        process.perform(WriteFrozen, self._write)
        process.perform(LoadFrozen, self._load)

    def build(self, slot: int) -> bytes:
        """The digests of the frozen parameters of this slot's model()."""
        if isinstance(self.objective, HasFrozen):
            self.values = self.objective.frozen(slot)
        return self._digests()

    def _digests(self) -> bytes:
        return b"".join(map(frozen.digest, self.values))

    def _write(self, effect: WriteFrozen) -> None:
        plan = frozen.plan(self.objective.layout)
        content = b"".join([plan.head, *(self.values[n] for n in plan.order)])

        def done() -> None:
            if error := self.files.disk.error():
                self.process.post(FrozenWritten(effect.file, "", 0, error))
                return
            is_home = self.process.agent == HOME_AGENT
            hosts, store = self.files.hosts, self.files.store
            here = store.frozen if is_home else hosts.of(self.process.agent)
            here[effect.file] = content
            self.process.post(FrozenWritten(effect.file, sha256(content), len(content), ""))

        takes_s = self.files.disk.takes_s(self.process.name)
        self.process.timeline.after(takes_s, lambda: done() if self.process.alive else None)

    def _load(self, effect: LoadFrozen) -> None:
        layout = self.objective.layout
        file, plan = frozen.run_file(layout, effect.digests), frozen.plan(layout)
        others = frozen.differing(self._digests(), effect.digests)
        content = self.files.read(file)
        if content is None:
            wanted = WantedFile(file, plan.nbytes, "", plan.ranges(others))
            self.process.post(FilesMissing((wanted,)), LOAD_S)
            return
        for n in others:
            lo, hi = plan.places[n]
            self.values[n] = content[lo:hi]
        assert self._digests() == effect.digests, "these are not the run's frozen parameters"
        self.process.post(FrozenLoaded(), LOAD_S)
