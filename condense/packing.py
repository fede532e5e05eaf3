"""Several documents in one row of an input, as data collators pack them: `position_ids` begin anew at each document.

Each document is a separate text: it becomes a row of a padded batch, whose padding no layer computes.

Axes: B rows of an input, N columns, J documents, U tokens of the longest of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from .checks import PACKING_ARGUMENTS, real_tokens

BY_TOKEN = ("input_ids", "inputs_embeds", "labels", "durations", "position_ids")


class PackedDocuments(NamedTuple):
    """The row and the columns of each document; `mask_JU` is false after its last token. All are on the host."""

    shape: tuple[int, ...]  # (B, N)
    rows_J1: torch.Tensor
    columns_JU: torch.Tensor
    mask_JU: torch.Tensor

    def _unpack(self, tensor_BNx: torch.Tensor) -> torch.Tensor:
        """Rearranges [B, N, ...] to [J, U, ...]; padding gets values of any column of the row."""
        tensor_BNx, device = tensor_BNx.expand(*self.shape, *tensor_BNx.shape[2:]), tensor_BNx.device
        return tensor_BNx[self.rows_J1.to(device), self.columns_JU.to(device)]

    def _pack(self, tensor_JUx: torch.Tensor) -> torch.Tensor:
        """Rearranges [J, U, ...] to [B, N, ...]; columns outside of documents get zeros."""
        packed_BNx = tensor_JUx.new_zeros(*self.shape, *tensor_JUx.shape[2:])
        j, u = self.mask_JU.nonzero(as_tuple=True)
        indices = self.rows_J1[j, 0], self.columns_JU[j, u]
        row_n, column_n = (index.to(tensor_JUx.device) for index in indices)
        return packed_BNx.index_put((row_n, column_n), tensor_JUx[j.to(tensor_JUx.device), u.to(tensor_JUx.device)])

    def unpack_arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `forward` with one document per row.

        Raises `ValueError` for a cache, which has one text per row, and for logits of only a row's last columns.
        """
        if given.get("cache") is not None or given.get("use_cache"):
            raise ValueError(
                "position_ids begin anew within a row: several documents are packed there, and a cache has one text "
                "per row. Pass use_cache=False, or a row for each document."
            )
        if given.get("logits_to_keep"):
            raise ValueError(f"logits_to_keep={given['logits_to_keep']} with several documents in a row: leave it out.")
        unpacked = {name: value for name, value in given.items() if name not in PACKING_ARGUMENTS}
        unpacked |= {name: self._unpack(given[name]) for name in BY_TOKEN if given.get(name) is not None}
        if (control := given.get("control")) is not None:
            unpacked["control"] = self._unpack(control) if control.dim() == 3 else control[self.rows_J1[:, 0]]
        return unpacked | {"attention_mask": self.mask_JU.long(), "use_cache": False}

    def pack_output(self, output: Any) -> Any:
        """Returns the unpacked call's output, with its per-token tensors back at the tokens' places."""
        for name in ("logits", "last_hidden_state", "function_evaluations"):
            if output.get(name) is not None:
                output[name] = self._pack(output[name])
        if output.hidden_states is not None:
            output.hidden_states = tuple(map(self._pack, output.hidden_states))
        return output


def find_documents(given: Mapping[str, Any]) -> PackedDocuments | None:
    """Finds the documents in the arguments of `forward`. Returns None if each row has at most one, or if shapes do not
    fit, which the checks of the call refuse.

    A document begins at a token with position 0, unless the token before it has position -1. Raises `ValueError` if
    `PACKING_ARGUMENTS` disagree.
    """
    position_ids, attention_mask = given["position_ids"], given["attention_mask"]
    tokens = given["input_ids"] if given["inputs_embeds"] is None else given["inputs_embeds"]
    if position_ids is None or tokens is None or tokens.dim() < 2:
        return None
    shape = (tokens.shape[0], tokens.shape[1])
    others = [given.get(name) for name in BY_TOKEN if name != "position_ids"] + [attention_mask]
    fits = all(tensor is None or tuple(tensor.shape[:2]) == shape for tensor in others)
    # Not `in` a tuple of shapes: compiled code would not find a symbolic shape there (torch 2.13).
    fits = fits and any(tuple(position_ids.shape) == one for one in (shape, (1, shape[1])))
    if not fits or (attention_mask is not None and attention_mask.dim() != 2):
        return None
    positions_BN, real_BN = position_ids.cpu().expand(shape), real_tokens(attention_mask, shape[1])
    rows, parts = [], []
    for row, positions_N in enumerate(positions_BN):
        columns_n = torch.arange(shape[1]) if real_BN is None else real_BN[row].nonzero()[:, 0]
        positions_n = positions_N[columns_n]
        starts = ((positions_n[1:] == 0) & (positions_n[:-1] != -1)).nonzero()[:, 0] + 1
        found = [part for part in columns_n.tensor_split(starts) if len(part)]
        rows += [row] * len(found)
        parts += found
    _check_packing_arguments(given, shape, rows, parts)
    if len(set(rows)) == len(rows):
        return None
    columns_JU = pad_sequence(parts, batch_first=True)
    mask_JU = torch.arange(columns_JU.shape[1]) < torch.tensor([len(part) for part in parts])[:, None]
    return PackedDocuments(shape, torch.tensor(rows)[:, None], columns_JU, mask_JU)


def _check_packing_arguments(
    given: Mapping[str, Any], shape: tuple[int, int], rows: list[int], parts: list[torch.Tensor]
) -> None:
    """Raises `ValueError` unless packing arguments have the documents of `position_ids`: `parts`, columns of `rows`."""
    document_BN = torch.full(shape, -1)
    for number, (row, columns_n) in enumerate(zip(rows, parts, strict=True)):
        document_BN[row, columns_n] = number
    for name, label_BN in _labels(given, shape):
        for row, (document_N, label_N) in enumerate(zip(document_BN, label_BN, strict=True)):
            columns_n = (document_N >= 0).nonzero()[:, 0]
            begins, says = (labels_N[columns_n].diff() != 0 for labels_N in (document_N, label_N))
            if len(wrong := (begins != says).nonzero()):
                column = int(columns_n[int(wrong[0]) + 1])
                raise ValueError(
                    f"{name} and position_ids contradict each other: in row {row} another document begins at column "
                    f"{column} by {name if says[wrong[0]] else 'position_ids'} only. Let position_ids begin at 0 in "
                    f"each document, or leave {name} out."
                )


def _labels(given: Mapping[str, Any], shape: tuple[int, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the packing arguments that separate documents, as labels [B, N] that change at each border."""
    if (labels := given.get("seq_idx")) is not None:
        yield "seq_idx", torch.as_tensor(labels).cpu().expand(shape)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if given.get(name) is None:
            continue
        borders, num_tokens = torch.as_tensor(given[name]).cpu().long(), shape[0] * shape[1]
        ordered = borders.dim() == 1 and len(borders) > 1 and not bool((borders.diff() < 0).any())
        if not ordered or borders[0] != 0 or borders[-1] != num_tokens:
            raise ValueError(
                f"{name}={borders.tolist()} does not fit {num_tokens} tokens: pass the borders of the documents, from "
                f"0 to {num_tokens}, or leave it out."
            )
        yield name, torch.searchsorted(borders, torch.arange(num_tokens), right=True).view(shape)
