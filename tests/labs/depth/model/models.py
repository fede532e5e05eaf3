"""Tiny models with a depth block, and their equations as a plain loop.

The reference shares no code with `condense.labs.depth`: it takes weights by name, one row and one segment at a time,
and global positions. Axes as in `condense.reference`; C components of the control.
"""

import torch

from condense.labs.depth.model import convert_to_depth
from condense.reference import decoder_layer, linear, rms_norm
from tests.condense.models import tiny_model


def depth_model(field="mlp", first=1, end=2, depth=None, seed=0, **fields):
    """A tiny model in float64 whose middle layer of three is a flow that moves far, with a control of two numbers."""
    model = tiny_model(seed=seed, **fields)
    settings = {"control_size": 2, "alpha": 0.7, **(depth or {})}
    convert_to_depth(model, first, end, field=field, **settings)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.model.layers[first].named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def random_control(*shape, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_logits(model, ids_N, control_NC, durations_N=None, detach_after=None):
    """Returns the logits [N, V] of one text; all tokens share a control [C]."""
    config, depth = model.config, model.config.depth
    weights = model.state_dict(keep_vars=True)
    control_NC = control_NC.expand(len(ids_N), -1)
    durations_N = torch.ones(len(ids_N), dtype=torch.float64) if durations_N is None else durations_N
    positions_N = durations_N.cumsum(0)
    memories, hidden_ND, length = {}, [], config.segment_length
    share = 0 if config.memory_source == "layer_input" else config.memory_share
    for segment, start in enumerate(range(0, len(ids_N), length)):
        cut = detach_after and (segment + 1) % detach_after == 0
        current = slice(start, min(start + length, len(ids_N)))
        both = slice(max(start - length, 0), current.stop)
        where = positions_N[both], durations_N[both]
        x_TD = weights["model.embed_tokens.weight"][ids_N[current]]
        for n in range(config.num_hidden_layers):
            prefix = f"model.layers.{n}."
            w = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
            memory = memories.get(n)
            if n != depth["position"]:
                context_KD = x_TD if memory is None else torch.cat([memory, x_TD])
                y_TD = decoder_layer(w, config, x_TD, context_KD, *where)
                source_TD = x_TD + share * (y_TD - x_TD)
                memories[n] = source_TD.detach() if cut else source_TD
            else:
                y_TD = reference_flow(w, config, depth, x_TD, control_NC[current], memory, where)
                if depth["field"] == "layer":
                    source_TD = x_TD + share * (y_TD - x_TD)
                    memories[n] = controlled(w, source_TD.detach() if cut else source_TD, control_NC[current])
            x_TD = y_TD
        hidden_ND.append(rms_norm(x_TD, weights["model.norm.weight"], config))
    return torch.cat(hidden_ND) @ weights["lm_head.weight"].T


def reference_flow(w, config, depth, x_TD, control_TC, memory_LD, where):
    def slope(tau, h_TD):
        if depth["field"] == "layer":
            h_TD = controlled(w, h_TD, control_TC)
            context_KD = h_TD if memory_LD is None else torch.cat([memory_LD, h_TD])
            inner = {name.removeprefix("field."): tensor for name, tensor in w.items()}
            return w["alpha"] * (decoder_layer(inner, config, h_TD, context_KD, *where) - h_TD)
        return w["alpha"] * reference_mlp(w, config, tau, h_TD, control_TC)

    h = 1 / depth["steps"]
    for step in range(depth["steps"]):
        tau = step * h
        k1 = slope(tau, x_TD)
        if depth["solver"] == "euler":
            x_TD = x_TD + h * k1
        elif depth["solver"] == "midpoint":
            x_TD = x_TD + h * slope(tau + h / 2, x_TD + h / 2 * k1)
        else:  # Kutta's 3/8 rule
            k2 = slope(tau + h / 3, x_TD + h * k1 / 3)
            k3 = slope(tau + 2 * h / 3, x_TD + h * (k2 - k1 / 3))
            k4 = slope(tau + h, x_TD + h * (k1 - k2 + k3))
            x_TD = x_TD + h * (k1 + 3 * k2 + 3 * k3 + k4) / 8
    return x_TD


def reference_mlp(w, config, tau, h_TD, control_TC):
    """W2 softplus(W1 [norm(H) ; u ; tau] + b1) + b2, one token at a time."""
    parts = [w["field.up_proj.weight"], w["field.control_proj.weight"]]
    inputs_TI = [rms_norm(h_TD, w["field.norm.weight"], config), control_TC]
    if "field.tau_proj.weight" in w:
        parts.append(w["field.tau_proj.weight"])
        inputs_TI.append(torch.full((len(h_TD), 1), tau, dtype=h_TD.dtype))
    w1 = torch.cat(parts, dim=1)
    rows = []
    for input_I in torch.cat(inputs_TI, dim=1):
        inner = (1 + (w1 @ input_I + w["field.up_proj.bias"]).exp()).log()
        rows.append(w["field.down_proj.weight"] @ inner + w["field.down_proj.bias"])
    return torch.stack(rows)


def controlled(w, h_TD, control_TC):
    return h_TD + linear(w, "field.control_proj", control_TC) if "field.control_proj.weight" in w else h_TD
