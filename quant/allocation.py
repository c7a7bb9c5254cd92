"""How many tokens to keep at which precision: the least predicted error of attention for a number of bits.

Attention gives o = sum_i p_i v_i. Storing token i at b bits moves v_i by an error of zero mean and variance
Range(v_i)**2 / (12 (2**b - 1)**2) per element, and k_i by one that moves its logit by eta_i. To first order

    delta o = sum_i p_i (error of v_i) + sum_i p_i eta_i (v_i - o)

Errors of different tokens are independent, so their squares add up. With |v_i - o|**2 per element close to
(Range(v_i) / c)**2, where c is the width of a vector in standard deviations, every term has the factor

    S_i = (p_i Range(v_i))**2                                  the sensitivity of token i

    E |delta o|**2 per element = sum_i S_i e(b_i)
    e(b) = 1 / (12 (2**b - 1)**2)          values of b bits
    e(0) = 1 / c**2                        evicted: the term p_i (v_i - o) is missing
    e(16) = 0                              nothing changes

Keys of b bits add kappa / (12 (2**b - 1)**2) with kappa = scaling**2 |q|**2 Range(k)**2 / c**2. That is 38 on
SmolLM2 (median over layers, 15 after a Hadamard rotation): keys need more bits than values, and at 2 bits their logits
are off by more than a first-order term describes. So a ladder bounds the bits of keys from below instead, and leaves
kappa out of the choice among rungs; with it, allocations came out worse on the same layers, not better.

The minimum under a budget of bits is a matter of slopes: for a price lambda per bit every token takes the rung that
minimizes S_i e(b) + lambda * bits(b), which gives more bits to a larger S_i, and lambda is raised until the bits
suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

# Expected width, maximum minus minimum, of 64 independent normal numbers, in standard deviations.
WIDTH = 4.64
EVICTED = 1.0 / WIDTH**2


def rung_error(bits: int) -> float:
    """e(b): error per unit of sensitivity; 16 bits count as exact, 0 bits as evicted."""
    if bits >= 16:
        return 0.0
    return EVICTED if bits == 0 else 1 / (12 * (2**bits - 1) ** 2)


def allocate(sensitivities: Tensor, errors: Sequence[float], costs: Sequence[float], budget: float) -> list[int]:
    """How many tokens to put on each rung so that the predicted error is least.

    Args:
        sensitivities: (N,) S_i >= 0, in any order; the tokens of larger S_i belong on the rungs of smaller error.
        errors: e of each rung, ascending. costs: bits or bytes of a token on each rung, descending.
        budget: in the unit of costs, for all tokens together.

    Returns:
        Tokens on each rung. Exact up to the bits that are left over, fewer than moving one token up would take.

    Raises:
        ValueError: if all tokens on the cheapest rung cost more than the budget.
    """
    count = len(sensitivities)
    if count * costs[-1] > budget + 1e-9:
        raise ValueError(f"budget: {budget:g} is less than {count} tokens need at least, {count * costs[-1]:g}")
    ordered = sensitivities.double().sort(descending=True).values
    error = torch.tensor(errors, dtype=torch.float64)
    cost = torch.tensor(costs, dtype=torch.float64)

    def rungs(price: float) -> Tensor:
        return (ordered[:, None] * error + price * cost).argmin(dim=1)

    cheap, dear = 0.0, 1.0
    while float(cost[rungs(dear)].sum()) > budget:
        dear *= 4
        if dear > 1e300:
            return [0] * (len(costs) - 1) + [count]
    for _ in range(200):
        middle = (cheap + dear) / 2
        if float(cost[rungs(middle)].sum()) > budget:
            cheap = middle
        else:
            dear = middle
    return _spend(rungs(dear), cost, budget)


def _spend(chosen: Tensor, cost: Tensor, budget: float) -> list[int]:
    """Move tokens up by one rung, the most sensitive of each rung first, while bits are left."""
    counts = torch.bincount(chosen, minlength=len(cost)).tolist()
    left = budget - sum(n * c for n, c in zip(counts, cost.tolist(), strict=True))
    for rung in range(1, len(counts)):
        step = float(cost[rung - 1] - cost[rung])
        moved = min(counts[rung], int((left + 1e-9) / step)) if step > 0 else 0
        counts[rung] -= moved
        counts[rung - 1] += moved
        left -= moved * step
    return [int(n) for n in counts]


def lognormal_sensitivities(count: int, spread: float) -> Tensor:
    """(count,) quantiles of a sensitivity whose logarithm is normal with standard deviation ``spread``."""
    normal = NormalDist(sigma=spread)
    return torch.tensor([normal.inv_cdf((i + 0.5) / count) for i in range(count)], dtype=torch.float64).exp()


# Tokens over which shares repeat: fine enough for any share, short enough to tabulate.
_CYCLE = 1000


def apportion(shares: tuple[float, ...], count: int) -> tuple[int, ...]:
    """Split ``count`` tokens by ``shares`` so that no part shrinks when ``count`` grows (Sainte-Lague).

    Args:
        shares: add up to 1.
    """
    table = _apportioned(shares)
    cycles, rest = divmod(count, _CYCLE)
    return tuple(cycles * whole + part for whole, part in zip(table[_CYCLE], table[rest], strict=True))


@lru_cache(maxsize=64)
def _apportioned(shares: tuple[float, ...]) -> list[tuple[int, ...]]:
    """Split of 0, 1, ..., _CYCLE tokens; each next one goes to the part that is furthest behind."""
    counts = [0] * len(shares)
    table = [tuple(counts)]
    for _ in range(_CYCLE):
        behind = [share / (2 * count + 1) for share, count in zip(shares, counts, strict=True)]
        counts[behind.index(max(behind))] += 1
        table.append(tuple(counts))
    return table
