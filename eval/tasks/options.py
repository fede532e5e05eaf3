"""The options of the evaluations. The docstring of a class is the help text of its command."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from condense.training.data.fact_kinds import KINDS, check_kinds
from condense.utils.memory_options import parse_share

from ..options import (
    ATTENTION_HELP,
    INDICES,
    NAMES,
    NUMBER,
    NUMBER_OR_ALL,
    NUMBERS,
    PERCENTAGES,
    Attention,
    DeviceMap,
    Dtype,
    Models,
    Option,
    Options,
    Ranks,
    SegmentLength,
    Spelling,
    TextField,
    check_attention,
    check_share,
    numbers,
)

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
SUITE_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131_072)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CURVES = ("folded", "layer_input", "full_attention")
SEGMENTS = (2, 4, 6)  # as in figure 10


def _lengths_or_0(text: str) -> list[int]:
    """Parses numbers like `numbers`; 0 is allowed, and means no length."""
    return [0 if part.strip() == "0" else numbers(part)[0] for part in text.split(",")]


LENGTHS_OR_0 = Spelling(_lengths_or_0, NUMBERS.write)
NUMBER_OR_0 = Spelling(lambda text: _lengths_or_0(text)[0], NUMBER.write)
Lengths = Annotated[
    Sequence[int],
    Option("Tokens, answer included; k and m are 1,024 and 1,048,576.", spelling=NUMBERS, may_change=True),
]
NumPrompts = Annotated[int, Option("Prompts in each cell of the grid.", flags=("--prompts",), min=1)]
CellTokens = Annotated[
    int | None,
    Option("Tokens of all prompts of a cell, at most; cells of longer texts have fewer prompts, at least one.", min=1),
]
PromptSeed = Annotated[int, Option("Seed of the prompts.", min=0)]
# Implementations of attention differ only in rounding, so a resumed grid may use another.
AnyAttention = Annotated[str, Option(ATTENTION_HELP, may_change=True, check=check_attention)]
BadDocuments = Literal["refuse", "skip"]
LongestTrained = Annotated[
    int | None, Option("Tokens, drawn as a border; default: from the recipe of the model, if known.", may_change=True)
]
Window = Annotated[
    int | None, Option("Keys of StreamingLLM's window, in which the first stock model is read, too.", min=1)
]
Chat = Annotated[
    Sequence[str],
    Option("Name of a model that gets its prompts in its tokenizer's chat template; repeat it for several models."),
]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(Options):
    """The models of an evaluation, and how they are loaded and run."""

    listed_last = ("ranks", "device_map", "dtype", "attention")

    models: Models
    ranks: Ranks = 1
    device_map: DeviceMap = None
    dtype: Dtype = "auto"
    attention: Attention = "auto"


@dataclass(frozen=True, kw_only=True)
class PasskeyOptions(EvaluationOptions):
    """Retrieval of a number hidden in long text, by length and depth (figure 8)."""

    chat: Chat = ()
    lengths: Lengths = LENGTHS
    depths: Annotated[Sequence[float], Option("Percentages of the text before the key.", spelling=PERCENTAGES)] = DEPTHS
    num_prompts: NumPrompts = 20
    cell_tokens: CellTokens = None
    num_keys: Annotated[int, Option("Keys in a text, one of which is asked for.", flags=("--keys",), min=1)] = 1
    num_digits: Annotated[int, Option("Digits of a key.", flags=("--digits",), min=1)] = 4
    window: Window = None
    seed: PromptSeed = 0
    longest_trained: LongestTrained = None
    attention: AnyAttention = "auto"


@dataclass(frozen=True, kw_only=True)
class RecallOptions(EvaluationOptions):
    """Recall of key-value pairs in long text, by their number and the length: how much the memory holds."""

    pairs: Annotated[
        Sequence[int], Option("Keys in a text, one of which is asked for.", spelling=NUMBERS, may_change=True)
    ] = (1, 2, 4, 8, 16, 32)
    lengths: Annotated[
        Sequence[int],
        Option(
            "Tokens, answer included; k and m are 1,024 and 1,048,576; 0: only pairs, without text between them.",
            spelling=LENGTHS_OR_0,
            may_change=True,
        ),
    ] = (1024, 4096)
    forms: Annotated[
        Sequence[str],
        Option(
            "single: one value a key; multi_value: asks for all values of the key; overwritten: asks for its last "
            "value; separated by commas.",
            flags=("--form",),
            spelling=NAMES,
            may_change=True,
        ),
    ] = ("single",)
    values: Annotated[int, Option("Values of a key, in the form multi_value.", min=1)] = 2
    overwritten: Annotated[
        float, Option("Share of keys with another value later, in the form overwritten.", check=check_share)
    ] = 0.5
    num_prompts: NumPrompts = 100
    seed: PromptSeed = 0
    attention: AnyAttention = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        from condense.training.data.recall import FORMS  # loads torch, which a command may not need

        if unknown := [form for form in self.forms if form not in FORMS]:
            raise ValueError(f"unknown form {unknown[0]!r}: choose from {', '.join(FORMS)}.")


@dataclass(frozen=True, kw_only=True)
class FactsOptions(EvaluationOptions):
    """Questions about facts in long text, by length and kind."""

    lengths: Lengths = (1024, 8192, 65536)
    kinds: Annotated[
        Sequence[str], Option("Kinds of questions, separated by commas.", spelling=NAMES, may_change=True)
    ] = tuple(KINDS)
    data: Annotated[
        Sequence[str],
        Option("Text between the facts: a file or glob pattern; default: the filler sentences of the passkey task."),
    ] = ()
    text_field: TextField = "text"
    num_facts: Annotated[int, Option("Facts in a text, at most.", flags=("--facts",), min=1)] = 6
    num_prompts: NumPrompts = 100
    cell_tokens: CellTokens = None
    window: Window = None
    seed: PromptSeed = 0
    longest_trained: LongestTrained = None
    attention: AnyAttention = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kinds(self.kinds, self.num_facts)


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(EvaluationOptions):
    """Loss by the number of segments before and by position in the segment: the memory's gain, and its reach."""

    data: Annotated[Sequence[str], Option("Texts: a file or glob pattern, .txt, .jsonl or .parquet.")]
    text_field: TextField = "text"
    num_segments: Annotated[
        int, Option("Segments in a window; the last has one less before it.", flags=("--segments",), min=2)
    ] = 8
    segment_length: SegmentLength = 512
    max_tokens: Annotated[
        int | None,
        Option(
            "Tokens of text, at most; k and m are 1,024 and 1,048,576; or all.",
            flags=("--tokens",),
            spelling=NUMBER_OR_ALL,
            may_change=True,
        ),
    ] = 2**16
    curves: Annotated[
        Sequence[str],
        Option(
            "Curves, separated by commas; a stock model has only the last one.",
            spelling=NAMES,
            choices=CURVES,
            may_change=True,
        ),
    ] = CURVES
    batch_size: Annotated[int, Option("Windows in a batch.", flags=("--batch",), min=1)] = 8


def _check_shares(names: Sequence[str]) -> None:
    """Raises `ValueError` for a name that is neither `lowest` nor in the notation of `parse_share`."""
    for name in names:
        if name != "lowest":
            parse_share(name)


@dataclass(frozen=True, kw_only=True)
class FoldCostOptions(EvaluationOptions):
    """The cost of folding a checkpoint, before any training, by segment length, memory share and sink."""

    data: Annotated[
        Sequence[str],
        Option(
            "Texts: a file or glob pattern, .txt, .jsonl or .parquet; default: the model's own samples, which show "
            "less: they are the text that it knows best."
        ),
    ] = ()
    text_field: TextField = "text"
    num_texts: Annotated[
        int, Option("Texts: the first documents that are long enough, from their beginning.", flags=("--texts",), min=1)
    ] = 4
    num_tokens: Annotated[
        int, Option("Tokens of each text, at most.", flags=("--tokens",), spelling=NUMBER, min=2, may_change=True)
    ] = 2048
    segment_lengths: Annotated[
        Sequence[int],
        Option("Tokens of a segment, separated by commas; 1k is 1,024.", spelling=NUMBERS, may_change=True),
    ] = (128, 256, 512, 1024)
    shares: Annotated[
        Sequence[str],
        Option(
            "Memory shares, separated by commas: a number, lowest (1 in the lowest layer and 0 in others), or one for "
            "each layer (1:0:0:0).",
            spelling=NAMES,
            check=_check_shares,
            may_change=True,
        ),
    ] = ("0", "0.1", "0.2", "lowest", "1")
    sink_token_id: Annotated[int | None, Option("Token of the sink; default: the model's bos_token_id.", min=0)] = None
    by_position: Annotated[
        Sequence[int],
        Option(
            "Segment lengths whose loss by position is measured, too, on the longest text; 0: none.",
            spelling=LENGTHS_OR_0,
            may_change=True,
        ),
    ] = (256,)
    position_tokens: Annotated[
        int, Option("Tokens of that text, at most.", spelling=NUMBER, min=2, may_change=True)
    ] = 16384
    seed: Annotated[int, Option("Seed of the model's own samples.", min=0)] = 0
    attention: AnyAttention = "auto"


@dataclass(frozen=True, kw_only=True)
class LossOptions(EvaluationOptions):
    """Loss of models on the same texts, above the first one's, by position: what a memory costs, trained or not."""

    data: Annotated[
        Sequence[str], Option("Texts: a file or glob pattern, .txt, .jsonl or .parquet; each has its rows.")
    ]
    text_field: TextField = "text"
    num_texts: Annotated[
        int, Option("Texts, evenly spread over the documents of each --data.", flags=("--texts",), min=1)
    ] = 16
    num_tokens: Annotated[int, Option("Tokens of each text.", flags=("--tokens",), spelling=NUMBER, min=3)] = 2048
    position_tokens: Annotated[
        int,
        Option("Tokens of the longest document that are read for the loss by position; 0: none.", spelling=NUMBER_OR_0),
    ] = 16384
    window: Window = None
    attention: AnyAttention = "auto"


@dataclass(frozen=True, kw_only=True)
class FoldStabilityOptions(EvaluationOptions):
    """Whether a fold diverges before any training, which layers make it, and what stops it."""

    data: Annotated[Sequence[str], Option("Texts: a file or glob pattern; the first that is long enough is read.")]
    text_field: TextField = "text"
    segment_length: Annotated[int, Option("Tokens of a segment.", min=2)] = 256
    num_segments: Annotated[int, Option("Segments of the text that are read.", flags=("--segments",), min=4)] = 16
    shares: Annotated[
        Sequence[str],
        Option(
            "Memory shares beside 0 and 1, separated by commas: a number, or one for each layer (1:0:0:0).",
            spelling=NAMES,
            check=_check_shares,
            may_change=True,
        ),
    ] = ("0.2", "0.5", "0.8", "0.9")
    sink_token_id: Annotated[int | None, Option("Token of the sink; default: the model's bos_token_id.", min=0)] = None
    attention: AnyAttention = "auto"


@dataclass(frozen=True, kw_only=True)
class SummarizationOptions(EvaluationOptions):
    """ROUGE of summaries, by length of the document (table II, figures 9, 11, 12)."""

    chat: Chat = ()
    data: Annotated[str, Option("cnn_dailymail, booksum, scitldr, or a .jsonl or .parquet file.")]
    text_field: Annotated[
        str | None, Option("Field of the file that holds the document; default text.", may_change=True)
    ] = None
    summary_field: Annotated[
        str | None, Option("Field of the file that holds the reference; default summary.", may_change=True)
    ] = None
    num_documents: Annotated[
        int | None,
        Option("Use this many documents from the start; default all.", flags=("--documents",), min=1, may_change=True),
    ] = None
    longest: Annotated[
        int | None, Option("Tokens; documents with a longer prompt are left out and counted.", min=1, may_change=True)
    ] = None
    bad_documents: Annotated[
        BadDocuments,
        Option("Broken lines and missing fields: end with an error, or skip and count them.", may_change=True),
    ] = "refuse"
    temperature: Annotated[float, Option("0 always picks the likeliest token.", min=0)] = 0.3
    new_tokens: Annotated[int, Option("Tokens of a summary, at most.", min=1)] = 256
    batch_size: Annotated[int, Option("Documents in a batch.", flags=("--batch",), min=1)] = 8
    seed: Annotated[int, Option("Seed of the sampling.", min=0)] = 0


@dataclass(frozen=True, kw_only=True)
class AnswersOptions(EvaluationOptions):
    """Answers to prompts of your own: a file with a prompt and the right answer in each line."""

    chat: Chat = ()
    data: Annotated[Sequence[str], Option("Prompts and answers: a .jsonl or .parquet file or glob pattern.")]
    prompt_field: Annotated[str, Option("Field of the prompt; a.b is the field b of the object a.")] = "prompt"
    answer_field: Annotated[str, Option("Field of the right answer, or of a list of right ones.")] = "answer"
    match: Annotated[
        Literal["contains", "begins", "exact", "all"],
        Option(
            "How an answer must match a right one: contain it, begin with it, or be it; case is ignored. all: the "
            "share of the right ones that it contains counts, as in RULER for lists of values."
        ),
    ] = "contains"
    num_prompts: Annotated[
        int | None, Option("Use this many prompts from the start; default all.", flags=("--prompts",), min=1)
    ] = None
    bad_documents: Annotated[
        BadDocuments, Option("Broken lines and missing fields: end with an error, or skip and count them.")
    ] = "refuse"
    new_tokens: Annotated[int, Option("Tokens of an answer, at most.", min=1)] = 32
    batch_size: Annotated[int, Option("Prompts in a batch.", flags=("--batch",), min=1)] = 8


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(EvaluationOptions):
    """RULER, BABILong, LongBench v2, InfiniteBench and GraphWalks of lm-evaluation-harness, by task and length."""

    benchmarks: Annotated[
        Sequence[str],
        Option("Benchmarks, or single tasks of them, separated by commas.", spelling=NAMES, may_change=True),
    ] = ("ruler", "babilong", "longbench2", "infinitebench", "graphwalks")
    lengths: Annotated[
        Sequence[int], Option("Tokens; k and m are 1,024 and 1,048,576.", spelling=NUMBERS, may_change=True)
    ] = SUITE_LENGTHS
    num_prompts: Annotated[
        int | None,
        Option("Prompts of a task at a length, at most; or all.", flags=("--prompts",), spelling=NUMBER_OR_ALL),
    ] = 100
    batch_size: Annotated[int, Option("Prompts in a batch.", flags=("--batch",), min=1, may_change=True)] = 1
    seed: Annotated[int, Option("Seed of the samples that RULER generates.", min=0)] = 0
    samples: Annotated[
        str | None, Option("Folder where RULER's samples are kept; default condense/ruler in HF_HOME.", may_change=True)
    ] = None


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(EvaluationOptions):
    """Scores before softmax over memory and current segment, and the share of attention on the memory (figure 10)."""

    text: Annotated[
        str,
        Option(
            "The text: a .txt file, or the first document of a .jsonl or .parquet file that is long enough; with "
            "--summarize also cnn_dailymail, booksum or scitldr.",
            flags=("--prompt-file", "--data"),
        ),
    ]
    summarize: Annotated[bool, Option("Put the text into the prompt for a summary, as in figure 10.")] = False
    layers: Annotated[
        Sequence[int] | None,
        Option(
            "Layers from 0, separated by commas; default the first, middle and last. The paper counts from 1: of 16 "
            "layers, 0,7,15 are its 1, 8 and 16.",
            spelling=INDICES,
        ),
    ] = None
    segments: Annotated[
        Sequence[int], Option("Segments of the queries, counted from 0; segment 0 has no memory.", spelling=INDICES)
    ] = SEGMENTS
    heads: Annotated[
        Sequence[int], Option("Heads from 0 that get their own maps beside the average of all.", spelling=INDICES)
    ] = ()
    segment_length: SegmentLength = 512
    text_field: TextField = "text"
