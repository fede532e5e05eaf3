"""Plain operations in place of the launches of kernels: they write to the same memory, and are faster than Triton's
interpreter."""

import torch

from condense.execution import band
from condense.ops.kernels import attention_inputs, cross_entropy, rms_norm, rotary, swiglu
from condense.ops.kernels.layout import given_or_new

MODULES = band, attention_inputs, cross_entropy, rms_norm, rotary, swiglu


def replace_launches(monkeypatch, kept=""):
    """Replaces all launches, except those of the module `kept`."""
    for name, function in LAUNCHES.items():
        if name.split(".")[0] != kept:
            monkeypatch.setattr(f"condense.ops.kernels.{name}", function)
    monkeypatch.setattr(cross_entropy, "uses_kernels", lambda tensor: False)


def gradients_of(function, inputs, gradient):
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        return torch.autograd.grad(function(*leaves), leaves, gradient)


def silu_product_into(product_mnF, gate_xF, up_xF):
    product_mnF.copy_(swiglu.plain_silu_product(gate_xF, up_xF).view(product_mnF.shape))


def silu_product_gradients_into(both_mnF, gate_xF, up_xF, gradient_xF):
    found = gradients_of(swiglu.plain_silu_product, (gate_xF, up_xF), gradient_xF)
    both_mnF.copy_(torch.cat(found, -1).view(both_mnF.shape))


def norm(hidden_xD, weight, epsilon, normed_mnD=None):
    width = hidden_xD.shape[-1]
    normed_xD = rms_norm.plain_rms_norm(hidden_xD, weight, epsilon)
    normed_mnD = given_or_new(normed_mnD, normed_xD.numel() // width, width, normed_xD)
    normed_mnD.copy_(normed_xD.reshape(normed_mnD.shape))
    return normed_mnD.view(hidden_xD.shape), hidden_xD.new_empty(1)


def add_norm(hidden_xD, residual_xD, weight, epsilon, normed_mnD=None):
    sum_xD = hidden_xD + residual_xD
    return sum_xD, *norm(sum_xD, weight, epsilon, normed_mnD)


EPSILON = 1e-6  # of the tests' models, which kernels' gradients do not need


def norm_gradients(
    input_xD, weight, scale_n, gradient_xD, other_xD, needs_weight, of_input_mnD=None, of_weight_mpD=None
):
    def plain(input_xD, weight):
        return rms_norm.plain_rms_norm(input_xD, weight, EPSILON)

    of_input, of_weight = gradients_of(plain, (input_xD, weight), gradient_xD)
    of_input = of_input if other_xD is None else of_input + other_xD
    width = input_xD.shape[-1]
    of_input_mnD = given_or_new(of_input_mnD, input_xD.numel() // width, width, input_xD)
    of_input_mnD.copy_(of_input.reshape(of_input_mnD.shape))
    if of_weight_mpD is not None:
        of_weight_mpD[:, -1] += of_weight
    return of_input_mnD.view(input_xD.shape), of_weight if needs_weight else None


def rotate_into(output_RHTE, tensor_RHTE, cos_R1TE, sin_R1TE, inverse):
    half = tensor_RHTE.shape[-1] // 2
    if inverse:
        output_RHTE.copy_(tensor_RHTE * cos_R1TE + (tensor_RHTE * sin_R1TE).roll(half, dims=-1))
    else:
        output_RHTE.copy_(rotary.plain_rotate(tensor_RHTE, (cos_R1TE, sin_R1TE)))


def extend_into(key_RGKE, value_RGKE, memory_key_RGME, memory_value_RGME, key_RGTE, value_RGTE, cos_R1TE, sin_R1TE):
    key_RGKE.copy_(torch.cat([memory_key_RGME, rotary.plain_rotate(key_RGTE, (cos_R1TE, sin_R1TE))], dim=2))
    value_RGKE.copy_(torch.cat([memory_value_RGME, value_RGTE], dim=2))


def write_gradients(joint_mnO, first_row, of_query_RHTE, of_key_RGTE, of_value_RGTE, cos_R1TE, sin_R1TE):
    parts = []
    for one in (of_query_RHTE, of_key_RGTE):
        if one is not None:
            parts.append(torch.empty_like(one))
            rotate_into(parts[-1], one, cos_R1TE, sin_R1TE, inverse=True)
    joint_RTO = torch.cat([*parts, of_value_RGTE], dim=1).transpose(1, 2).flatten(2)
    num_rows, width, _ = joint_RTO.shape
    joint_mnO.view(-1, width, joint_mnO.shape[-1])[first_row : first_row + num_rows] = joint_RTO


LAUNCHES = {
    f"triton_{module}.{function.__name__}": function
    for module, functions in {
        "swiglu": (silu_product_into, silu_product_gradients_into),
        "rms_norm": (norm, add_norm, norm_gradients),
        "rotary": (rotate_into,),
        "attention_inputs": (extend_into, write_gradients),
    }.items()
    for function in functions
}
