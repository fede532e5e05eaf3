"""Quadrature weights, with which a sum over samples approximates attention's integral over time.

    y(t_i) = 1/Z_i * integral from t_0 to t_i of exp(q_i.k(s) / sqrt(E)) v(s) ds  ~  sum_k w_ik exp(...) v_k / Z_i

In the rectangle rule the integrand has its value at t_k from t_{k-1} to t_k, so w_ik = d_k; durations of one unit give
the ordinary Transformer. In the trapezoid rule the integrand is linear between samples, so w_ik = (d_k + d_{k+1}) / 2
and w_ii = d_i / 2. It is constant before t_1, because there is no sample at t_0.

The error is of first order in the distance between samples for rectangles, and of second order for trapezoids.

Axes: N samples, T queries (the last samples), E head dimension.
"""

from typing import Literal, get_args

import torch

from condense.utils.choices import check_choice

Rule = Literal["rectangle", "trapezoid"]
RULES = get_args(Rule)


def quadrature_weights(durations_N: torch.Tensor, rule: Rule = "rectangle", first: int = 0) -> torch.Tensor:
    """Returns the weights w_ik [T, N] of all samples k for the queries i from `first` on; 0 after the query.

    Each row sums to t_i - t_0. Raises `ValueError` for an unknown rule.
    """
    check_choice("rule", rule, RULES)
    num_queries = len(durations_N) - first
    if rule == "rectangle":
        return durations_N.expand(num_queries, -1).tril(first)
    half_N = durations_N / 2
    start_N = half_N.clone()  # half of the sample's own interval; the first sample has the whole interval
    start_N[0] = durations_N[0]
    rest_N = torch.cat([half_N[1:], half_N.new_zeros(1)])  # half of the next interval, if it ends before the query
    return start_N.expand(num_queries, -1).tril(first) + rest_N.expand(num_queries, -1).tril(first - 1)
