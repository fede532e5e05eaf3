"""The fold, written out from its equations: one row, one segment, one layer, one head at a time.

Float64 throughout, global positions, no cache, no batch, no code shared with the package.
"""

import torch


def reference_hidden(weights: dict, config, embeddings_ND, durations_N=None, detach_after: int | None = None):
    """Final hidden states [N, D] of one text; `weights` is a Llama's state dict in float64.

    `detach_after=k` cuts the graph behind segments k, 2k, 3k ...
    """
    length, eps = config.segment_length, config.rms_norm_eps
    num_tokens = len(embeddings_ND)
    durations_N = torch.ones(num_tokens, dtype=torch.float64) if durations_N is None else durations_N.double()
    ends_N = durations_N.cumsum(0)
    positions_N = ends_N if config.position_anchor == "end" else ends_N - durations_N

    remembered = [None] * config.num_hidden_layers  # per layer: what it keeps of the segment before
    hidden_ND = []
    for segment, start in enumerate(range(0, num_tokens, length)):
        here = slice(start, min(start + length, num_tokens))
        before = slice(max(start - length, 0), start)
        x_TD = embeddings_ND[here]
        for n in range(config.num_hidden_layers):
            w = {k.split(f"model.layers.{n}.", 1)[1]: v for k, v in weights.items() if f"model.layers.{n}." in k}
            context_KD = x_TD if remembered[n] is None else torch.cat([remembered[n], x_TD])
            positions_K = torch.cat([positions_N[before], positions_N[here]]) if segment else positions_N[here]
            weights_K = torch.cat([durations_N[before], durations_N[here]]) if segment else durations_N[here]
            y_TD = _layer(w, config, eps, x_TD, context_KD, positions_K, weights_K)
            remembered[n] = y_TD if config.memory_source == "layer_output" else x_TD
            if detach_after and (segment + 1) % detach_after == 0:
                remembered[n] = remembered[n].detach()
            x_TD = y_TD
        hidden_ND.append(_norm(x_TD, weights["model.norm.weight"], eps))
    return torch.cat(hidden_ND)


def reference_logits(weights: dict, config, ids_N, durations_N=None, detach_after: int | None = None):
    embeddings = weights["model.embed_tokens.weight"][ids_N]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return reference_hidden(weights, config, embeddings, durations_N, detach_after) @ head.T


def reference_loss(weights: dict, config, ids_N, detach_after: int | None = None):
    """Mean of -log p(next token), one token at a time."""
    log_p_NV = reference_logits(weights, config, ids_N, detach_after=detach_after).log_softmax(-1)
    return -sum(log_p_NV[i, ids_N[i + 1]] for i in range(len(ids_N) - 1)) / (len(ids_N) - 1)


def _layer(w, config, eps, x_TD, context_KD, positions_K, weights_K):
    num_queries, num_keys, width = len(x_TD), len(context_KD), config.head_dim
    normed_TD = _norm(x_TD, w["input_layernorm.weight"], eps)
    normed_KD = _norm(context_KD, w["input_layernorm.weight"], eps)
    q = _linear(w, "self_attn.q_proj", normed_TD)
    k = _linear(w, "self_attn.k_proj", normed_KD)
    v = _linear(w, "self_attn.v_proj", normed_KD)
    group = config.num_attention_heads // config.num_key_value_heads
    heads = []
    for h in range(config.num_attention_heads):
        mine, shared = slice(h * width, (h + 1) * width), slice(h // group * width, (h // group + 1) * width)
        q_TE = _rotate(q[:, mine], positions_K[num_keys - num_queries :], config)
        k_KE = _rotate(k[:, shared], positions_K, config)
        rows = []
        for t in range(num_queries):
            visible = num_keys - num_queries + t + 1
            scores = k_KE[:visible] @ q_TE[t] / width**0.5 + weights_K[:visible].log()
            rows.append(scores.softmax(-1) @ v[:visible, shared])
        heads.append(torch.stack(rows))
    x_TD = x_TD + _linear(w, "self_attn.o_proj", torch.cat(heads, dim=-1))
    normed_TD = _norm(x_TD, w["post_attention_layernorm.weight"], eps)
    gate = torch.nn.functional.silu(_linear(w, "mlp.gate_proj", normed_TD))
    return x_TD + _linear(w, "mlp.down_proj", gate * _linear(w, "mlp.up_proj", normed_TD))


def _linear(w, name, x):
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _rotate(x_NE, positions_N, config):
    half = x_NE.shape[-1] // 2
    base = config.rope_parameters["rope_theta"]
    angle_Nh = positions_N[:, None] * base ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = x_NE[:, :half], x_NE[:, half:]
    return torch.cat([a * angle_Nh.cos() - b * angle_Nh.sin(), b * angle_Nh.cos() + a * angle_Nh.sin()], dim=-1)
