"""Requests of the command line. A client repeats a request under one number until an answer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from dlctl.errors import DlctlError
from dlctl.machine import Peer
from dlctl.messages import Json, Message, Reply, Request
from dlctl.roles.protocol.context import Context

ANSWERS_KEPT = 256
NOT_VALID = (TypeError, ValueError, OverflowError)
"""What conversions of a client's values raise; the last one by int(inf)."""
Verb = Callable[[Request, float], None]
Look = Callable[[Request, float], Json]


class Clients:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.verbs: dict[str, Verb] = {}
        self.looks: dict[str, Look] = {}
        self._peers: OrderedDict[int, Peer] = OrderedDict()
        self._answers: dict[int, Reply] = {}

    def serve(self, verbs: dict[str, Verb], looks: dict[str, Look]) -> None:
        """`looks`: what is answered at once, and forgotten: nobody's answers make room for it."""
        self.verbs, self.looks = verbs, looks

    def on_request(self, peer: Peer, request: Request, now: float) -> None:
        """Do what is asked, once; a repeated request gets the answer as it stands."""
        if request.verb in self.looks:
            self._look(peer, request, now)
            return
        known = request.request in self._answers
        self._peers[request.request] = peer
        if known:
            self.context.send(peer, self._answers[request.request])
            return
        self.answer(request.request, False, "", {"phase": "received"})
        try:
            self._verb(request.verb)(request, now)
        except DlctlError as error:
            self.answer(request.request, True, error.message, _how(error))
        except (*NOT_VALID, KeyError, AttributeError) as error:
            self.answer(request.request, True, f"the request is not valid: {error}", {})
        while len(self._peers) > ANSWERS_KEPT:
            oldest, _ = self._peers.popitem(last=False)
            del self._answers[oldest]

    def _look(self, peer: Peer, request: Request, now: float) -> None:
        try:
            result, error = self.looks[request.verb](request, now), ""
        except NOT_VALID as failure:
            result, error = {}, f"the request is not valid: {failure}"
        self.context.send(peer, Reply(request.request, True, error, result))

    def refuse(self, peer: Peer, message: Message, error: DlctlError) -> None:
        """Say no to one whose key does not go so far, and remember nothing of it."""
        if isinstance(message, Request):
            self.context.send(peer, Reply(message.request, True, error.message, _how(error)))

    def _verb(self, name: str) -> Verb:
        if name not in self.verbs:
            raise DlctlError(f'the coordinator does not know the request "{name:.40}"')
        return self.verbs[name]

    def answer(self, request: int, done: bool, error: str, result: Json) -> None:
        """Tell the client how far its request is, or how it ended."""
        if request in self._peers:
            reply = Reply(request, done, error, result)
            self._answers[request] = reply
            self.context.send(self._peers[request], reply)


def _how(error: DlctlError) -> Json:
    """What a client has to know of an error besides its words."""
    hint = {"hint": error.hint} if error.hint else {}
    return {"exit_code": error.exit_code, **hint}
