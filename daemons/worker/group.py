"""The threads of a worker's group: sums over all replicas, by torch.distributed's gloo.

A group is made anew for each generation, in the same process and as often as members come and go,
so it is no global one of torch's. Its traffic is neither encrypted nor authenticated.

Nothing can interrupt a collective of gloo's, and a store whose process stands still answers never:
so every generation has a thread of its own, which is left to itself when the next one begins. Its
last operation ends with its timeout, or when the connections do. What lasts for as long as the
slowest member computes is therefore none of gloo's operations: members wait for each other at the
store, each for an answer of its own, which is written by the one that comes last, or from here by
a second thread, when the generation is given up.

A gradient may be summed while it is computed (`early_sum.py`), in the thread that computes. These
operations do last until the slowest member has come to its own, without a limit. They are waited
for when all have come, and end with the connections of those that have another generation.
"""

from __future__ import annotations

import json
import logging
import queue
import socket
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from daemons.loop import Loop
from daemons.process import in_words
from dlctl import messages as m
from dlctl.errors import DlctlError
from dlctl.machine import Event
from dlctl.messages import Array
from dlctl.roles.protocol.effects import (
    GroupFailed,
    GroupJoined,
    GroupWaits,
    JoinGroup,
    LeaveGroup,
    OpenStore,
    Reduce,
    Reduced,
    StoreOpened,
    TaskFailed,
)
from dlctl.roles.worker.services.sums import (
    Claim,
    ModelLost,
    Plan,
    Records,
    Row,
    plan_of,
    row_of,
)

if TYPE_CHECKING:
    from daemons.worker.early_sum import EarlySum

log = logging.getLogger("dlctl")

WORD_S = 1.0
"""Between two words about whom we wait for."""
STORE_S = 10.0
"""For a single answer of the store, before it is known how long a member may be silent."""
NEVER = timedelta(days=7)
"""For a wait that has no limit: it is begun again then."""
GIVEN_UP = "given up"
"""The answer that a member gives itself."""
STORES_KEPT = 2
"""An old one may still be looked at by those who do not know of the new one."""


class _GivenUp(Exception):
    """There is another generation."""


class GroupThread:
    """What the loop talks to; everything is answered by an event."""

    def __init__(self, loop: Loop, host: str) -> None:
        """host: this machine's address, by which the other members reach it."""
        self.host = host
        self._loop = loop
        self._lock = threading.Lock()
        """Held while the records change, and while generations do."""
        self._records = Records()
        self._member: _Member | None = None
        self._stores: list[Any] = []

    # ------------------------------------------------------------ from the loop's thread

    def open(self, effect: OpenStore) -> None:
        self._of(effect.generation).do(lambda member: member.open())

    def join(self, effect: JoinGroup) -> None:
        self._of(effect.generation).do(lambda member: member.join(effect))

    def reduce(self, effect: Reduce) -> None:
        member = self._member
        if member is None or member.generation != effect.generation or member.has_failed:
            self._loop.post(GroupFailed(effect.generation, "the group is not there any more"))
        else:
            member.do(lambda member: member.reduce(effect))

    def leave(self, effect: LeaveGroup) -> None:
        with self._lock:
            if self._member is not None:
                self._member.end()
            self._member = None

    def _of(self, generation: int) -> _Member:
        """The thread of this generation; all before it are left to themselves."""
        with self._lock:
            if self._member is None or self._member.generation != generation:
                if self._member is not None:
                    self._member.end()
                self._member = _Member(self, generation)
            return self._member

    # ------------------------------------------------------------ from the thread that computes

    def begin_sum(self, size: int, weight: float) -> EarlySum | None:
        """Of the gradient that is computed next, float32[size]; None: there is nobody else."""
        member = self._member
        return None if member is None else member.begin_sum(size, weight)

    # ------------------------------------------------------------ from the threads

    def is_current(self, member: _Member) -> bool:
        return self._member is member

    def post(self, member: _Member, event: Event) -> None:
        with self._lock:
            if self.is_current(member):
                self._loop.post(event)

    def fail(self, member: _Member, error: DlctlError) -> None:
        if self.is_current(member):
            self._loop.fail(error)

    def keep_store(self, store: Any) -> None:
        with self._lock:
            self._stores = [*self._stores[1 - STORES_KEPT :], store]

    def claim(self) -> Claim:
        with self._lock:
            return self._records.claim()

    def agree(self, member: _Member, claims: list[Claim]) -> None:
        """Raises DlctlError if the others have gone on without this replica."""
        with self._lock:
            self._check(member)
            agreed = self._records.agree(claims)
            # Posted while nobody can take up the next generation: its claim says that it is known.
            self._loop.post(GroupJoined(member.generation, *agreed))

    def keep(self, member: _Member, result: Reduced) -> None:
        with self._lock:
            self._check(member)
            self._records.keep(result)

    def hand_out(self, member: _Member) -> None:
        with self._lock:
            self._check(member)
            self._loop.offer(self._records.hand_out())

    def _check(self, member: _Member) -> None:
        if not self.is_current(member):
            raise _GivenUp


class _Member:
    """This replica in one generation of the group, with a thread of its own."""

    def __init__(self, owner: GroupThread, generation: int) -> None:
        self.generation = generation
        self.has_failed = self._is_made = False
        self._owner = owner
        self._store: Any = None
        self._group: Any = None
        self._rank = self._size = 0
        self._timeout_s = STORE_S
        self._sums = 0
        """That were begun in this generation."""
        self._early: EarlySum | None = None
        """What is begun of the next one."""
        self._memory: Any = None
        """float32[d], for sums that begin early; of this generation alone, as those of an older one
        may still write to theirs.
        """
        self._in_group = threading.Lock()
        """Held by the thread that computes while it uses the group: who lets go of it as the last
        one waits for all that it does.
        """
        self._waits: tuple[str, int] | None = None
        """For what, for the how manieth time, this member waits at the store."""
        self._has_answer = False
        self._is_over = threading.Event()
        self._work: queue.SimpleQueue[Callable[[_Member], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"group-{generation}", daemon=True).start()

    def do(self, work: Callable[[_Member], None]) -> None:
        self._work.put(work)

    def end(self) -> None:
        """There is another generation, or none."""
        self._is_over.set()
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work(self)
            except _GivenUp:
                break
            except ModelLost as error:
                self._fail(error.message, m.MODEL_LOST)
                break
            except DlctlError as error:
                self._owner.fail(self, error)
                break
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                why = "" if self._is_made else m.UNMADE
                self._fail(f"{type(error).__name__}: {first}", why)
                break
        # Others learn from closed connections, at once, that there is nobody here any more.
        with self._in_group:
            group, early = self._group, self._early
            self._group = self._store = self._early = None
        if early is not None:
            early.let_go()
        del group

    def _fail(self, reason: str, why: str) -> None:
        self.has_failed = True
        self._owner.post(self, GroupFailed(self.generation, reason, why))

    # ------------------------------------------------------------ the effects

    def open(self) -> None:
        dist = _torch()
        # Without a socket of ours it would listen on all of this machine's addresses.
        family = socket.AF_INET6 if ":" in self._owner.host else socket.AF_INET
        listener = socket.create_server((self._owner.host, 0), family=family)
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            self._owner.host, port, None, True, timedelta(seconds=STORE_S),
            wait_for_workers=False, master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._owner.keep_store(store)
        self._owner.post(self, StoreOpened(self.generation, f"{self._owner.host}:{port}"))

    def join(self, effect: JoinGroup) -> None:
        dist = _torch()
        self._rank, self._size = effect.rank, effect.size
        self._timeout_s = effect.timeout_s
        timeout = timedelta(seconds=effect.timeout_s)
        host, _, port = effect.store.rpartition(":")
        self._try(host, int(port), effect)
        store = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        self._store = dist.PrefixStore(f"generation-{effect.generation}", store)
        # Of its own connection: the other one has to be free for a wait.
        watched = dist.PrefixStore(f"generation-{effect.generation}", store.clone())
        threading.Thread(
            target=self._watch, args=(watched,), name=f"group-{self.generation}-watch", daemon=True
        ).start()
        claims = self._exchange("claim", 1, json.dumps(self._owner.claim()), timeout)
        if self._size > 1:
            options = dist.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._owner.host)]
            self._group = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        self._is_made = True
        self._forget_answer()
        self._owner.agree(self, [Claim(*claim) for claim in claims])

    def _try(self, host: str, port: int, effect: JoinGroup) -> None:
        """The store's own client fills the log where there is no way. Raises ConnectionError."""
        try:
            socket.create_connection((host, port), effect.timeout_s).close()
        except OSError as error:
            raise ConnectionError(
                f"no way from {self._owner.host} to {effect.store}: {error}"
            ) from error

    def begin_sum(self, size: int, weight: float) -> EarlySum | None:
        """In the thread that computes."""
        import torch

        from daemons.worker.early_sum import EarlySum

        with self._in_group:
            if self._early is not None:  # Nothing has come of that gradient.
                self._early.is_void = True
                return None
            if self._group is None or not self._is_made:
                return None
            if self._memory is None or len(self._memory) != size:
                self._memory = torch.empty(size, dtype=torch.float32, device="cpu")
            self._early = EarlySum(self._start, self._memory, weight)
            return self._early

    def _start(self, part: Any) -> Any:
        """Begin the sum of a part. Raises ConnectionError, and what gloo does."""
        with self._in_group:
            if self._group is None:
                raise ConnectionError("the group is not there any more")
            options = _torch().AllreduceOptions()
            options.timeout = NEVER
            return self._group.allreduce([part], options)

    def reduce(self, effect: Reduce) -> None:
        self._sums += 1
        early, self._early = self._early, None
        row = row_of(effect)
        if early is not None:
            is_void = not early.is_of(effect.vector, effect.weight)
            row = row._replace(begun=len(early.summed), is_void=is_void)
        rows = [Row(*row) for row in self._exchange("row", self._sums, json.dumps(row), NEVER)]
        try:
            plan = plan_of(rows)
        except ModelLost:
            raise
        except DlctlError as error:  # It is not this replica alone: the run cannot go on.
            self._owner.post(self, TaskFailed(in_words(error), ""))
            raise _GivenUp from error
        vector = self._summed_early(early, effect.vector, plan) if plan.begun else None
        if vector is None:
            vector = self._summed(effect.vector, plan)
        vector.flags.writeable = False
        is_counted = not effect.joins and effect.step == plan.step
        result = Reduced(
            self.generation, 0, vector, sum(plan.weights), self._size, plan.step, plan.joined,
            is_counted, plan.first, plan.beside,
        )  # fmt: skip
        self._owner.keep(self, result)
        self._know_that_all_have_it()
        self._owner.hand_out(self)
        self._forget_answer()

    def _summed(self, own: Array, plan: Plan) -> Array:
        """float32[plan.size], the sum over all members; the same bits for all of them."""
        import torch

        total = 1.0 if plan.dtype == "float32" else sum(plan.weights)
        weight = plan.weights[self._rank]
        # Zero times what is not finite would not be zero.
        vector = np.zeros(plan.size, np.float32) if not weight else np.float32(weight / total) * own
        if any(plan.weights):
            tensor = torch.from_numpy(vector).to(getattr(torch, plan.dtype))
            if self._group is not None:
                self._group.allreduce([tensor]).wait(timedelta(seconds=self._timeout_s))
            vector = tensor.float().numpy()
        return vector if total == 1.0 else vector * np.float32(total)

    def _summed_early(self, early: EarlySum | None, own: Array, plan: Plan) -> Array | None:
        """What some have begun; None: it is of no use, for somebody goes on with something else."""
        import torch

        if early is None:
            from daemons.worker.early_sum import EarlySum

            weight = 0.0 if plan.is_void else plan.weights[self._rank]
            memory = torch.empty(plan.begun, dtype=torch.float32, device="cpu")
            early = EarlySum(self._start, memory, weight)
            early.begin_rest(torch.from_numpy(own))
        early.wait(lambda work: work.wait(timedelta(seconds=self._timeout_s)))
        return None if plan.is_void else early.summed.numpy()

    def _know_that_all_have_it(self) -> None:
        """Return when every member has kept the result of this sum."""
        if self._group is not None:
            self._group.barrier().wait(timedelta(seconds=self._timeout_s))

    # ------------------------------------------------------------ at the store

    def _exchange(self, what: str, number: int, own: str, within: timedelta) -> list[list[Any]]:
        """What all members say, by rank, when all of them have come here for the `number`-th time.
        own: what this one does, a list in JSON.

        Raises TimeoutError if they have not come within that; never, if it is `NEVER`, as a member
        may compute for long.
        """
        store, ranks = self._store, range(self._size)
        store.set(_place(what, self._rank), f"{number} {own}")
        # A counter that is never reset, as are the places: a run may make millions of sums.
        if store.add(f"{what}-count", 1) == self._size * number:
            places = store.multi_get([_place(what, rank) for rank in ranks])
            said = "[" + ",".join(text.decode().partition(" ")[2] for text in places) + "]"
            others = [_answer(rank) for rank in ranks if rank != self._rank]
            if others:
                store.multi_set(others, [said] * len(others))
        else:
            said = self._answered(what, number, within).decode()
        all_said: list[list[Any]] = json.loads(said)
        return all_said

    def _answered(self, what: str, number: int, within: timedelta) -> bytes:
        """What the one that comes last has to say to this member."""
        answer = _answer(self._rank)
        self._waits = what, number
        while True:
            try:
                self._store.wait([answer], within)
                break
            except _torch().DistStoreError:
                if self._is_over.is_set():
                    raise _GivenUp from None
                if within is not NEVER:
                    missing = ", ".join(map(str, self._missing(self._store, what, number)))
                    raise TimeoutError(f"rank {missing} did not come in time") from None
        self._waits = None
        text: bytes = self._store.get(answer)
        if self._is_over.is_set():
            raise _GivenUp
        self._has_answer = True
        return text

    def _forget_answer(self) -> None:
        """Before the next one may come, and when nobody waits for this member any more."""
        if self._has_answer:
            self._store.delete_key(_answer(self._rank))
            self._has_answer = False

    def _watch(self, store: Any) -> None:
        """Say whom this member waits for, and end its wait with the generation."""
        before = None
        try:
            while not self._is_over.wait(WORD_S):
                waits = self._waits
                if waits is not None and waits == before:
                    missing = self._missing(store, *waits)
                    self._owner.post(self, GroupWaits(self.generation, missing))
                before = waits
            store.set(_answer(self._rank), GIVEN_UP)
        except Exception:  # The store is gone, which the other thread learns, too.
            log.debug("generation %d: its store is gone", self.generation, exc_info=True)

    def _missing(self, store: Any, what: str, number: int) -> tuple[int, ...]:
        """The ranks that have not come here for the `number`-th time."""

        def has_come(rank: int) -> bool:
            place = _place(what, rank)
            if not store.check([place]):
                return False
            return int(store.get(place).partition(b" ")[0]) >= number

        return tuple(rank for rank in range(self._size) if not has_come(rank))


def _place(what: str, rank: int) -> str:
    """Where a member says what it brings."""
    return f"{what}-{rank}"


def _answer(rank: int) -> str:
    """Where a member is told what all have brought."""
    return f"answer-{rank}"


def _torch() -> Any:
    """torch.distributed; only where a method has a group is it loaded."""
    import torch.distributed as dist

    return dist
