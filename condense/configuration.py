"""The configuration of a folded Llama: a Llama's own, and five fields about the fold."""

from transformers import LlamaConfig

MEMORY_SOURCES = ("layer_output", "layer_input")
SCHEDULES = ("auto", "sequential", "wavefront")
POSITION_ANCHORS = ("end", "start")
OWN_ATTENTION = ("auto", "blocked")
ATTENTION_IMPLEMENTATIONS = (*OWN_ATTENTION, "eager", "sdpa", "flash_attention_2", "flex_attention")


class CondenseConfig(LlamaConfig):
    """A `LlamaConfig` with:

    segment_length: tokens per segment, `l`; attention spans the last segment and the current one.
    memory_source: what a layer remembers of a segment, its own output (`"layer_output"`, the fold)
        or its input (`"layer_input"`, Transformer-XL, for comparison).
    bptt_segments: None lets gradients cross every segment border; `k` detaches the memory after
        segments k, 2k, 3k ..., so that a graph spans k segments.
    schedule: the order in which (layer, segment) cells are run: `"sequential"`, all layers of a segment and
        then the next segment; `"wavefront"`, all cells of a diagonal at once; `"auto"` chooses by size.
    position_anchor: where in its interval a token of fractional duration sits.

    Raises `ValueError` for a value outside these, and for a checkpoint that is no Llama.
    """

    model_type = "condense_llama"

    segment_length: int = 512
    memory_source: str = "layer_output"
    bptt_segments: int | None = None
    schedule: str = "auto"
    position_anchor: str = "end"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Raises `ValueError` naming the first field of the fold that makes no sense."""
        _check_count("segment_length", self.segment_length)
        if self.bptt_segments is not None:
            _check_count("bptt_segments", self.bptt_segments, " or None for full backpropagation")
        for name, choices in (
            ("memory_source", MEMORY_SOURCES),
            ("schedule", SCHEDULES),
            ("position_anchor", POSITION_ANCHORS),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not known: choose one of {', '.join(map(repr, choices))}.")

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """Reads the config of a folded or a stock Llama checkpoint; refuses any other."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        model_type = config_dict.get("model_type")
        if config_dict and model_type not in (cls.model_type, LlamaConfig.model_type):
            raise ValueError(
                f"{pretrained_model_name_or_path!r} is a checkpoint of type {model_type!r}: condense folds Llama "
                f"checkpoints (model_type {LlamaConfig.model_type!r}) and loads its own ({cls.model_type!r})."
            )
        return {**config_dict, "model_type": cls.model_type}, kwargs


def _check_count(name: str, value, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a number of at least 1: pass a positive whole number{alternative}.")
