"""The equations of the model as a plain loop: one row, one segment, one layer, one head, one query at a time.

    memory        M = Y_n(s - 1), layer n's own output for segment s - 1            (equation 17; none in segment 1)
                  or X_n(s - 1) + a_n (Y_n(s - 1) - X_n(s - 1)) with a share a_n of it
    sink          M's first row is the layer's input for a lone token, if there is a sink_token_id
    keys, values  K = [M ; X_n(s)] W_K,  V = [M ; X_n(s)] W_V                       (18, 19)
    queries       Q = X_n(s) W_Q, which see M and, causally, X_n(s)                 (20)
    durations     y = sum_k softmax_k(q . k_k / sqrt(E) + log d_k) v_k, at positions that are cumulative durations

Tests compare the model with this module. It shares no code with the rest of the package, uses global positions, and has
neither cache nor batch. It computes in the dtype of the weights: pass float64.

Axes: N tokens of the text, L segment length, T tokens of a segment (queries), K keys, D hidden size, H query heads, G
key/value heads, E head dimension, V vocabulary, h half a head dimension.
"""

from typing import Any

import torch
from torch import Tensor


def reference_hidden(
    weights: dict[str, Tensor],
    config: Any,
    embeddings_ND: Tensor,
    durations_N: Tensor | None = None,
    detach_after: int | None = None,
) -> Tensor:
    """Returns the final hidden states [N, D] of one text.

    weights: a Llama's state dict. detach_after: k detaches the memory after segments k, 2k, 3k ...
    """
    length, num_tokens = config.segment_length, len(embeddings_ND)
    durations_N = torch.ones(num_tokens, dtype=torch.float64) if durations_N is None else durations_N.double()
    ends_N = durations_N.cumsum(0)
    positions_N = ends_N if config.position_anchor == "end" else ends_N - durations_N

    share, num_layers = config.memory_share, config.num_hidden_layers
    shares = [0] * num_layers if config.memory_source == "layer_input" else share
    shares = shares if isinstance(shares, list) else [share] * num_layers
    memories: list[Tensor | None] = [None] * num_layers  # M of each layer
    layers = [
        {k.split(f"model.layers.{n}.", 1)[1]: v for k, v in weights.items() if f"model.layers.{n}." in k}
        for n in range(num_layers)
    ]
    sinks = None if config.sink_token_id is None else sink_inputs(weights, layers, config)
    hidden_ND = []
    for segment, start in enumerate(range(0, num_tokens, length)):
        current = slice(start, min(start + length, num_tokens))
        both = slice(max(start - length, 0), current.stop)  # the previous segment and the current one
        x_TD, positions_K, durations_K = embeddings_ND[current], positions_N[both], durations_N[both]
        if sinks and segment:  # a token of one unit at the beginning of the two segments
            first = positions_K[0] - (durations_K[0] - 1 if config.position_anchor == "end" else 0)
            positions_K = torch.cat([first[None], positions_K[1:]])
            durations_K = torch.cat([torch.ones_like(durations_K[:1]), durations_K[1:]])
        for n, w in enumerate(layers):
            memory_LD = memories[n]
            if sinks and memory_LD is not None:
                memory_LD = torch.cat([sinks[n], memory_LD[1:]])
            context_KD = x_TD if memory_LD is None else torch.cat([memory_LD, x_TD])  # [M ; X]
            y_TD = decoder_layer(w, config, x_TD, context_KD, positions_K, durations_K)
            memory_LD = x_TD + shares[n] * (y_TD - x_TD)
            memories[n] = memory_LD.detach() if detach_after and (segment + 1) % detach_after == 0 else memory_LD
            x_TD = y_TD
        hidden_ND.append(rms_norm(x_TD, weights["model.norm.weight"], config))
    return torch.cat(hidden_ND)


def reference_logits(weights: dict, config, ids_N, durations_N=None, detach_after: int | None = None):
    """Returns the logits [N, V] of one text."""
    embeddings_ND = weights["model.embed_tokens.weight"][ids_N]
    head_VD = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return reference_hidden(weights, config, embeddings_ND, durations_N, detach_after) @ head_VD.T


def reference_loss(weights: dict, config, ids_N, detach_after: int | None = None):
    """Returns the mean of -log p(next token) over the tokens of one text."""
    log_p_NV = reference_logits(weights, config, ids_N, detach_after=detach_after).log_softmax(-1)
    return -sum(log_p_NV[i, ids_N[i + 1]] for i in range(len(ids_N) - 1)) / (len(ids_N) - 1)


def sink_inputs(weights: dict[str, Tensor], layers, config) -> list[Tensor]:
    """Returns the input [1, D] of each layer for a text that is the sink alone."""
    x_1D = weights["model.embed_tokens.weight"][config.sink_token_id][None]
    inputs, position_1, duration_1 = [], torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for w in layers:
        inputs.append(x_1D)
        x_1D = decoder_layer(w, config, x_1D, x_1D, position_1, duration_1)
    return inputs


def decoder_layer(w, config, x_TD, context_KD, positions_K, durations_K):
    normed_TD = rms_norm(x_TD, w["input_layernorm.weight"], config)
    normed_KD = rms_norm(context_KD, w["input_layernorm.weight"], config)
    q_THE = linear(w, "self_attn.q_proj", normed_TD).unflatten(-1, (-1, config.head_dim))
    k_KGE = linear(w, "self_attn.k_proj", normed_KD).unflatten(-1, (-1, config.head_dim))
    v_KGE = linear(w, "self_attn.v_proj", normed_KD).unflatten(-1, (-1, config.head_dim))
    num_queries, num_keys = len(x_TD), len(context_KD)
    heads_per_group = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for head in range(config.num_attention_heads):
        group = head // heads_per_group
        q_TE = head_norm(w, "self_attn.q_norm", q_THE[:, head], config)
        k_KE = head_norm(w, "self_attn.k_norm", k_KGE[:, group], config)
        q_TE = rotate(q_TE, positions_K[num_keys - num_queries :], config)
        k_KE = rotate(k_KE, positions_K, config)
        outputs = []
        for t in range(num_queries):
            visible = num_keys - num_queries + t + 1
            scores = k_KE[:visible] @ q_TE[t] / config.head_dim**0.5 + durations_K[:visible].log()
            outputs.append(scores.softmax(-1) @ v_KGE[:visible, group])
        heads.append(torch.stack(outputs))
    x_TD = x_TD + linear(w, "self_attn.o_proj", torch.cat(heads, dim=-1))
    normed_TD = rms_norm(x_TD, w["post_attention_layernorm.weight"], config)
    gate = torch.nn.functional.silu(linear(w, "mlp.gate_proj", normed_TD))
    return x_TD + linear(w, "mlp.down_proj", gate * linear(w, "mlp.up_proj", normed_TD))


def linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def head_norm(w, name, x, config):
    """Norms the queries and keys of each head, if the family does."""
    return rms_norm(x, w[f"{name}.weight"], config) if f"{name}.weight" in w else x


def rms_norm(x, weight, config):
    return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def rotate(x_NE, positions_N, config):
    half = x_NE.shape[-1] // 2
    base = config.rope_parameters["rope_theta"]
    angle_Nh = positions_N[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x_NE[:, :half], x_NE[:, half:]
    return torch.cat([a * angle_Nh.cos() - b * angle_Nh.sin(), b * angle_Nh.cos() + a * angle_Nh.sin()], dim=-1)
