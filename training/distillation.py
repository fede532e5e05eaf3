"""Distillation: a folded model learns the next-token distributions of a stock model that reads the whole text.

Axes: B rows, N tokens, D hidden size, V vocabulary, n targets.
"""

from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PrivateAttr
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from condense import to_stock
from condense.checks import check_full_attention
from condense.configuration import IGNORE_INDEX
from condense.families import FAMILIES
from condense.hub import loading
from condense.loss import max_tokens, next_labels
from condense.ops.shared_weights import for_recomputation, share_weights

from .adapters import own_model
from .recipe.objectives import OBJECTIVES, Losses, ObjectiveKind, losses_by_segment, next_token_losses


@OBJECTIVES.register
class Distillation(ObjectiveKind):
    """weight T^2 KL(teacher || student) + (1 - weight) cross-entropy + hidden_weight distance of hidden states.

    The teacher is the stock model of the same weights with full attention over the whole text, unless `teacher` names
    another one. T is the temperature. The distance is the squared error of each layer's output relative to the
    teacher's mean square, averaged over layers. All terms are means over targets.
    """

    kind: Literal["distill"] = "distill"
    weight: float = Field(1.0, ge=0, le=1, description="of the divergence; the text's own tokens get the rest")
    temperature: float = Field(1.0, gt=0, description="divides the logits of both models for the divergence")
    hidden_weight: float = Field(0.0, ge=0, description="of the distance of hidden states, layer by layer; 0: none")
    teacher: str | None = Field(
        None, description="folder, hub id or GGUF file of a stock model; None: the model's own weights"
    )

    predicts_next_tokens: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True
    needs_folded: ClassVar[bool] = True

    _teacher: Any = PrivateAttr(None)
    _mixed_precision: bool = PrivateAttr(False)
    _shares_weights: bool = PrivateAttr(False)
    _placed: bool = PrivateAttr(False)

    def check(self, recipe: Any) -> None:
        if self.hidden_weight and (recipe.gradient_checkpointing or recipe.model.schedule == "wavefront"):
            raise ValueError(
                "objective.hidden_weight compares all layers' outputs, which neither gradient checkpointing nor "
                "wavefronts keep: set gradient_checkpointing=false and model.schedule=sequential, or hidden_weight=0"
            )

    def obstacle_to_zero_3(self) -> str:
        return "objective.kind=distill computes logits beside the model"

    def check_model(self, config: Any, tokenizer: Any, recipe: Any) -> None:
        longest = recipe.longest_text(config.segment_length)
        shorter = partial(recipe.shorter, segment_length=config.segment_length)
        if self.teacher is None:
            if config.depth is not None:
                raise ValueError("a depth block has no stock model of the same weights: set objective.teacher.")
            check_full_attention(config, longest, "the teacher, the stock model of the same weights,", shorter)
            return
        teacher = loading.load_config(AutoConfig, self.teacher)
        if teacher.model_type not in FAMILIES:  # a folded one would forget like its student
            raise ValueError(
                f"objective.teacher={self.teacher!r} is of type {teacher.model_type!r}: name a stock model of one of "
                f"the types {', '.join(FAMILIES)}."
            )
        check_full_attention(teacher, longest, f"objective.teacher={self.teacher!r}", shorter)
        same_tokens = loading.load_tokenizer(self.teacher, teacher).get_vocab() == tokenizer.get_vocab()
        if not same_tokens or teacher.vocab_size != config.vocab_size:
            raise ValueError(
                f"objective.teacher={self.teacher!r} has other tokens than the model, or logits for another number: "
                "name another teacher."
            )
        shape, own = ((one.num_hidden_layers, one.hidden_size) for one in (teacher, config))
        if self.hidden_weight and shape != own:
            raise ValueError(
                f"objective.hidden_weight compares layer by layer, and {self.teacher!r} has {shape[0]} layers of width "
                f"{shape[1]} while the model has {own[0]} of width {own[1]}: set objective.hidden_weight=0."
            )

    def prepare_model(self, model: Any, recipe: Any) -> Any:
        if self.teacher is None:
            teacher = to_stock(model)
            if not recipe.lora:  # adapters do not change the weights
                for parameter in teacher.parameters():
                    parameter.data = parameter.data.clone()
        else:
            teacher = loading.load_model(AutoModelForCausalLM, self.teacher, dtype=torch.float32).eval()
        self._teacher, self._mixed_precision = teacher.requires_grad_(False), recipe.dtype == "bfloat16"
        self._shares_weights = self.teacher is None and recipe.lora is not None
        return model

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        own = own_model(model)
        # Accelerate wraps autocast around the whole model's forward pass, which is not called here.
        mixed = self._mixed_precision and own.dtype == torch.float32
        with torch.autocast(own.device.type, torch.bfloat16, enabled=mixed):
            return self._losses(own, dict(batch), num_targets)

    def _losses(self, own: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        if not self._placed:  # the student's device and dtype are known once training has begun
            self._placed = True
            place(self._teacher, own, self._shares_weights)
        loss_n, counted_BN = self.losses_of_targets(own, self._teacher, batch)
        return losses_by_segment(loss_n, counted_BN, own.config.segment_length, num_targets)

    def losses_of_targets(
        self, own: Any, teacher: Any, batch: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss [n] of each target, and which tokens [B, N] predict them."""
        labels_BN = batch.pop("labels")
        with_layers = self.hidden_weight > 0
        read = own.model(**batch, use_cache=False, output_hidden_states=with_layers)
        with torch.no_grad():
            known = teacher.model(**batch, use_cache=False, output_hidden_states=with_layers)
        target_BN = next_labels(labels_BN)
        counted_BN = target_BN != IGNORE_INDEX
        divergence_n, cross_entropy_n = token_losses(
            (own.lm_head, teacher.lm_head),
            (read.last_hidden_state[counted_BN], known.last_hidden_state[counted_BN]),
            target_BN[counted_BN],
            self.temperature,
        )
        loss_n = self.weight * self.temperature**2 * divergence_n + (1 - self.weight) * cross_entropy_n
        if with_layers:
            distances = [
                relative_distance(student_BND[counted_BN], teacher_BND[counted_BN])
                for student_BND, teacher_BND in zip(read.hidden_states[1:], known.hidden_states[1:], strict=True)
            ]
            loss_n = loss_n + self.hidden_weight * torch.stack(distances).mean(dim=0)
        return loss_n, counted_BN

    def evaluation_losses(self, model: Any, batch: dict[str, torch.Tensor]) -> Losses:
        """Returns the next-token loss, and the objective's own as `distill`."""
        found = next_token_losses(model, batch, 1)
        return found._replace(further={"distill": self.losses(model, batch, 1)})


def place(teacher: Any, student: Any, shares_weights: bool) -> None:
    """Moves a teacher to the student's device and gives it the student's dtype, or the student's weights.

    Rotary frequencies are buffers and stay in float32, as in the student.
    """
    weight = student.get_input_embeddings().weight
    teacher.to(weight.device)
    own = {name.replace(".base_layer", ""): parameter for name, parameter in student.named_parameters()}
    for name, parameter in teacher.named_parameters():
        parameter.data = own[name].data if shares_weights else parameter.data.to(weight.dtype)


def token_losses(
    heads: Any, hidden_nD: Any, target_n: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns KL(teacher || student) at a temperature, and -log p of the text's own token, per target [n].

    `heads` and `hidden_nD` are the student's and the teacher's. Only a few targets have logits at a time.
    """
    at_once = max_tokens(heads[0].weight.shape[0])
    parts = zip(*(tensor.split(at_once) for tensor in (*hidden_nD, target_n)), strict=True)
    with share_weights():
        block = for_recomputation(_block)
        found = [checkpoint(block, heads, *part, temperature, use_reentrant=False) for part in parts]
    divergences, cross_entropies = zip(*found, strict=True)
    return torch.cat(divergences), torch.cat(cross_entropies)


def _block(heads, student_nD, teacher_nD, target_n, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    student_nV, teacher_nV = (head(hidden) for head, hidden in zip(heads, (student_nD, teacher_nD), strict=True))
    dtype = torch.promote_types(student_nV.dtype, torch.float32)
    student_nV, teacher_nV = student_nV.to(dtype), teacher_nV.to(dtype)
    log_student_nV = (student_nV / temperature).log_softmax(-1)
    log_teacher_nV = (teacher_nV / temperature).log_softmax(-1)
    divergence_n = F.kl_div(log_student_nV, log_teacher_nV, reduction="none", log_target=True).sum(-1)
    return divergence_n, F.cross_entropy(student_nV, target_n, reduction="none")


def relative_distance(student_nD: torch.Tensor, teacher_nD: torch.Tensor) -> torch.Tensor:
    """Returns the mean square [n] of the difference, relative to the teacher's."""
    teacher_nD = teacher_nD.float()
    return (student_nD.float() - teacher_nD).square().mean(-1) / teacher_nD.square().mean(-1)
