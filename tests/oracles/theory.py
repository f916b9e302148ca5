"""Theorem 1 and its appendix, read from the paper line by line: loops over nodes and exits, nothing shared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Given:
    """The symbols of the theorem; i counts nodes and e exits from 0. sigma2[i][e], p[i][e], G[i][e]."""

    Lambda: Sequence[float]
    S: Sequence[float]
    p: Sequence[Sequence[float]]
    Pdim: Sequence[float]
    sigma2: Sequence[Sequence[float]]
    G: Sequence[Sequence[float]]
    M: float
    L: float
    mu: float
    Gamma: float
    distance2: float
    T: int
    J: int
    eta_s: float
    C: float


def _s_ep(given: Given, e: int) -> float:
    total = 0.0
    for i in range(len(given.S)):
        if given.p[i][e] > 0:
            total += given.S[i]
    return total


def _alpha(given: Given, weights: Sequence[float], i: int, e: int) -> float:
    return given.eta_s * weights[e] * given.S[i] / _s_ep(given, e)


def generalisation(given: Given, weights: Sequence[float]) -> float:
    total = 0.0
    for e in range(len(weights)):
        total += weights[e] * given.M * given.C * math.sqrt(given.Pdim[e] / _s_ep(given, e))
    return total


def bias(given: Given, weights: Sequence[float]) -> float:
    tv = 0.0
    for e in range(len(weights)):
        tv += abs(weights[e] - given.Lambda[e]) / 2
    return 2 * given.M * tv


def noise(given: Given, weights: Sequence[float]) -> float:
    total = 0.0
    for i in range(len(given.S)):
        for e in range(len(weights)):
            if given.p[i][e] > 0:
                total += _alpha(given, weights, i, e) ** 2 * given.sigma2[i][e]
    return total


def heterogeneity(given: Given) -> float:
    return 6 * given.L * given.Gamma


def drift(given: Given) -> float:
    g_squared = 0.0
    for i in range(len(given.S)):
        for e in range(len(given.Lambda)):
            if given.p[i][e] > 0:
                g_squared = max(g_squared, given.G[i][e])
    return 8 * (given.J - 1) ** 2 * g_squared


def sampling(given: Given, weights: Sequence[float]) -> float:
    total = 0.0
    for i in range(len(given.S)):
        for e in range(len(weights)):
            if given.p[i][e] > 0:
                p = given.p[i][e]
                total += _alpha(given, weights, i, e) ** 2 * (1 - p) / p * given.G[i][e]
    return 4 * given.J**2 * total


def joint_noise(given: Given, weights: Sequence[float]) -> float:
    """What noise can add up to where a node takes the gradients of all its exits from one batch."""
    total = 0.0
    for i in range(len(given.S)):
        aligned = 0.0
        for e in range(len(weights)):
            if given.p[i][e] > 0:
                aligned += _alpha(given, weights, i, e) * math.sqrt(given.sigma2[i][e])
        total += aligned**2
    return total


def joint_sampling(given: Given, weights: Sequence[float]) -> float:
    """Likewise, where one draw decides for all exits of a node."""
    total = 0.0
    for i in range(len(given.S)):
        aligned, absence = 0.0, 0.0
        for e in range(len(weights)):
            if given.p[i][e] > 0:
                aligned += _alpha(given, weights, i, e) * math.sqrt(given.G[i][e])
                absence = (1 - given.p[i][e]) / given.p[i][e]  # the same for all of them
        total += absence * aligned**2
    return 4 * given.J**2 * total


def optimisation(given: Given, weights: Sequence[float]) -> float:
    kappa = given.L / given.mu
    gamma = max(8 * kappa, given.J) - 1
    b = noise(given, weights) + heterogeneity(given) + drift(given) + sampling(given, weights)
    return kappa / (gamma + given.J * given.T) * (2 * b / given.mu + given.mu * (gamma + 1) / 2 * given.distance2)


def total(given: Given, weights: Sequence[float]) -> float:
    return 2 * generalisation(given, weights) + 2 * bias(given, weights) + optimisation(given, weights)


def gradient_bound(sigma2: float, smoothness: float, diam: float) -> float:
    return sigma2 + (smoothness * diam) ** 2


def statistical_heterogeneity(
    at_best: Sequence[Sequence[float]], least: Sequence[Sequence[float]], p: Sequence[Sequence[float]]
) -> float:
    largest = -math.inf
    for i in range(len(p)):
        for e in range(len(p[i])):
            if p[i][e] > 0:
                largest = max(largest, at_best[i][e] - least[i][e])
    return largest


def least_generalisation(given: Given) -> list[float]:
    """Zero for all exits except the one with the lowest Pdim(H_e) / |S_{e,p}|; equal parts where there are several."""
    ratios = [given.Pdim[e] / _s_ep(given, e) for e in range(len(given.Lambda))]
    lowest = [ratio == min(ratios) for ratio in ratios]
    return [1 / sum(lowest) if low else 0.0 for low in lowest]


def least_noise(given: Given) -> list[float]:
    """Inversely proportional to what weight 1 on the exit alone adds to B's first part."""
    return _inversely([noise(given, _only(given, e)) for e in range(len(given.Lambda))])


def least_optimisation(given: Given) -> list[float]:
    """Inversely proportional to what weight 1 on the exit alone adds to B."""
    exits = range(len(given.Lambda))
    return _inversely([noise(given, _only(given, e)) + sampling(given, _only(given, e)) for e in exits])


def _only(given: Given, exit: int) -> list[float]:
    return [float(e == exit) for e in range(len(given.Lambda))]


def _inversely(costs: Sequence[float]) -> list[float]:
    total = sum(1 / cost for cost in costs)
    return [1 / cost / total for cost in costs]
