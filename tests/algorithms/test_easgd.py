"""EASGD and EAMSGD against the loops of the paper, in numpy (Zhang 2015, Alg. 1 and 2)."""

from dataclasses import replace

import numpy as np
import pytest
from builders import site
from by_hand import Player, Shards

from dlctl import registry
from dlctl.algorithms.base import PushKind
from dlctl.algorithms.methods.easgd import BETA, EAMSGD, EASGD, Options, Replica, alpha_of
from dlctl.algorithms.needs import Gradient, NextBatch, NextData, Read, Step, Write
from dlctl.algorithms.rounds import DISCARDED_MAX
from dlctl.compress.none import Dense
from dlctl.job.config import Choice, Job, JobFile

P, SIZE, ETA, TAU = 3, 6, 0.2, 4
TARGETS = np.random.default_rng(5).standard_normal((P, 40, SIZE)).astype(np.float32)


def gradient_of(x, batch):
    """Towards another target with every batch of every replica."""
    return Step(x - TARGETS[batch], 1, 1.0)


def no_gradient(x, batch):
    return Step(x * 0, 1, 1.0)


def replicas(gradient=gradient_of, **options):
    shards = Shards(EASGD, np.ones(SIZE, np.float32), 2)
    shards.members(frozenset(range(P)))
    players = [Player(EASGD, shards, gradient, slot, own_lr=ETA) for slot in range(P)]
    for player in players:
        player.side.options = Options(**{"exchange_every_steps": TAU, **options})
    return shards, players


def step(player, number):
    player.todo.append((NextBatch(0, 0, False), (player.slot, number)))
    player.advance()


def conserved(shards, players):
    return sum(player.parameters.astype(np.float64) for player in players) + shards.whole()


def spread(players):
    """How far the replicas are apart, at most."""
    return np.ptp([player.parameters for player in players], axis=0).max()


class Paper:
    """What the authors' code does: the gradient is taken before the pull."""

    def __init__(self, alpha):
        self.alpha = alpha
        self.centre = np.ones(SIZE)
        self.x = np.ones((P, SIZE))
        self.clocks = [0] * P

    def step(self, i):
        x = self.x[i].copy()
        if self.clocks[i] % TAU == 0:
            e = self.alpha * (x - self.centre)
            self.x[i] -= e
            self.centre += e
        self.x[i] -= ETA * (x - TARGETS[i, self.clocks[i]])
        self.clocks[i] += 1


@pytest.mark.oracle("easgd", "the authors' asynchronous loop")
@pytest.mark.parametrize("alpha", [0.25, "auto"])
def test_replicas_in_any_order_go_the_way_of_the_paper(alpha, agree):
    shards, players = replicas(alpha=alpha)
    paper = Paper(BETA / P if alpha == "auto" else alpha)
    for slot in np.random.default_rng(1).integers(P, size=80):
        step(players[slot], paper.clocks[slot])
        paper.step(slot)
        agree(shards.whole(), paper.centre, rtol=1e-5, atol=1e-6)
    for player in players:
        agree(player.parameters, paper.x[player.slot], rtol=1e-5, atol=1e-6)


class Driven:
    """A replica in front of one centre, its optimiser torch's."""

    def __init__(self, method, slot, inner, tau=1):
        import torch

        from daemons.worker.inner_optimizer import InnerOptimizer

        self.x, self.slot = np.ones(SIZE, np.float32), slot
        self.torch, self.lr = torch, inner.options["lr"]
        self.inner = InnerOptimizer(inner, [torch.from_numpy(self.x)])
        options = Options(exchange_every_steps=tau)
        self.side = method.replica(site(options, self.x, slot, members=frozenset(range(P))))
        self.side.begin("new")
        self.run = self.side.run()
        self.need = next(self.run)

    def to_write(self, centre, number):
        """Read the centre, make a step, and say what is pushed."""
        while not isinstance(self.need, Write):
            self.answer(centre, number)
        return self.need.vector.copy()

    def answer(self, centre, number):
        answer = None
        match self.need:
            case NextData():
                answer = NextBatch(0, 0, False)
            case Read():
                self.side.arrival.before(0, SIZE)
                self.x[:] = centre
                self.side.arrival.after(0, SIZE)
            case Gradient():
                gradient = self.x - TARGETS[self.slot, number]
                self.inner.step([self.torch.from_numpy(gradient)], self.lr)
                answer = Step(None, 1, 1.0)
        self.need = self.run.send(answer)

    def step(self, centre, number):
        """Make it; returns the centre with what was pushed in it."""
        self.answer(centre, number)
        while not isinstance(self.need, NextData):
            if isinstance(self.need, Write):
                centre = centre + self.need.vector
                self.sent()
            else:
                self.answer(centre, number)
        return centre

    def sent(self):
        whole = self.need.vector.copy()
        self.need.vector[:] = 0
        self.need = self.run.send(whole)


@pytest.mark.parametrize(
    "delta",
    [
        pytest.param(0.0, marks=pytest.mark.oracle("easgd", "the synchronous step of Zhang 2015")),
        pytest.param(0.9, marks=pytest.mark.oracle("eamsgd", "its synchronous step, Nesterov's v")),
    ],
)
def test_all_at_once_they_make_the_synchronous_step(delta, agree):
    """x_i = x_i - eta g_i - alpha (x_i - x~);  x~ = (1 - beta) x~ + beta mean x_i. With momentum in
    y = x + delta v, where v is Nesterov's: y moves by delta times the next v more than x does.
    """
    momentum = {"momentum": delta, "nesterov": True} if delta else {}
    inner = Choice(name="sgd", options={"lr": 0.05, **momentum})
    players = [Driven(EAMSGD, slot, inner) for slot in range(P)]
    centre = np.ones(SIZE)
    x, v, expected, alpha = np.ones((P, SIZE)), np.zeros((P, SIZE)), np.ones(SIZE), BETA / P
    for t in range(20):
        pushed = [player.to_write(centre, t) for player in players]
        for player, e in zip(players, pushed, strict=True):
            centre = centre + e
            player.sent()
        y = x + delta * v
        e = alpha * (y - expected)
        v = delta * v - 0.05 * (y - TARGETS[:, t])
        x = x + v - e
        expected = (1 - BETA) * expected + BETA * y.mean(axis=0)
        agree(centre, expected, rtol=1e-5, atol=1e-6)
        for player in players:
            ahead = x[player.slot] + delta * v[player.slot]
            agree(player.x, ahead, rtol=1e-5, atol=1e-6)


@pytest.mark.oracle("eamsgd", "Alg. 2 of Zhang 2015 in float64, pulled at x + delta v")
def test_replicas_with_momentum_in_any_order_go_the_way_of_the_paper(agree):
    eta, delta, alpha = 0.05, 0.9, BETA / P
    inner = Choice(name="sgd", options={"lr": eta, "momentum": delta, "nesterov": True})
    players = [Driven(EAMSGD, slot, inner, TAU) for slot in range(P)]
    centre, expected = np.ones(SIZE), np.ones(SIZE)
    x, v, clocks = np.ones((P, SIZE)), np.zeros((P, SIZE)), [0] * P
    for i in np.random.default_rng(1).integers(P, size=80):
        if clocks[i] == 0:
            x[i] = expected
        y, e = x[i] + delta * v[i], np.zeros(SIZE)
        if clocks[i] % TAU == 0:
            e = alpha * (y - expected)
        v[i] = delta * v[i] - eta * (y - TARGETS[i, clocks[i]])
        x[i] = x[i] + v[i] - e
        expected = expected + e
        centre = players[i].step(centre, clocks[i])
        clocks[i] += 1
        agree(centre, expected, rtol=1e-5, atol=1e-6)
        agree(players[i].x, x[i] + delta * v[i], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- symmetry


class EverySecond(Dense):
    """Sends every second entry, of each shard in turn the even and the odd ones."""

    calls = 0

    def take(self, u, shard=0):
        part, first = np.zeros_like(u), self.calls // 2 % 2
        part[first::2] = u[first::2]
        self.calls += 1
        u -= part
        return super().take(part, shard)


@pytest.mark.parametrize("compressor", ["none", "every second"])
def test_without_gradients_the_sum_of_positions_and_centre_stays(compressor):
    shards, players = replicas(no_gradient, exchange_every_steps=1)
    for player in players:
        if compressor == "every second":
            player.training.writing.compressor = EverySecond(Dense.Options())
        step(player, 0)
        player.parameters[:] = TARGETS[player.slot, 0]
    total = conserved(shards, players)
    apart = [spread(players)]
    for number in range(12):
        for player in players:
            step(player, number)
        np.testing.assert_allclose(conserved(shards, players), total, atol=1e-6)
        apart.append(spread(players))
    assert apart[-1] < 0.1 * apart[0]


def test_alpha_follows_those_who_take_part():
    _, players = replicas()
    side = players[0].side
    assert alpha_of(side) == pytest.approx(0.3)
    side.members = frozenset({0, 5})
    assert alpha_of(side) == pytest.approx(0.45)
    side.members = frozenset()  # It has not heard of anybody yet.
    assert alpha_of(side) == pytest.approx(0.9)


# ---------------------------------------------------------------- who comes and goes


def test_who_joins_begins_at_the_centre_and_who_is_restored_where_it_was():
    shards, (player, *_) = replicas()
    for number in range(6):
        step(player, number)
    assert player.side.state().keys() == {"position", "steps"}
    state = {name: np.array(vector) for name, vector in player.side.state().items()}
    shards.members(frozenset({0, 7}))
    joined = Player(EASGD, shards, no_gradient, 7, own_lr=ETA)
    step(joined, 0)
    np.testing.assert_array_equal(joined.parameters, shards.whole())

    again = Replica(site(Options(exchange_every_steps=TAU), np.zeros(SIZE, np.float32)))
    again.begin("restored")
    assert again.state() == {}
    again.restore(state)
    np.testing.assert_array_equal(again.parameters, player.parameters)
    assert [again.position.is_due(), again.position.steps] == [False, 2]


def test_who_has_no_more_data_exchanges_once_more():
    shards, (player, *_) = replicas()
    for number in range(2):
        step(player, number)
    before, x = shards.whole(), player.parameters.copy()
    player.tell_none()
    e = (BETA / P) * (x - before)
    np.testing.assert_allclose(shards.whole(), before + e, rtol=1e-5)
    np.testing.assert_allclose(player.parameters, x - e, rtol=1e-5)


@pytest.mark.parametrize("ruin", ["infinite", "no gradient"])
def test_who_is_ruined_by_its_own_steps_goes_on_from_the_centre(ruin):
    def gradient(x, batch):
        _, number = batch
        is_bad = ruin == "no gradient" and 2 <= number < 2 + DISCARDED_MAX
        return Step(x * np.float32(np.nan if is_bad else 0), 1, 1.0)

    shards, (player, *_) = replicas(gradient, exchange_every_steps=20)
    for number in range(2):
        step(player, number)
    player.parameters[:] = 1e30 if ruin == "infinite" else 9
    for number in range(2, 40):
        step(player, number)
    np.testing.assert_array_equal(player.parameters, 1)
    np.testing.assert_array_equal(shards.whole(), 1)


# ---------------------------------------------------------------- what is declared


def test_job_files_that_would_break_the_symmetry_are_refused():
    whole = JobFile(
        job=Job(name="a", task="none"), algorithm=Choice(name="easgd"), optimizer=EASGD.optimizer
    )
    assert EASGD.check(whole) == []
    with_rate = replace(whole, optimizer=Choice(name="sgd", options={"lr": 0.1}))
    ((where, what, instead),) = EASGD.check(with_rate)
    assert (where, "rate" in what, "[inner]" in instead) == (("optimizer", "lr"), True, True)
    without = replace(whole, inner=Choice(name="sgd", options={"lr": 0.1, "momentum": 0.0}))
    assert EASGD.check(without) == []
    ((where, what, _),) = EAMSGD.check(without)
    assert (where, "momentum" in what) == (("inner", "name"), True)
    thrown_away = Choice(name="randomk", options={"unbiased": True})
    ((where, _, _),) = EASGD.check(replace(whole, compression=thrown_away))
    assert where == ("compression", "unbiased")


def test_both_names_are_one_implementation():
    easgd, eamsgd = (registry.load("algorithms", name) for name in ("easgd", "eamsgd"))
    assert easgd.replica is eamsgd.replica
    assert easgd.inner.options.get("momentum", 0) == 0
    assert eamsgd.inner.options["momentum"] == 0.99
    assert eamsgd.inner.options["nesterov"]
    assert easgd.replica.one_push(Options()) == PushKind(10, is_displacement=True, is_all=False)
    assert [easgd.live["alpha"].parse(text) for text in ("auto", "0.5")] == ["auto", 0.5]
