"""Optimisers of matrices of one process, by the formulas of their papers, in float64 by torch."""

from __future__ import annotations

import torch
from torch import Tensor


class ByFormula:
    """One optimiser for the parameters of a model. step: of one matrix, from (w, g, state, t)."""

    def __init__(self, name: str, options: dict, shapes: list[tuple[int, ...]], adam_lr: float):
        self.matrix, self.o = MATRIX[name], options
        self.rest = REST.get(name, adamw)
        self.first = 1 if name == "soap" else 0
        self.shapes, self.adam_lr = shapes, adam_lr
        self.states: list[dict[str, Tensor]] = [{} for _ in shapes]
        self.t = 0

    def step(self, w: Tensor, g: Tensor) -> Tensor:
        """float64[d]: the flat parameters after a step along the flat gradient."""
        self.t += 1
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        parts = zip(w.split(sizes), g.split(sizes), self.shapes, self.states, strict=True)
        done = []
        for each, gradient, shape, state in parts:
            at = each.view(shape), gradient.view(shape), state
            if len(shape) == 2:
                done.append(self.matrix(*at, self.t, self.o).ravel())
            elif self.t > self.first:
                done.append(self.rest(*at, self.t - self.first, self.o | {"lr": self.adam_lr}))
            else:
                done.append(each)
        return torch.cat(done)


def adamw(w, g, state, t, o):
    m, v = means(state, g, g * g, o)
    w = w * (1 - o["lr"] * o["weight_decay"])
    return w - o["lr"] * (m / (1 - o["beta1"] ** t)) / (
        (v / (1 - o["beta2"] ** t)).sqrt() + o["eps"]
    )


def means(state, g, square, o):
    state["m"] = o["beta1"] * state.get("m", torch.zeros_like(g)) + (1 - o["beta1"]) * g
    state["v"] = o["beta2"] * state.get("v", torch.zeros_like(g)) + (1 - o["beta2"]) * square
    return state["m"], state["v"]


def muon(w, g, state, t, o):
    mu = o["momentum"]
    state["m"] = mu * state.get("m", torch.zeros_like(g)) + (1 - mu) * g
    u = (1 - mu) * g + mu * state["m"]
    values = torch.linalg.svd(u / u.norm(), full_matrices=False)
    s = values.S
    for _ in range(5):  # Of the singular values alone: the vectors stay.
        s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
    x = values.U @ torch.diag(s) @ values.Vh
    return w * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * max(1, len(w) / w.shape[1]) ** 0.5 * x


def soap(w, g, state, t, o):
    beta = o["shampoo_beta"]
    if t == 1:
        state["L"], state["R"] = (1 - beta) * g @ g.T, (1 - beta) * g.T @ g
        for side in "LR":
            state[f"Q{side}"] = torch.linalg.eigh(state[side])[1].flip(1)
        return w
    t -= 1
    left, right = state["QL"], state["QR"]
    m, v = means(state, g, (left.T @ g @ right) ** 2, o)
    step = left @ ((left.T @ m @ right) / (v.sqrt() + o["eps"])) @ right.T
    w = w - o["lr"] * (1 - o["beta2"] ** t) ** 0.5 / (1 - o["beta1"] ** t) * step
    w = w - o["lr"] * o["weight_decay"] * w
    state["L"] = beta * state["L"] + (1 - beta) * g @ g.T
    state["R"] = beta * state["R"] + (1 - beta) * g.T @ g
    if t % o["frequency"] == 0:
        for axis, side in enumerate("LR"):
            product = state[side] @ state[f"Q{side}"]
            order = (state[f"Q{side}"].T @ product).diag().argsort(descending=True)
            state["v"] = state["v"].index_select(axis, order)
            state[f"Q{side}"] = torch.linalg.qr(product[:, order])[0]
    return w


def shampoo(w, g, state, t, o):
    beta = o["shampoo_beta"]
    m, v = means(state, g, g * g, o)
    m, v = m / (1 - o["beta1"] ** t), v / (1 - o["beta2"] ** t)
    step = m
    for side, gram in (("L", g @ g.T), ("R", g.T @ g)):
        state[side] = beta * state.get(side, torch.zeros_like(gram)) + (1 - beta) * gram
        if (t - 1) % o["frequency"] == 0:
            matrix = state[side] / (1 - beta**t)
            largest = torch.linalg.matrix_norm(matrix, 2)
            damped = matrix + o["epsilon"] * largest * torch.eye(len(matrix), dtype=w.dtype)
            # The inverse of the fourth root, as two square roots by the singular values.
            root = _square_root(_square_root(damped))
            state[f"root{side}"] = torch.linalg.inv(root)
        step = state["rootL"] @ step if side == "L" else step @ state["rootR"]
    length = (m / (v.sqrt() + o["eps"])).norm()
    return w * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * length / step.norm() * step


def _square_root(matrix):
    u, s, vh = torch.linalg.svd(matrix)
    return u @ torch.diag(s.sqrt()) @ vh


POLAR = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def lmo_way(g, state, t, o):
    """u, and the rate of this update."""
    beta, lr = o["momentum"], o["lr"]
    if o.get("parameter_free"):
        done = t - 1
        beta, lr = 1 - (1 / done**0.5 if done else 1.0), lr / (done + 1) ** 0.75
    state["B"] = beta * state.get("B", torch.zeros_like(g)) + (1 - beta) * g
    return beta * state["B"] + (1 - beta) * g, lr


def lmo(w, g, state, t, o):
    u, lr = lmo_way(g, state, t, o)
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    s = s / u.norm()
    for a, b, c in POLAR:  # Of the singular values alone: the vectors stay.
        s = a * s + b * s**3 + c * s**5
    return w - lr * max(1, len(w) / w.shape[1]) ** 0.5 * left @ torch.diag(s) @ right


def lmo_rest(w, g, state, t, o):
    u, lr = lmo_way(g, state, t, o)
    return w - lr * u


def isotropic(w, g, state, t, o):
    left, s, right = torch.linalg.svd(g, full_matrices=False)
    return nesterov(w, left @ (s.mean() * right), state, t, o)


def nesterov(w, g, state, t, o):
    state["m"] = o["momentum"] * state.get("m", torch.zeros_like(g)) + g
    return w - o["lr"] * (g + o["momentum"] * state["m"])


MATRIX = {"muon": muon, "soap": soap, "shampoo": shampoo, "lmo": lmo, "isotropic": isotropic}
REST = {"lmo": lmo_rest, "isotropic": nesterov}
