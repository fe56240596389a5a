"""Questions of a computation to the worker that its part asks (`dlctl/model/parts.py`): the task's
loss, or its `evaluate`, runs in another thread, and waits for the answer.

A question outlives the processes of that worker: it is asked again of the next one.
"""

from __future__ import annotations

from dlctl.errors import JobFailed
from dlctl.roles.protocol.context import Context
from dlctl.roles.protocol.effects import BringAnswer
from dlctl.roles.worker.members import PeerMembers
from dlctl.roles.worker.services.asking import Asking
from dlctl.roles.worker.services.base import Phase
from dlctl.util.names import ASKING
from dlctl.wire.messages import Array

INF = float("inf")


class Remote:
    """At most one question at a time: the thread that computes waits for it."""

    def __init__(self, context: Context, asking: Asking, members: PeerMembers, head: int) -> None:
        """head: the slot of that worker."""
        self._context, self._asking, self._members = context, asking, members
        self._head = head
        self._wanted: tuple[str, tuple[Array, ...]] | None = None
        """The operation and the arrays that the computation waits for."""
        self._is_asked = False
        self.answered = 0
        """Answers that a computation has been given."""

    @property
    def waits(self) -> bool:
        return self._wanted is not None

    def want(self, op: str, arrays: tuple[Array, ...], now: float) -> None:
        self._wanted, self._is_asked = (op, arrays), False
        self.advance(now)

    def advance(self, now: float) -> None:
        """Ask, as soon as there is a process to ask."""
        head = self._members.known.get(self._head)
        if self._wanted is None or self._is_asked or head is None or not head.address:
            return
        self._is_asked = True
        self._asking.ask(self._head, *self._wanted, INF, self._on_answer, now)

    def _on_answer(self, arrays: tuple[Array, ...] | None) -> None:
        """Raises JobFailed for a question that no process of the head would answer."""
        if arrays is None:
            if why := self._asking.refusal:  # It would be refused again, and for ever.
                raise JobFailed(
                    f"worker-{self._head}, the head, refuses a batch: {why}",
                    hint="the batch is as client_model() and dataset() make it: correct them, and "
                    "start again",
                )
            self._is_asked = False  # That process is gone.
            return
        self._wanted = None
        self.answered += 1
        self._context.do(BringAnswer(arrays))

    def phase(self) -> Phase:
        return Phase(ASKING, (f"worker-{self._head}",))
