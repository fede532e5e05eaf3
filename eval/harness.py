"""Folded models in lm-evaluation-harness, as its model `condense`; for stock models use its `hf`, or `stock`.

    condense eval harness --model condense --model_args pretrained=FOLDER --tasks ruler

This is the harness's own command line with two more models. They tokenize, prompt and stop like `hf`. Unlike `hf`, they
decode as the task says and ignore the checkpoint's `generation_config.json`. `stock` runs any causal language model of
transformers; it also differs from `hf` in batches and text lengths of models without positions.

A folded model reads each context once, chunk by chunk, and scores all continuations from the resulting state. It reads
a document of any length as one text. Logits are computed only for scored tokens, one call at a time.

Axes: B rows, N columns of an input, n scored tokens, V vocabulary.
"""

import copy
import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import find_adapter_config_file

from condense.extras import how_to_install

try:
    from accelerate.utils import find_executable_batch_size
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import chunks
except ImportError as error:
    raise ImportError(f"lm-evaluation-harness is not installed ({error}): {how_to_install('harness')}.") from error

from condense import CondenseConfig, FoldedCache
from condense.checks import check_tokenizer
from condense.configuration import IGNORE_INDEX
from condense.generation.prefill import TOKENS_PER_CALL, columns_per_call, prefill_calls
from condense.hub.adapters import check_adapter_config
from condense.hub.loading import check_source
from condense.hub.untrained import warn_if_untrained
from condense.utils.progress import ProgressBar

from .decoding import decodes_together, max_positions, neutral_decoding

# The harness cuts texts to the model's longest text. A folded model has none: max_position_embeddings in its config
# belongs to the Llama that was folded. No text is as long as this, and it allocates nothing.
ANY_LENGTH = 2**40
SCORED_PER_CALL = 1024  # tokens; their logits take half a GiB in float32 with a vocabulary of 128 K

Tokens = Sequence[int]
Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts (none in a rolling window), context, continuation


@register_model("stock")
class StockLM(HFLM):
    """The harness's `hf` without the checkpoint's generation settings, and with texts as long as the model's positions.

    Accepts the arguments of `hf`. `device` defaults to the GPU if there is one. Raises `ValueError` for adapters that
    could run code: `peft`, or those in the model's folder.
    """

    def __init__(self, pretrained: Any, device: str | None = None, **options: Any):
        if isinstance(pretrained, str) and Path(pretrained).is_file():
            raise ValueError(
                f"pretrained={pretrained}: the harness reads folders. Write one with condense convert {pretrained} "
                "FOLDER, with --to stock for --model stock."
            )
        super().__init__(pretrained, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), **options)

    def _create_model(self, pretrained: str, *arguments: Any, **options: Any) -> None:
        check_adapters_of(pretrained, options)
        super()._create_model(pretrained, *arguments, **options)

    @property
    def max_length(self) -> int:
        known = max_positions(self.config)
        return self._max_length or (ANY_LENGTH if known is None else super().max_length)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        if requests is None and self.max_length == ANY_LENGTH:
            raise ValueError(
                "batch_size=auto needs a longest text, and the model has none: pass max_length, or a number."
            )
        return super()._detect_batch_size(requests, pos)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> torch.Tensor:
        with neutral_decoding(self.model):
            if len(context) == 1 or decodes_together(self.model):
                return super()._model_generate(context, max_length, stop, **options)
            num_new = max_length - context.shape[1]
            written = list[torch.Tensor]()
            mask_BN = options.pop("attention_mask")
            for ids_N, mask_N in zip(context, mask_BN.bool(), strict=True):
                row_1n = ids_N[mask_N][None]
                given = options | {"attention_mask": torch.ones_like(row_1n)}
                output_1n = super()._model_generate(row_1n, row_1n.shape[1] + num_new, stop, **given)
                written.append(output_1n[0, row_1n.shape[1] :])
        return torch.cat([context, pad_sequence(written, True, self.tokenizer.pad_token_id)], dim=1)


@register_model("condense")
class CondenseLM(StockLM):
    """Accepts the arguments of the harness's `hf`, and a `CondenseForCausalLM` or its folder as `pretrained`.

    `max_length` keeps only the last `max_length` tokens of a text, to compare with models that have a longest text. By
    default no text is cut. Log-softmaxes are computed in float32 (or `softmax_dtype`), even for half-precision models.

    Raises `ValueError` for a stock model, a tokenizer that does not fit, or adapters as `StockLM` does.
    """

    def __init__(self, pretrained: Any, device: str | None = None, **options: Any):
        if isinstance(pretrained, str):
            check_source(pretrained)
        super().__init__(pretrained, device, **options)
        check_tokenizer(self.model.config, self.tokenizer)
        self.tokenizer.model_max_length = ANY_LENGTH  # with the Llama's length, `truncation` would cut questions

    def _get_backend(self, config: Any, backend: str = "default", trust_remote_code: bool | None = False) -> None:
        if config.model_type != CondenseConfig.model_type:
            raise ValueError(
                f"a model of type {config.model_type!r} is not folded: run it as --model stock, or fold it first "
                "with condense convert."
            )
        super()._get_backend(config, "causal", trust_remote_code)

    @property
    def max_length(self) -> int:
        return self._max_length or ANY_LENGTH

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """Returns the largest batch that fits, up to `max_batch_size`. Memory stops growing at three segments."""
        length = self.model.config.segment_length
        context, continuation = [0] * (2 * length + 1), [0] * length

        @find_executable_batch_size(starting_batch_size=self.max_batch_size)
        def fitting(batch_size: int) -> int:
            contexts, rows = [context] * batch_size, range(batch_size)
            with ProgressBar(disable=True) as bar:
                self._score(self._prefill(contexts, bar), rows, contexts, [continuation] * batch_size, bar)
            return batch_size

        return int(self.all_gather(torch.tensor([fitting()], device=self.device)).min())

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each request's continuation, and whether greedy decoding gives it."""
        by_context = defaultdict[tuple[int, ...], list[int]](list)
        for index, (_, context, continuation) in enumerate(requests):
            by_context[self._within_max_length(context, continuation)].append(index)
        contexts = sorted(by_context, key=len, reverse=True)  # so rows of a batch need little padding
        batch_size = self.batch_size if self.batch_size != "auto" else override_bs or self._detect_batch_size()

        answers = dict[int, tuple[float, bool]]()
        total = sum(len(context) - 1 for context in contexts) + sum(len(scored) for _, _, scored in requests)
        disabled = disable_tqdm or self.rank != 0
        with ProgressBar(total=total, desc="log-likelihoods", unit="token", unit_scale=True, disable=disabled) as bar:
            for batch in chunks(contexts, batch_size):
                state = self._prefill(batch, bar)
                asked = [(row, index) for row, context in enumerate(batch) for index in by_context[context]]
                for part in chunks(asked, batch_size):
                    rows, scored = [row for row, _ in part], [requests[index][2] for _, index in part]
                    scores = self._score(state, rows, [batch[row] for row in rows], scored, bar)
                    for (_, index), answer in zip(part, scores, strict=True):
                        answers[index] = answer
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return [answers[index] for index in range(len(requests))]

    def _within_max_length(self, context: Tokens, continuation: Tokens) -> tuple[int, ...]:
        if not context or not continuation:
            raise ValueError(
                f"a request has {len(context)} tokens of context and {len(continuation)} to score: it needs one of "
                "each. Look for empty texts and choices in the task."
            )
        if len(continuation) > self.max_length:
            raise ValueError(
                f"{len(continuation)} tokens are to be scored and max_length={self.max_length}: leave max_length out."
            )
        room = self.max_length + 1 - len(continuation)  # the last token is predicted and not read
        if len(context) > room:
            logging.getLogger(__name__).warning(
                f"a context of {len(context)} tokens is cut to its last {room}: max_length={self.max_length}."
            )
        return tuple(context[-room:])

    def _prefill(self, contexts: Sequence[Tokens], bar: ProgressBar) -> FoldedCache:
        """Returns the state before the last token of each context."""
        state = FoldedCache(self.model.config).start(len(contexts))
        ids_BN, is_real_BN = _pad([context[:-1] for context in contexts], 0)
        warn_if_untrained(self.model, ids_BN.shape[1])
        num_columns = columns_per_call(self.model, TOKENS_PER_CALL, len(contexts))
        for columns, _ in prefill_calls(self._forward, ids_BN, num_columns, state, is_real_BN):
            bar.update(int(is_real_BN[:, columns].sum()))
        return state

    def _score(
        self,
        state: FoldedCache,
        rows: Sequence[int],
        contexts: Sequence[Tokens],
        continuations: Sequence[Tokens],
        bar: ProgressBar,
    ) -> list[tuple[float, bool]]:
        """Returns the answers for B continuations; `rows` index their contexts in the state, which stays unchanged."""
        state = copy.deepcopy(state)
        state.batch_select_indices(torch.tensor(rows))
        pairs = zip(contexts, continuations, strict=True)
        ids_BN, is_real_BN = _pad([[context[-1], *continuation[:-1]] for context, continuation in pairs], 0)
        target_BN, _ = _pad(continuations, IGNORE_INDEX)
        width = max(1, SCORED_PER_CALL // len(contexts))
        log_likelihood_B = torch.zeros(len(contexts), dtype=torch.float64)
        is_greedy_B = torch.ones(len(contexts), dtype=torch.bool)
        for start in range(0, ids_BN.shape[1], width):
            here = slice(start, start + width)
            logits_BNV = self._forward(
                ids_BN[:, here], attention_mask=is_real_BN[:, here], cache=state, logits_to_keep=0
            ).logits
            target_n = target_BN[:, here].flatten().to(logits_BNV.device)
            logits_nV = logits_BNV.flatten(0, 1)
            accurate = self.softmax_dtype or torch.promote_types(logits_nV.dtype, torch.float32)
            loss_n = F.cross_entropy(logits_nV.to(accurate), target_n, ignore_index=IGNORE_INDEX, reduction="none")
            as_greedy_n = (logits_nV.argmax(-1) == target_n) | (target_n == IGNORE_INDEX)
            log_likelihood_B -= loss_n.cpu().view(len(contexts), -1).sum(1)
            is_greedy_B &= as_greedy_n.cpu().view(len(contexts), -1).all(1)
            bar.update(int(is_real_BN[:, here].sum()))
        return list(zip(log_likelihood_B.tolist(), is_greedy_B.tolist(), strict=True))

    @torch.no_grad()
    def _forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        """Runs the model's forward pass in the harness's mixed precision."""
        mixed = self.mixed_precision_dtype
        with torch.autocast(self.device.type, mixed, enabled=mixed is not None):
            return self.model(input_ids.to(self.device), **options)


def _pad(rows: Sequence[Tokens], fill: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads rows on the right with `fill` to [B, N], so segments line up; also returns the mask of real tokens."""
    ids_BN = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True, fill)
    return ids_BN, torch.arange(ids_BN.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def check_adapters_of(pretrained: str, options: dict[str, Any]) -> None:
    """Raises `ValueError` for adapters that could run code: in the model's folder, or in `peft` of the options."""
    revision, subfolder = options.get("revision"), options.get("subfolder", "")
    for source, folder in ((pretrained, subfolder), (options.get("peft"), "")):
        if source and (found := find_adapter_config_file(source, revision=revision, subfolder=folder)):
            check_adapter_config(Path(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the harness's own command line, which knows `--model condense` once this module is imported.

    Here the harness's own models, such as `hf`, check adapters as ours do.
    """
    create = HFLM._create_model

    def checked(model: HFLM, pretrained: str, *given: Any, **options: Any) -> None:
        check_adapters_of(pretrained, options)
        create(model, pretrained, *given, **options)

    sys.argv = ["lm_eval", *(sys.argv[1:] if arguments is None else arguments)]
    with mock.patch.object(HFLM, "_create_model", checked):
        cli_evaluate()


if __name__ == "__main__":
    main()
