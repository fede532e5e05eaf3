"""A stock Llama with a depth block: against a forward pass by hand, and against the folded hybrid."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from condense import CondenseForCausalLM, to_stock
from condense.labs.depth.model import DepthLlamaForCausalLM, convert_to_depth, set_solver, to_depth_llama
from tests.condense.models import in_float64, padded_batch, random_ids, tiny_model

pytestmark = pytest.mark.process

SEGMENT = 40  # longer than every text here


def folded(first=1, end=3, **settings):
    """A folded hybrid of 4 layers whose field is large enough to matter."""
    settings = {"alpha": 0.7, "control_size": 2, "field_size": 12, "seed": 3} | settings
    return convert_to_depth(tiny_model(num_hidden_layers=4, segment_length=SEGMENT), first, end, **settings)


@pytest.fixture(scope="module")
def hybrid():
    return to_depth_llama(folded())


@pytest.fixture(scope="module")
def control():
    return torch.randn(2, 2, generator=torch.Generator().manual_seed(5)).double()


def flow_by_hand(block, hidden, control, steps=4):
    field = block.field
    for _ in range(steps):
        inner = F.linear(field.norm(hidden), field.up_proj.weight, field.up_proj.bias)
        inner = inner + F.linear(control, field.control_proj.weight)[:, None]
        inner = torch.log1p(inner.exp())  # softplus
        hidden = hidden + block.alpha / steps * F.linear(inner, field.down_proj.weight, field.down_proj.bias)
    return hidden


@torch.no_grad()
def test_the_forward_pass_by_hand(hybrid, control):
    """The layers that stay are called as the stock model calls them, in a model of their own."""
    ids = random_ids(2, 11)
    source = tiny_model(num_hidden_layers=4, segment_length=SEGMENT)
    stock = to_stock(source)
    llama, hidden = stock.model, stock.model.embed_tokens(ids)
    positions = torch.arange(11)[None]
    rotary = llama.rotary_emb(hidden, positions)

    def layer(number, hidden):
        return llama.layers[number](hidden, attention_mask=None, position_embeddings=rotary)

    hidden = flow_by_hand(hybrid.depth_block, layer(0, hidden), control)
    expected = stock.lm_head(llama.norm(layer(3, hidden)))
    output = hybrid(ids, control=control, output_hidden_states=True)
    torch.testing.assert_close(output.logits, expected)
    assert len(output.hidden_states) == 4  # before the layers, after two of them and after the block
    torch.testing.assert_close(output.hidden_states[2], hidden)
    assert torch.equal(output.function_evaluations, torch.full((2, 11), 4))


@pytest.mark.parametrize("first", [0, 1, 3])
@torch.no_grad()
def test_the_folded_hybrid_has_the_same_logits(first, control):
    model = folded(first, first + 1, field="mlp_tau", solver="rk4", steps=2)
    stock, ids = in_float64(to_depth_llama(model)), random_ids(2, 11)
    per_token = control[:, None] * torch.linspace(-1, 1, 11)[None, :, None].double()
    for given in (control, per_token):
        torch.testing.assert_close(stock(ids, control=given).logits, model(ids, control=given).logits)
    assert not torch.allclose(stock(ids).logits, stock(ids, control=control).logits)
    # Converted from the stock model: the same seed gives the same weights, and the other layers' are shared.
    llama = to_stock(tiny_model(num_hidden_layers=4, segment_length=SEGMENT))
    settings = {"alpha": 0.7, "control_size": 2, "field_size": 12, "seed": 3}
    made = convert_to_depth(
        llama, first, first + 1, field="mlp_tau", solver="rk4", steps=2, learn_alpha=False, **settings
    )
    assert not made.depth_block.alpha.requires_grad and stock.depth_block.alpha.requires_grad
    assert torch.equal(in_float64(made)(ids, control=control).logits, stock(ids, control=control).logits)
    assert made.model.norm.weight.data_ptr() == llama.model.norm.weight.data_ptr()
    assert [layer.self_attn.layer_idx for layer in llama.model.layers] == [0, 1, 2, 3]  # the source stays as it is


@torch.no_grad()
def test_a_cache_and_padding_change_nothing(hybrid, control):
    rows, ids, mask = padded_batch([4, 9], "left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    together = hybrid(ids, attention_mask=mask, position_ids=positions, control=control)
    for row, text in enumerate(rows):
        alone = hybrid(text[None], control=control[row : row + 1])
        torch.testing.assert_close(together.logits[row, -len(text) :], alone.logits[0])
    assert together.function_evaluations.tolist() == (4 * mask).tolist()
    texts = random_ids(2, 9)
    per_token = torch.randn(2, 9, 2, generator=torch.Generator().manual_seed(1)).double()
    whole = hybrid(texts, control=per_token).logits
    start = hybrid(texts[:, :5], control=per_token[:, :5], use_cache=True)
    rest = hybrid(texts[:, 5:], control=per_token[:, 5:], past_key_values=start.past_key_values)
    torch.testing.assert_close(torch.cat([start.logits, rest.logits], 1), whole)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "length_penalty": 0.3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("first", [0, 1])
@torch.no_grad()
def test_generate_with_a_cache_equals_without(options, first, control):
    model, (_, ids, mask) = to_depth_llama(folded(first, first + 2)), padded_batch([4, 9], "left")
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    control = 8 * control  # as strong as the text
    per_token = control[:, None] + torch.zeros(2, 9, 1, dtype=torch.double)
    per_token[:, :-1] *= -1  # new tokens have the control of the last column
    for one in (control, per_token):
        cached = model.generate(ids, control=one, **given, **options)
        beams = {name: value for name, value in options.items() if name != "cache_implementation"}
        assert torch.equal(cached, model.generate(ids, control=one, use_cache=False, **given, **beams))
    assert not torch.equal(cached, model.generate(ids, **given, **options))


@torch.no_grad()
def test_generate_from_embeddings_and_with_assistants():
    model, ids = to_depth_llama(folded()), random_ids(1, 9)
    options = {"control": torch.randn(1, 9, 2).double(), "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, **options)
    for assistant in (copy.deepcopy(model), to_stock(tiny_model())):
        assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embedded, **options), expected[:, 9:])


def test_gradient_checkpointing_keeps_the_gradients(control):
    ids, found = random_ids(2, 9), []
    for checkpointing in (False, True):
        model = to_depth_llama(folded()).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            assert model.depth_block.gradient_checkpointing
        given = control.clone().requires_grad_()
        model(ids, labels=ids, control=given).loss.backward()
        found.append([given.grad, *(parameter.grad for parameter in model.parameters())])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_a_saved_hybrid_is_loaded_by_the_auto_classes_and_folded(hybrid, tmp_path, control):
    hybrid.save_pretrained(tmp_path)
    ids = random_ids(2, 7)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(again) is DepthLlamaForCausalLM and again.depth_block.settings == hybrid.depth_block.settings
    torch.testing.assert_close(again(ids, control=control).logits, hybrid(ids, control=control).logits)
    folded_again = CondenseForCausalLM.from_pretrained(tmp_path, dtype="auto", segment_length=SEGMENT)
    logits = in_float64(again)(ids, control=control).logits
    torch.testing.assert_close(folded_again(ids, control=control).logits, logits)


@pytest.mark.slow
def test_a_new_process_loads_a_saved_hybrid(hybrid, tmp_path, control):
    hybrid.save_pretrained(tmp_path)
    ids = random_ids(2, 7)
    code = (
        "import sys, torch, condense.labs.depth, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype='auto')\n"
        f"ids, control = torch.tensor({ids.tolist()}), torch.tensor({control.tolist()}).double()\n"
        "print(type(model).__name__, model(ids, control=control).logits.sum().item())"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    name, total = run.stdout.split()
    expected = hybrid(ids, control=control).logits.sum().item()
    assert name == "DepthLlamaForCausalLM" and float(total) == pytest.approx(expected, rel=1e-9)


@torch.no_grad()
def test_an_adaptive_solver_counts_by_token(control):
    model = to_depth_llama(folded(alpha=3.0))
    set_solver(model, "dopri5", rtol=1e-5, atol=1e-6)
    rows, ids, mask = padded_batch([4, 9], "left")
    counts = model(ids, attention_mask=mask, control=control).function_evaluations
    alone = model(rows[0][None], control=control[:1]).function_evaluations
    assert torch.equal(counts[0, -4:], alone[0]) and (counts[0, :-4] == 0).all() and counts.unique().numel() > 2


def test_what_a_stock_hybrid_refuses(hybrid):
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                                         num_attention_heads=4))  # fmt: skip
    with pytest.raises(ValueError, match="'layer'.*fold the model"):
        convert_to_depth(llama, 0, 1, field="layer")
    with pytest.raises(ValueError, match="at least one layer"):
        convert_to_depth(llama, 0, 2)
    with pytest.raises(ValueError, match="0 <= FIRST < END <= 2"):
        convert_to_depth(llama, 1, 3)
    with pytest.raises(ValueError, match="'layer'.*fold the model"):
        to_depth_llama(folded(field="layer", field_size=None))
    with pytest.raises(ValueError, match="to_depth_llama"):
        to_stock(folded())
    with pytest.raises(ValueError, match=r"control of shape \(2, 3\)"):
        hybrid(random_ids(2, 5), control=torch.zeros(2, 3))
