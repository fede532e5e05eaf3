"""How attention's integral over time becomes a sum over samples.

    y(t_i) = 1/Z_i * integral from t_0 to t_i of exp(q_i.k(s) / sqrt(E)) v(s) ds  ~  sum_k w_ik exp(...) v_k / Z_i

The rectangle rule holds the integrand at its value at t_k from t_{k-1} on, so w_ik = d_k, and with durations of one
unit it is the ordinary Transformer. The trapezoidal rule runs straight between samples, so w_ik = (d_k + d_{k+1}) / 2
and w_ii = d_i / 2; before t_1 the integrand is held, as there is no sample at t_0.

The error falls with the first power of the distance between samples for rectangles, with the second for trapezoids.

Axes: N samples as queries and as keys.
"""

from typing import Literal

import torch

Rule = Literal["rectangle", "trapezoid"]
RULES = ("rectangle", "trapezoid")


def quadrature_weights(durations_N: torch.Tensor, rule: Rule = "rectangle", first: int = 0) -> torch.Tensor:
    """w [N - first, N] of queries i from `first` on and all samples k; 0 for samples behind the query.

    A row sums to the time up to t_i.
    """
    num_queries = len(durations_N) - first
    if rule == "rectangle":
        return durations_N.expand(num_queries, -1).tril(first)
    if rule != "trapezoid":
        raise ValueError(f"rule={rule!r}: choose one of {', '.join(RULES)}.")
    half_N = durations_N / 2
    start_N = half_N.clone()  # the half of its own interval; the first sample has all of it
    start_N[0] = durations_N[0]
    rest_N = torch.cat([half_N[1:], half_N.new_zeros(1)])  # the half of the next interval, once it is complete
    return start_N.expand(num_queries, -1).tril(first) + rest_N.expand(num_queries, -1).tril(first - 1)
