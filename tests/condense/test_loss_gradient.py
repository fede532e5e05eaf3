"""The loss with its gradients in the forward pass, against the cross-entropy of all logits by autograd."""

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from condense import loss, loss_gradient
from condense.loss_gradient import HeadGradients, head_gradients

from .models import VOCAB, random_ids, tiny_model, torch_checkpoint

COLUMNS = 13  # two segments and a part of one


@pytest.fixture(params=[1, 7, 1000], ids=lambda tokens: f"blocks of {tokens}")
def blocks(request, monkeypatch):
    monkeypatch.setattr(loss, "MAX_LOGITS", request.param * VOCAB)


@pytest.fixture(autouse=True, params=[4096, 8], ids=lambda tokens: f"{tokens} tokens wait")
def waiting(request, monkeypatch):
    """A call has one block, or one for each chunk."""
    monkeypatch.setattr(loss, "BLOCK_TOKENS", request.param)


def labelled(seed=1):
    """Ids [2, N], labels of which some do not count, and a mask with padding on the left of one row."""
    ids = random_ids(2, COLUMNS, seed=seed)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 3:6] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients_of(model, value) -> dict:
    model.zero_grad(set_to_none=True)
    value.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_as_of_all_logits(model, batch, num_items=None):
    reference = expected(model, batch, num_items)
    value = model(**batch, num_items_in_batch=num_items).loss
    torch.testing.assert_close(value, reference)
    assert_equal(gradients_of(model, value), gradients_of(model, reference))


def expected(model, batch, num_items=None):
    """By the definition: the logits of all tokens, shifted, in one call. Padding predicts nothing."""
    mask = batch["attention_mask"]
    logits = model(input_ids=batch["input_ids"], attention_mask=mask).logits[:, :-1]
    targets = batch["labels"][:, 1:].masked_fill(mask[:, :-1] == 0, -100)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total / ((targets != -100).sum() if num_items is None else num_items)


def assert_equal(one: dict, two: dict) -> None:
    """Norms compute in float32."""
    torch.testing.assert_close(one, two, rtol=0, atol=1e-10)


class HeadProducts(TorchDispatchMode):
    """Counts the operations of the products with a dimension of the vocabulary's size, and additions of that size."""

    count = additions = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.condense.add_products_):
            one, two = args[-2:]
            if VOCAB in (*one.shape, *two.shape):
                self.count += 2 * one.numel() * two.shape[-1]
        if function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_):
            self.additions += VOCAB in args[0].shape
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("schedule", "group"),
    [("sequential", None), ("wavefront", None), ("sequential", 1), ("sequential", 2), ("wavefront", 3)],
)
def test_logits_are_computed_once(schedule, group, dtype):
    """6 N V D operations: the logits, and their gradients for hidden states and weights. The products add to the sum of
    the weight's gradients themselves."""
    model, ids = tiny_model(dtype, schedule=schedule, attn_implementation="sdpa").train(), random_ids(1, 5 * 8)
    if group is not None:
        model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=group))
    model.model.embed_tokens.requires_grad_(False)
    with HeadProducts() as products:
        model(ids, labels=ids).loss.backward()
    assert not products.additions
    assert products.count == 6 * (ids.numel() - 1) * VOCAB * model.config.hidden_size


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "device", "itemsize", "expected"),
    [
        (4095, 128_256, "cuda", 2, 4095),  # a block of the loss in a single part
        (4095, 128_256, "cuda", 4, 2048),
        (4096, 151_936, "cuda", 2, 2048),  # 3,528 fit: two parts of equal size
        (4096, 128_256, "cpu", 4, 512),
        (0, 128_256, "cuda", 2, 1),
    ],
)
def test_tokens_that_have_logits_at_a_time(tokens, vocabulary, device, itemsize, expected):
    found = loss_gradient.part_tokens(tokens, loss.max_tokens(vocabulary), device, itemsize)
    assert found == expected
    assert device == "cpu" or found * vocabulary * itemsize <= 2**30


@pytest.mark.parametrize("num_items", [None, 5])
@pytest.mark.parametrize(
    ("tied", "frozen"), [(False, None), (True, None), (False, "lm_head"), (False, "model"), (True, "model.layers")]
)
def test_gradients_are_those_of_all_logits(tied, frozen, num_items, blocks):
    model, batch = tiny_model(tie_word_embeddings=tied), labelled()
    if frozen is not None:
        model.get_submodule(frozen).requires_grad_(False)
    assert_as_of_all_logits(model, batch, num_items)


def test_gradients_of_the_input_embeddings():
    model, ids = tiny_model(), random_ids(2, COLUMNS)
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits[:, :-1]
    reference = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    losses = (model(inputs_embeds=embeds, labels=ids).loss, reference)
    torch.testing.assert_close(*(torch.autograd.grad(one, embeds) for one in losses), rtol=0, atol=1e-10)


def test_the_graph_may_be_kept_and_gradients_add_up():
    model, batch = tiny_model(), labelled()
    four_times = gradients_of(model, 4 * model(**batch).loss)
    model.zero_grad(set_to_none=True)
    value = model(**batch).loss
    value.backward(retain_graph=True)
    (3 * value).backward()
    assert_equal({name: weight.grad for name, weight in model.named_parameters()}, four_times)


def test_hooks_that_move_saved_tensors_see_complete_sums_and_no_logits():
    """As torch.autograd.graph.save_on_cpu around a whole step does: what is saved is copied at once."""
    model, batch, widths = tiny_model(), labelled(), []
    plain = gradients_of(model, model(**batch).loss)

    def pack(tensor):
        widths.append(tensor.shape[-1] if tensor.ndim else 0)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        value = model(**batch).loss
    assert_equal(gradients_of(model, value), plain)
    assert widths and VOCAB not in widths


def test_sums_are_freed_by_the_backward_pass(monkeypatch):
    sums = []

    def total(self, losses):
        sums.extend(weakref.ref(one.total()) for one in self.sums.values())
        return whole(self, losses)

    whole = HeadGradients.total
    monkeypatch.setattr(HeadGradients, "total", total)
    value = tiny_model()(**labelled()).loss
    assert sums and all(one() is not None for one in sums)
    value.backward()  # the loss and its graph live on
    assert all(one() is None for one in sums)


class OnCuda(torch.Tensor):
    is_cuda = property(lambda self: True)


@pytest.mark.parametrize("kind", [torch.Tensor, OnCuda])
def test_gradients_in_bfloat16_are_rounded_once(kind):
    gradient = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).bfloat16().as_subclass(kind)
    third, more, tenth = torch.tensor(1 / 3), torch.tensor(2.7), torch.tensor(0.1).double()
    for given, factor in ((gradient, third), (gradient.T, more), (gradient.double(), tenth)):
        exact = (given.double() * factor.double()).to(given.dtype)
        assert torch.equal(loss_gradient._scale(given, factor, given.dtype), exact)


def test_without_targets_gradients_are_zero():
    model, batch = tiny_model(), labelled()
    value = model(**batch | {"labels": torch.full_like(batch["labels"], -100)}).loss
    assert value == 0
    assert all((gradient == 0).all() for gradient in gradients_of(model, value).values())


def test_a_frozen_model_has_a_loss():
    model, batch = tiny_model().requires_grad_(False), labelled()
    value = model(**batch).loss
    assert not value.requires_grad
    torch.testing.assert_close(value, expected(model, batch))


def test_there_are_no_second_derivatives():
    model, batch = tiny_model(), labelled()
    with pytest.raises(ValueError, match="create_graph=True"):
        torch.autograd.grad(model(**batch).loss, model.model.norm.weight, create_graph=True)


def test_heads_that_autograd_must_see():
    """A head that is not a plain linear map keeps its hooks, its class and the scaling of float16."""
    assert isinstance(head_gradients(torch.nn.Linear(4, 9)), HeadGradients)
    hooked, replaced, normed = (torch.nn.Linear(4, 9) for _ in range(3))
    hooked.register_forward_hook(lambda *_: None)
    replaced.forward = replaced.forward
    torch.nn.utils.parametrizations.weight_norm(normed)
    replica = torch.nn.Linear(4, 9)._replicate_for_data_parallel()
    replica._parameters = {}
    others = [torch.nn.Sequential(torch.nn.Linear(4, 9)), torch.nn.Linear(4, 9, dtype=torch.float16)]
    for head in (hooked, replaced, normed, replica, *others):
        assert head_gradients(head) is None


class ScaledHead(torch.nn.Linear):
    def forward(self, hidden):
        return 0.25 * super().forward(hidden)


def hooked(model):
    model.lm_head.register_forward_hook(lambda *_: None)


def scaled(model):
    head = ScaledHead(24, VOCAB, bias=False, dtype=torch.float64)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head


def test_a_head_of_another_class_computes_its_own_logits():
    model, batch = tiny_model(), labelled()
    scaled(model)
    assert_as_of_all_logits(model, batch)


def test_where_autograd_is_watched(monkeypatch):
    head = torch.nn.Linear(4, 9)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert head_gradients(head) is None
    with torch.autograd.forward_ad.dual_level():
        assert head_gradients(head) is None
    seen = []
    torch.func.grad(lambda x: (seen.append(head_gradients(head)), x.sum())[1])(torch.ones(2))
    assert seen == [None]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert head_gradients(head) is None


def test_a_hook_on_the_head_is_called_and_changes_nothing():
    model, batch = tiny_model(), labelled()
    plain = gradients_of(model, model(**batch).loss)
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    assert_equal(gradients_of(model, model(**batch).loss), plain)
    assert calls


@pytest.mark.parametrize("hidden_size", [24, 64], ids=["large vocabulary", "small vocabulary"])
def test_within_torch_func(hidden_size):
    model, batch = tiny_model(hidden_size=hidden_size), labelled()
    plain = gradients_of(model, model(**batch).loss)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    assert_equal(torch.func.grad(lambda given: functional_call(model, given, kwargs=batch).loss)(weights), plain)


@pytest.mark.parametrize("change", [None, hooked, scaled])
def test_a_functional_call(change):
    """Its backward pass runs when the module has its own weights again."""
    model, batch = tiny_model(), labelled()
    if change is not None:
        change(model)
    weights = {name: (1.5 * weight).detach().requires_grad_() for name, weight in model.named_parameters()}
    functional_call(model, weights, kwargs=batch).loss.backward()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(weights[name])
    assert_equal({name: weight.grad for name, weight in weights.items()}, gradients_of(model, expected(model, batch)))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_head_that_changes_before_the_backward_pass_is_refused(autocast):
    model, batch = tiny_model(torch.float32 if autocast else torch.float64), labelled()
    hooked(model)  # its logits are computed again
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = model(**batch).loss
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
