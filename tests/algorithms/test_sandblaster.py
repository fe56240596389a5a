"""Sandblaster L-BFGS by hand: the recursion, the line search, the pairs, the sums of a batch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
from builders import replica
from by_hand import Player, Shards, drive, message_of, requests
from scipy.optimize import LbfgsInvHessProduct, minimize

from dlctl import jobfile
from dlctl.algorithms.base import BatchRequest, Change, DriveSnapshot, Sum, VectorRequest
from dlctl.algorithms.methods.line_search import Conditions, Trial, strong_wolfe
from dlctl.algorithms.methods.sandblaster import LBFGS, SANDBLASTER, HistoryPair, Options
from dlctl.algorithms.needs import Gradient, NextBatch, NextData, Read, Step, Write
from dlctl.algorithms.tables import PARTS_MAX
from dlctl.errors import UsageError
from dlctl.roles.coordinator.pools.portions import PortionPool
from dlctl.roles.worker.leases import Portion
from dlctl.shards.errors import Diverged
from dlctl.sim.objectives import Batch, LeastSquares, Logistic, batch_rows
from dlctl.wire import messages as m
from dlctl.wire.messages import APPLIED, LATE, REFUSED


class Function:
    """f and its gradient in float64, evaluated at once: a batch without replicas."""

    def __init__(self, f, gradient, start, servers=1, options=None):
        self.f = f
        self.gradient = gradient
        self.shards = Shards(SANDBLASTER, np.array(start, np.float32), servers, options)
        self.points = []
        """Where it was evaluated, and the values there."""
        self.values = []

    def __call__(self, clock):
        assert clock == len(self.points)
        w = self.shards.whole().astype(np.float64)
        self.points.append(w)
        self.values.append(float(self.f(w)))
        samples = 10
        self.shards.put("accrued", samples * np.asarray(self.gradient(w), np.float64))
        return samples * self.values[-1], samples


def quadratic(size, condition, seed=0):
    """(A, b) of w.Aw / 2 - b.w with eigenvalues from 1 to `condition`."""
    rng = np.random.default_rng(seed)
    q, _ = np.linalg.qr(rng.standard_normal((size, size)))
    return q @ np.diag(np.geomspace(1, condition, size)) @ q.T, rng.standard_normal(size)


def run_part(part, shards, asked=None):
    """A part of the method that has vector operations only; returns its result. asked: is told of
    its requests.
    """
    value = None
    while True:
        try:
            request = part.send(value)
        except StopIteration as end:
            return end.value
        if asked is not None:
            asked.append(request)
        value = shards.perform(request)


# ---------------------------------------------------------------- the two-loop recursion


def with_pairs(number, history=7, size=1003, servers=3, reduction="paper"):
    """A side that has accepted `number` points, by the method's own operations on real shards."""
    rng = np.random.default_rng(number)
    start, options = (
        rng.standard_normal(size).astype(np.float32),
        Options(history=history, reduction=reduction),
    )
    shards = Shards(SANDBLASTER, start, servers, options)
    side = LBFGS(options)
    curvature = rng.uniform(0.1, 10.0, size)
    gradient = rng.standard_normal(size)
    shards.put("x", shards.whole())
    shards.put("g", gradient)
    seen = []
    for _ in range(number):
        step = rng.standard_normal(size).astype(np.float32)
        before = shards.whole().astype(np.float64)
        for shard, (lo, hi) in zip(shards.shards, shards.bounds, strict=True):
            shard.w[:] += step[lo:hi]
        made = shards.whole().astype(np.float64) - before
        change = curvature * made + 0.01 * rng.standard_normal(size)
        gradient = gradient + change
        shards.put("accrued", gradient)
        if reduction == "gram":  # As after every step: what it knows is not asked for again.
            run_part(side._direction(), shards)
        run_part(side._accept(), shards)
        seen.append((made, change))
    return side, shards, seen


@pytest.mark.oracle("sandblaster", "scipy.optimize.LbfgsInvHessProduct")
@pytest.mark.parametrize("reduction", ["paper", "gram"])
@pytest.mark.parametrize("number", [1, 3, 7, 12])
def test_the_direction_is_the_one_of_scipy(number, reduction, agree):
    side, shards, seen = with_pairs(number, reduction=reduction)
    slope = run_part(side._direction(), shards)
    assert len(side.pairs) == min(number, 7)
    s = np.array([made for made, _ in seen[-7:]])
    y = np.array([change for _, change in seen[-7:]])
    gamma = (s[-1] @ y[-1]) / (y[-1] @ y[-1])
    # SciPy begins with H0 = 1 and we with gamma: H(s, y) = gamma H1(s / sqrt(gamma), y sqrt(gamma))
    root = np.sqrt(gamma)
    g = shards.whole("g")
    expected = -gamma * LbfgsInvHessProduct(s / root, y * root).matvec(g)
    length = np.linalg.norm(expected)
    agree(shards.whole("d") / length, expected / length, atol=1e-14)
    assert slope == pytest.approx(g @ expected, rel=1e-12)
    assert slope < 0


def test_without_pairs_the_direction_is_straight_down():
    side, shards, _ = with_pairs(0)
    slope = run_part(side._direction(), shards)
    assert np.array_equal(shards.whole("d"), -shards.whole("g"))
    assert slope == pytest.approx(-(shards.whole("g") @ shards.whole("g")))


def test_a_direction_takes_two_rounds_per_pair_and_one_for_the_slope():
    side, shards, _ = with_pairs(9)
    asked = []
    run_part(side._direction(), shards, asked)
    assert len(asked) == 2 * 7 + 1
    assert all(len(request.sums) == 1 for request in asked)


def test_by_the_products_of_all_a_direction_takes_two_rounds_and_few_new_sums():
    side, shards, _ = with_pairs(12, reduction="gram")
    asked = []
    run_part(side._direction(), shards, asked)
    assert [len(request.sums) for request in asked] == [27 + 15, 0]
    again = LBFGS(side.options)
    again.resume(side.state())
    asked.clear()
    run_part(again._direction(), shards, asked)
    assert [len(request.sums) for request in asked] == [15, 0], "only those of g are new"


@pytest.mark.parametrize("line_search", ["armijo", "strong-wolfe"])
def test_a_run_by_the_products_of_all_takes_the_same_way(line_search):
    a, b = quadratic(30, 100)
    found = []
    for reduction in ("paper", "gram"):
        function = Function(lambda w: w @ a @ w / 2 - b @ w, lambda w: a @ w - b, np.zeros(30), 3)
        options = Options(
            gradient_norm_min=0, iterations=12, reduction=reduction, line_search=line_search
        )
        drive(LBFGS(options), function.shards, function)
        found.append(np.array(function.points))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6, atol=1e-6)


def rosenbrock(w):
    return float(100 * (w[1] - w[0] ** 2) ** 2 + (1 - w[0]) ** 2)


def slope_of_rosenbrock(w):
    up = 200 * (w[1] - w[0] ** 2)
    return np.array([-2 * w[0] * up - 2 * (1 - w[0]), up])


@pytest.mark.oracle("sandblaster", "torch.optim.LBFGS, strong Wolfe: the minimum")
def test_with_strong_wolfe_a_curved_valley_takes_about_as_many_points_as_with_torch(agree):
    function = Function(rosenbrock, slope_of_rosenbrock, [-1.2, 1.0])
    side = LBFGS(Options(gradient_norm_min=1e-3, iterations=100, line_search="strong-wolfe"))
    drive(side, function.shards, function)
    w = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
    script = torch.optim.LBFGS(
        [w], max_iter=100, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=1e-3
    )
    calls = []

    def closure():
        calls.append(w.detach().numpy().copy())
        w.grad = torch.from_numpy(slope_of_rosenbrock(calls[-1]))
        return torch.tensor(rosenbrock(calls[-1]))

    script.step(closure)
    agree(function.shards.whole(), w.detach().numpy(), atol=1e-3)
    assert side.batches <= 1.5 * len(calls) + 5


def found_by(search, along):
    """What a search returns: the last step that it has tried, or None."""
    following, found = next(search), math.nan
    while math.isnan(found):
        step = following
        try:
            following = search.send(along(step))
        except StopIteration as end:
            if end.value is None:
                return None
            found = end.value
    assert found == step
    return found


@pytest.mark.parametrize("first", [1e-3, 0.1, 1.0, 50.0])
def test_a_step_of_strong_wolfe_goes_down_and_is_flat(first):
    """Along a line with a wall: beyond 3 there is no loss."""

    def along(t):
        loss = math.nan if t > 3 else (t - 1) ** 4 + math.sin(3 * t) / 5
        return loss, 4 * (t - 1) ** 3 + 0.6 * math.cos(3 * t)

    wanted = Conditions(*along(0.0), 1e-4, 0.1)
    step = found_by(strong_wolfe(first, 15, wanted), along)
    found = Trial(step, *along(step))
    assert wanted.descends(found)
    assert wanted.is_flat(found)


def test_without_trials_enough_strong_wolfe_takes_the_best_that_goes_down():
    wanted = Conditions(1.0, -1.0, 1e-4, 1e-9)
    search = strong_wolfe(1.0, 3, wanted)
    answers = {1.0: (2.0, 1.0)}
    assert found_by(search, lambda step: answers.get(step, (1.0 - step / 10, -0.5))) < 1.0
    assert found_by(strong_wolfe(1.0, 3, wanted), lambda step: (math.inf, math.nan)) is None


def test_the_ring_keeps_the_newest_pairs_however_many_iterations_there_are():
    side, shards, seen = with_pairs(20, history=4, size=30)
    assert len(side.pairs) == 4
    for pair, (made, change) in zip(side.pairs, seen[-4:], strict=True):
        assert np.array_equal(shards.whole(f"s{pair.slot}"), made)
        np.testing.assert_allclose(shards.whole(f"y{pair.slot}"), change, rtol=1e-9, atol=1e-12)
        assert pair.rho == pytest.approx(1 / (made @ change))
    stored = {name for name in shards.numbers if name[1:].isdigit()}
    assert stored == {f"{kind}{slot}" for kind in "sy" for slot in range(5)}


# ---------------------------------------------------------------- iterations on functions


@pytest.mark.long
@pytest.mark.oracle("sandblaster", "scipy.optimize.minimize, L-BFGS-B: the loss")
@pytest.mark.parametrize(("size", "condition"), [(20, 30), (50, 1e3)])
def test_a_quadratic_takes_about_as_many_iterations_as_with_scipy(size, condition, agree):
    a, b = quadratic(size, condition)
    solution = np.linalg.solve(a, b)
    lowest = -b @ solution / 2

    def f(w):
        return w @ a @ w / 2 - b @ w

    def slope(w):
        return a @ w - b

    function = Function(f, slope, np.zeros(size), servers=3)
    side = LBFGS(Options(gradient_norm_min=1e-4, iterations=200))
    reason = drive(side, function.shards, function)
    assert reason.startswith("the norm")
    assert np.linalg.norm(slope(function.shards.whole().astype(float))) < 1.1e-4
    np.testing.assert_allclose(function.shards.whole(), solution, atol=1e-4)
    assert side.loss - lowest < 1e-7

    theirs = minimize(
        f, np.zeros(size), jac=slope, method="L-BFGS-B",
        options={"maxcor": 10, "ftol": 0, "gtol": 2e-5},
    )  # fmt: skip
    agree(side.loss, theirs.fun, atol=1e-8)
    assert side.iteration <= 1.3 * theirs.nit + 3
    assert side.batches <= 1.3 * theirs.nfev + 6


@pytest.mark.oracle("sandblaster", "torch.optim.LBFGS: every point")
@pytest.mark.parametrize("history", [3, 10])
def test_where_the_first_trial_is_good_enough_the_points_are_those_of_torch(history, agree):
    """Torch has no such line search as ours: it takes every first trial."""
    a, b = quadratic(12, 3)
    function = Function(lambda w: w @ a @ w / 2 - b @ w, lambda w: a @ w - b, np.zeros(12), 3)
    options = Options(history=history, gradient_norm_min=0, iterations=9)
    drive(LBFGS(options), function.shards, function)

    w, theirs = torch.zeros(12, dtype=torch.float64, requires_grad=True), []
    script = torch.optim.LBFGS([w], max_iter=10, history_size=history)

    def closure():
        theirs.append(w.detach().numpy().copy())
        w.grad = torch.from_numpy(a @ theirs[-1] - b)
        return torch.tensor(function.f(theirs[-1]))

    script.step(closure)
    agree(function.points, theirs, atol=1e-6)
    assert len(theirs) == 10


def test_a_narrow_valley_is_followed_to_its_end():
    """Rosenbrock's function in four variables: curved, and not convex."""

    def f(w):
        return float(np.sum(100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2))

    def gradient(w):
        g = np.zeros_like(w)
        g[:-1] = -400 * w[:-1] * (w[1:] - w[:-1] ** 2) - 2 * (1 - w[:-1])
        g[1:] += 200 * (w[1:] - w[:-1] ** 2)
        return g

    function = Function(f, gradient, [-1.2, 1.0, -1.2, 1.0], servers=2)
    drive(LBFGS(Options(gradient_norm_min=1e-3, iterations=300)), function.shards, function)
    np.testing.assert_allclose(function.shards.whole(), np.ones(4), atol=2e-3)


def test_every_accepted_point_goes_down_by_a_part_of_what_the_slope_promises():
    a, b = quadratic(15, 100)
    function = Function(lambda w: w @ a @ w / 2 - b @ w, lambda w: a @ w - b, np.zeros(15))
    side, losses = LBFGS(Options(iterations=12, gradient_norm_min=0)), []
    for _ in requests(side, function.shards, function):
        if not losses or side.loss != losses[-1]:
            losses.append(side.loss)
    assert len(losses) == 14, "infinite, the first point, and twelve more"
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    assert side.iteration == 12


def test_the_first_step_has_the_length_one_in_the_sum_of_magnitudes():
    function = Function(lambda w: 50 * w @ w, lambda w: 100 * w, [3.0, -1.0, 0.5], servers=2)
    drive(LBFGS(Options(iterations=1)), function.shards, function)
    assert np.abs(function.points[1] - function.points[0]).sum() == pytest.approx(1, rel=1e-6)


def test_a_step_too_long_is_halved_until_it_goes_down():
    """f = 500 w^2 from 0.1: the first step has length 1 and overshoots to -0.9."""
    function = Function(lambda w: 500 * w @ w, lambda w: 1000 * w, [0.1])
    side = LBFGS(Options(iterations=1))
    drive(side, function.shards, function)
    tried = [0.1 - float(point[0]) for point in function.points[1:]]
    np.testing.assert_allclose(tried, [0.5**i for i in range(len(tried))], rtol=1e-5)
    assert len(tried) == 4, "1, 1/2 and 1/4 lead higher up, 1/8 does not"
    assert abs(function.shards.whole()[0]) < 0.1


def test_a_point_of_infinite_loss_is_only_a_step_too_far():
    def f(w):
        return float(w[0] - np.log(w[0])) if w[0] > 0 else np.inf

    function = Function(f, lambda w: 1 - 1 / w, [0.4])
    drive(LBFGS(Options(iterations=30)), function.shards, function)
    assert function.shards.whole()[0] == pytest.approx(1.0, abs=1e-3)

    far = Function(
        lambda w: np.nan if w[0] < -3 else 1e3 * float(w[0]), lambda w: np.array([1e3]), [0.0]
    )
    side = LBFGS(Options(iterations=8, trials_max=30))
    drive(side, far.shards, far)
    assert -3 <= far.shards.whole()[0] < -1


def test_a_pair_of_negative_curvature_is_left_out():
    """w^4 / 4 - w^2 / 2 is concave at 0.1 and has its minimum at 1."""
    function = Function(lambda w: float(w[0] ** 4 / 4 - w[0] ** 2 / 2), lambda w: w**3 - w, [0.1])
    side = LBFGS(Options(iterations=1))
    drive(side, function.shards, function)
    assert (side.iteration, side.pairs) == (1, [])

    function = Function(function.f, function.gradient, [0.1])
    side = LBFGS(Options(gradient_norm_min=1e-5))
    drive(side, function.shards, function)
    assert abs(function.shards.whole()[0]) == pytest.approx(1.0, abs=1e-4)
    assert side.pairs
    assert all(pair.rho > 0 and pair.gamma > 0 for pair in side.pairs)


def test_a_pair_without_curvature_is_left_out_and_the_others_stay():
    side, shards, _ = with_pairs(3, size=30)
    before = list(side.pairs)
    for shard in shards.shards:
        shard.w[:] += 1.0
    run_part(side._accept(), shards)
    assert side.pairs == before, "the gradient has not changed: s.y = 0"
    assert np.array_equal(shards.whole("x"), shards.whole())


def test_a_direction_that_leads_up_is_forgotten_with_its_pairs():
    function = Function(lambda w: float(w @ w) / 2, lambda w: w, [0.5, 0.25])
    side = LBFGS(Options(iterations=1))
    directions = []
    for request in requests(side, function.shards, function):
        if isinstance(request, BatchRequest) and len(function.points) == 1:
            side.pairs.append(HistoryPair(0, 1.0, -2.0))  # As if H were -2.
        if isinstance(request, VectorRequest) and Change("copy", "d", "d", -1.0) in request.changes:
            directions.append(function.shards.whole("d"))
    up, down = directions
    assert up @ [0.5, 0.25] > 0
    assert np.array_equal(down, [-0.5, -0.25])
    assert side.iteration == 1
    assert side.loss < 0.15


def test_when_nothing_goes_down_it_ends_where_it_was():
    """The gradient lies: it points uphill."""
    function = Function(lambda w: float(w @ w), lambda w: -w, [1.0, 2.0], servers=2)
    side = LBFGS(Options(trials_max=5))
    assert drive(side, function.shards, function).startswith("no step")
    assert np.array_equal(function.shards.whole(), [1.0, 2.0])
    assert side.batches == 1 + 5 + 1, "at last once more at the same point"
    assert not side.loss_noise()


@pytest.mark.per_commit("line_search")
@pytest.mark.parametrize("line_search", ["armijo", "strong-wolfe"])
@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 0.1])
def test_a_loss_that_depends_on_chance_ends_with_that_reason(noise, line_search):
    """f is a quadratic with a minimum of 1; its gradient is exact."""
    matrix, linear = quadratic(20, condition=100.0)
    least, rng = float(linear @ np.linalg.solve(matrix, linear)) / 2, np.random.default_rng(1)

    def f(w):
        value = float(w @ matrix @ w / 2 - linear @ w) + least + 1.0
        return value * (1.0 + noise * rng.standard_normal())

    function = Function(f, lambda w: matrix @ w - linear, np.zeros(20), servers=2)
    side = LBFGS(Options(iterations=1000, gradient_norm_min=0.0, line_search=line_search))
    reason = drive(side, function.shards, function)
    assert reason.startswith("no step")
    is_noisy = noise > 1e-5
    assert bool(side.loss_noise()) == ("dropout" in reason) == is_noisy
    again = LBFGS(side.options)
    again.resume(json.loads(json.dumps(side.state())))
    assert again.loss_noise() == side.loss_noise()


def test_a_search_in_vain_is_repeated_straight_down_before_it_ends():
    a, b = quadratic(6, 50)
    function = Function(lambda w: w @ a @ w / 2 - b @ w, lambda w: a @ w - b, np.zeros(6))
    side = LBFGS(Options(gradient_norm_min=0, trials_max=8))
    reason = drive(side, function.shards, function)
    assert reason.startswith("no step"), "float32 has no better point"
    assert side.pairs == []
    np.testing.assert_allclose(function.shards.whole(), np.linalg.solve(a, b), atol=1e-6)


def test_a_start_without_a_loss_is_the_end():
    function = Function(lambda w: np.nan, lambda w: w, [1.0])
    reason = drive(LBFGS(Options()), function.shards, function)
    assert reason == "the loss or the gradient of the initial parameters is not finite, or refused"


def numbers_only(value):
    """Whether nothing in `value` is, or could grow to, a vector of the model."""
    if isinstance(
        value, int | float | str | Options | VectorRequest | BatchRequest | DriveSnapshot
    ):
        return True
    if dataclasses.is_dataclass(value):
        return all(numbers_only(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, dict):
        return numbers_only([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) <= 11 and all(numbers_only(item) for item in value)
    return value is None or hasattr(value, "send") or hasattr(value, "__next__")


def test_the_coordinator_never_holds_a_vector():
    a, b = quadratic(400, 50)
    function = Function(lambda w: w @ a @ w / 2 - b @ w, lambda w: a @ w - b, np.zeros(400))
    side = LBFGS(Options(iterations=15, gradient_norm_min=0))
    part = side.drive()
    request, looked_at = next(part), 0
    while True:
        frame, value = part, None
        while frame is not None and hasattr(frame, "gi_frame"):
            assert numbers_only([v for v in frame.gi_frame.f_locals.values() if v is not side])
            frame, looked_at = frame.gi_yieldfrom, looked_at + 1
        assert numbers_only(side)
        if isinstance(request, BatchRequest):
            value = function(len(function.points))
        elif isinstance(request, VectorRequest):
            value = function.shards.perform(request)
        try:
            request = part.send(value)
        except StopIteration:
            break
    assert side.iteration == 15
    assert looked_at > 1000


# ---------------------------------------------------------------- batches, by replicas


class Replicas:
    """Computes a batch with real replicas and servers; who gets which portion is drawn by lot."""

    def __init__(self, problem, workers, servers, batch_size=8, portion_batches=2, seed=0):
        self.problem = problem
        self.shards = Shards(SANDBLASTER, problem.initial(), servers)
        self.portion_samples = batch_size * portion_batches
        self.batch_size = batch_size
        self.rng = np.random.default_rng([seed, workers])
        self.points = []
        self.losses = 0.0
        self.players = [
            Player(
                SANDBLASTER, self.shards, self._step, slot, batch_size=batch_size, samples_of=len
            )
            for slot in range(workers)
        ]

    def _step(self, parameters, rows):
        loss, gradient = self.problem.gradient(parameters, Batch(rows, 0, 0, 0))
        return Step(gradient, len(rows), loss)

    def portions(self, clock):
        samples = self.problem.samples
        pool = PortionPool(samples, self.portion_samples)
        pool.limit = pool.per_epoch
        while (taken := pool.take(0, 0.0)) is not None:
            lease = m.Lease(0, taken.portion, clock, taken.start, taken.stop)
            portion = Portion(lease, self.batch_size)
            where = (taken.start, taken.stop)
            yield [
                (
                    NextBatch(clock, taken.portion, portion.is_last(number)),
                    batch_rows(samples, 0, clock, where, (number, self.batch_size)),
                )
                for number in range(portion.batches)
            ]

    def __call__(self, clock):
        w = self.shards.whole()
        self.points.append(w)
        losses = 0.0
        for portion in self.portions(clock):
            losses += sum(self._step(w, rows).loss * len(rows) for _, rows in portion)
            self.players[self.rng.integers(len(self.players))].todo += portion
        for player in self.rng.permutation(self.players):
            player.advance()
        return losses, self.problem.samples


def trajectory(problem, workers, servers, iterations=10, gradient_norm_min=0.0, **options):
    replicas = Replicas(problem, workers, servers, **options)
    side = LBFGS(Options(iterations=iterations, gradient_norm_min=gradient_norm_min))
    drive(side, replicas.shards, replicas)
    return np.array(replicas.points), replicas


@pytest.mark.oracle("sandblaster", "one worker and one server: every point")
@pytest.mark.parametrize(("workers", "servers"), [(1, 3), (4, 1), (3, 2), (7, 5)])
def test_the_points_do_not_depend_on_the_number_of_workers_and_servers(workers, servers, agree):
    problem = LeastSquares(samples=250, size=12)
    alone, _ = trajectory(problem, 1, 1)
    points, replicas = trajectory(problem, workers, servers)
    agree(points, alone, atol=1e-6)
    assert all(player.fetches <= len(points) for player in replicas.players)
    kinds = [kind for kinds in replicas.shards.settled(1).values() for kind in kinds]
    assert set(kinds) == {APPLIED}


def test_the_points_depend_on_batch_and_portion_size_only_by_rounding():
    problem = LeastSquares(samples=250, size=12)
    alone, _ = trajectory(problem, 1, 1, iterations=5)
    points, _ = trajectory(problem, 3, 2, iterations=5, batch_size=5, portion_batches=7)
    assert np.abs(points - alone).max() <= 1e-5


@pytest.mark.oracle("sandblaster", "numpy.linalg.lstsq: the minimum")
def test_it_finds_the_known_minimum_of_a_least_squares_problem(agree):
    problem = LeastSquares(samples=250, size=12)
    points, replicas = trajectory(problem, 3, 2, iterations=25, gradient_norm_min=1e-5)
    best = np.linalg.lstsq(problem.x, problem.y, rcond=None)[0]
    agree(replicas.shards.whole(), best, atol=2e-5)
    assert len(points) < 20


@pytest.mark.oracle("sandblaster", "scipy.optimize.minimize, BFGS: the loss")
def test_it_finds_the_minimum_of_a_logistic_regression(agree):
    problem = Logistic(samples=240, distance=1.0)
    _, replicas = trajectory(problem, 2, 2, iterations=40)

    def f(w):
        return np.logaddexp(0, -problem.y * (problem.x @ w)).mean()

    best = minimize(f, np.zeros(10), method="BFGS").fun
    agree(f(replicas.shards.whole().astype(float)), best, atol=1e-8)


# ---------------------------------------------------------------- one replica


def test_a_replica_fetches_once_per_batch_before_it_computes_and_pushes_sums():
    parameters = np.zeros(4, np.float32)
    side = replica(SANDBLASTER, parameters)
    run = side.run()
    gradient = np.array([1, 2, 3, 4], np.float32)
    assert next(run) == NextData()
    assert run.send(None) == NextData(), "there is nothing to push"
    assert run.send(NextBatch(0, 5, False)) == Read(wait=True)
    assert run.send(0) == Gradient()
    assert run.send(Step(gradient, 3, 1.0)) == NextData()
    assert run.send(NextBatch(0, 5, True)) == Gradient()
    push = run.send(Step(2 * gradient, 2, 1.0))
    assert (push.samples, push.clock, push.part) == (5, 0, 5)
    assert np.array_equal(push.vector, 7 * gradient)
    assert run.send(None) == NextData()
    assert run.send(NextBatch(0, 6, True)) == Gradient(), "the parameters are those of this batch"
    assert np.array_equal(run.send(Step(gradient, 1, 1.0)).vector, gradient)
    assert run.send(None) == NextData()
    assert run.send(NextBatch(1, 0, True)) == Read(wait=True)


def test_what_is_not_finite_is_left_out_and_a_portion_of_nothing_is_not_pushed():
    side = replica(SANDBLASTER, np.zeros(2, np.float32))
    run = side.run()
    next(run)
    run.send(NextBatch(0, 0, True))
    assert run.send(0) == Gradient()
    assert run.send(None) == NextData()
    assert run.send(NextBatch(0, 1, False)) == Gradient()
    assert run.send(Step(np.ones(2, np.float32), 3, 1.0)) == NextData()
    assert run.send(NextBatch(0, 1, True)) == Gradient()
    push = run.send(None)
    assert (push.samples, push.part) == (3, 1)


# ---------------------------------------------------------------- one shard


@pytest.fixture
def shards():
    return Shards(SANDBLASTER, np.zeros(4, np.float32), 2)


ONES = np.ones(4, np.float32)


def write(samples, clock, portion):
    return Write(table="accrued", vector=None, samples=samples, clock=clock, part=portion)


def test_a_portion_that_a_dead_worker_brought_to_some_shards_gets_to_the_others(shards):
    shards.push_to(0, write(8, 0, 3), ONES, (0, 1, 0))  # It dies here.
    shards.push(write(8, 0, 3), ONES, (1, 1, 0))
    assert np.array_equal(shards.whole("accrued"), ONES)
    assert shards.tables[1].outcomes[0, 1, 1, 0] == [LATE]
    assert shards.tables[1].outcomes[1, 1, 1, 0] == [APPLIED]


def test_the_first_push_of_a_batch_takes_the_place_of_the_batch_before(shards):
    for portion in range(2):
        shards.push(write(8, 0, portion), ONES, (1, 1, portion))
    shards.push(write(8, 0, 1), ONES, (0, 1, 0))
    assert np.array_equal(shards.whole("accrued"), 2 * ONES)
    shards.push(write(8, 1, 0), 5 * ONES, (1, 1, 2))
    shards.push(write(8, 0, 2), ONES, (0, 1, 1))
    assert np.array_equal(shards.whole("accrued"), 5 * ONES)
    outcomes = shards.tables[1].outcomes
    assert outcomes[0, 0, 1, 0] == outcomes[0, 0, 1, 1] == [LATE]


def test_pushes_touch_neither_the_parameters_nor_the_version(shards):
    shards.push(write(8, 0, 0), ONES, (0, 1, 0))
    assert not shards.whole().any()
    assert [side.clock() for side in shards.sides] == [0, 0]


def test_a_part_beyond_all_that_a_commit_can_tell_of_is_refused(shards):
    shards.push(write(8, 0, PARTS_MAX), ONES, (0, 1, 0))
    assert shards.tables[1].outcomes[0, 0, 1, 0] == [REFUSED]
    assert not shards.whole("accrued").any()


# ---------------------------------------------------------------- vectors


def op(number, *changes, sums=()):
    return message_of(number, VectorRequest(changes, tuple(sums)))


def test_a_change_is_made_once_however_often_and_late_its_message_comes(shards):
    vectors, whole = shards.vectors[0], lambda: shards.tables[shards.numbers["x"]].shards[0].w
    shards.put("x", np.ones(4))
    double = op(1, Change("copy", "x", "x", 2.0), sums=[Sum("dot", "x", "x")])
    assert [vectors.run(double) for _ in range(3)] == [(8.0,)] * 3
    add = op(2, Change("copy", "x", "g"), Change("axpy", "g", "x", 0.5))
    assert [vectors.run(add) for _ in range(2)] == [()] * 2
    assert vectors.run(double) == (), "nobody waits for it any more"
    assert vectors.newest == 2
    assert np.array_equal(whole(), [3, 3])


def test_changes_that_a_killed_server_had_not_made_are_made_when_the_message_comes_again(shards):
    vectors = shards.vectors[0]
    shards.put("x", np.ones(4))
    first = Change("axpy", "x", "g", 1.0)
    vectors.run(op(1, first))  # All that it had committed of what follows.
    both = op(1, first, Change("axpy", "g", "d", 2.0), sums=[Sum("norm1", "d")])
    assert vectors.run(both) == (4.0,)
    assert vectors.run(both) == (4.0,)


def test_a_change_that_would_not_be_finite_is_kept_nowhere(shards):
    shards.put("x", np.array([1.0, 1e200, 1.0, 1.0]))
    with pytest.raises(Diverged, match='made "w" infinite'):
        shards.vectors[0].run(op(1, Change("copy", "x", "w")))
    assert not shards.whole().any()
    assert shards.vectors[0].newest == 0


def test_a_push_of_a_batch_far_ahead_is_refused_and_the_next_ones_count(shards):
    shards.push(write(8, 2**40, 0), ONES, (0, 1, 0))
    shards.push(write(8, 0, 0), ONES, (1, 1, 0))
    outcomes = shards.tables[1].outcomes
    assert (outcomes[0, 0, 1, 0], outcomes[0, 1, 1, 0]) == ([REFUSED], [APPLIED])


def test_the_sum_of_magnitudes_is_taken_over_all_shards(shards):
    shards.put("x", np.array([1.0, -2.0, 3.0, -4.0]))
    assert shards.perform(VectorRequest(sums=(Sum("norm1", "x"),))) == (10.0,)


# ---------------------------------------------------------------- job files


@pytest.mark.parametrize(
    ("compression", "key"),
    [
        ('compression = { name = "topk" }', "compression.name"),
        ('compression = { name = "fp16" }', "compression.name"),
        ('compression = { name = "none", values = "float16" }', "compression.values"),
    ],
)
def test_a_compression_that_would_falsify_the_sums_is_refused(compression, key, tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text(
        f'job = {{ name = "a", task = "train.py:task" }}\nalgorithm.name = "sandblaster"\n'
        f"{compression}\n"
    )
    with pytest.raises(UsageError) as e:
        jobfile.load(tmp_path / "job.toml")
    assert [problem.key for problem in e.value.problems] == ["algorithm.name", key]


def test_parameters_that_the_servers_would_round_are_refused(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "job.toml").write_text(
        'job = { name = "a", task = "train.py:task" }\nalgorithm.name = "sandblaster"\n'
        'servers.fetch_values = "bfloat16"\n'
    )
    with pytest.raises(UsageError) as e:
        jobfile.load(tmp_path / "job.toml")
    keys = [problem.key for problem in e.value.problems]
    assert keys == ["algorithm.name", "servers.fetch_values"]
