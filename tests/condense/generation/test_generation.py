"""`generate` on a folded model gives the tokens of decoding without a cache."""

import copy
import functools

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, LogitsProcessorList, TextStreamer
from transformers.generation.candidate_generator import EarlyExitCandidateGenerator

from condense import CondenseForCausalLM, CondenseModel, FoldedCache, modeling, to_stock
from condense.generation.nonfinite_logits import RefuseNonFiniteLogits
from condense.labs.autoregressivity.model import MultiTokenForCausalLM
from condense.labs.depth.model import convert_to_depth, to_depth_llama
from condense.state.recording import CROP_TOKENS

from .. import models
from ..models import padded_batch, random_durations, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")

NUM_NEW = 13  # two segment borders or three, with segments of 5
greedy = functools.partial(models.greedy, num_new=NUM_NEW)


def generated(model, ids=None, **options):
    return model.generate(ids, **{"max_new_tokens": NUM_NEW, "do_sample": False, **options})


def test_greedy_decoding_equals_decoding_without_a_cache():
    model, ids = tiny_model(), random_ids(2, 7)
    assert torch.equal(generated(model, ids), greedy(model, ids))


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 8])
def test_prefill_in_chunks_does_not_change_tokens(chunk_size):
    model, ids = tiny_model(), random_ids(2, 17)
    assert torch.equal(generated(model, ids, prefill_chunk_size=chunk_size), greedy(model, ids))


LENGTHS = [3, 13, 7, 20, 5]


@functools.cache
def alone(row, implementation, beams):
    """The new tokens of a text of `padded_batch` without the others."""
    tokens = padded_batch(LENGTHS, "left")[0][row][None]
    model = tiny_model(attn_implementation=implementation)
    return generated(model, tokens, num_beams=beams)[0, LENGTHS[row] :].tolist()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "options", [{}, {"prefill_chunk_size": 4}, {"num_beams": 3}], ids=["greedy", "chunks", "beams"]
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_does_not_change_the_tokens_of_a_prompt(side, options, implementation):
    """Rows have different offsets in their segments, and complete segments at different steps."""
    model = tiny_model(attn_implementation=implementation)
    rows, ids, mask = padded_batch(LENGTHS, side)
    output = generated(model, ids, attention_mask=mask, **options)
    beams = options.get("num_beams", 1)
    assert output[:, ids.shape[1] :].tolist() == [alone(row, implementation, beams) for row in range(len(rows))]


@pytest.fixture(scope="module")
def tokenizer(stories):
    return AutoTokenizer.from_pretrained(stories)


PROMPTS = ["Once upon a time", "Tom and Lily went to the park. They saw a big dog. The dog was", "One day"]


@pytest.fixture(scope="module")
def continued_prompts(stories, tokenizer):
    """A pretrained model, and its tokens after each of the prompts alone."""
    model, continued = CondenseForCausalLM.from_pretrained(stories, segment_length=16).eval(), []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        continued.append(output[0, inputs["input_ids"].shape[1] :].tolist())
    return model, continued


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_the_tokens_of_a_pretrained_model(side, stories, continued_prompts):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token or "</s>", side
    batch = tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    model, expected = continued_prompts
    output = model.generate(**batch, max_new_tokens=40, do_sample=False)
    assert output[:, batch["input_ids"].shape[1] :].tolist() == expected


@pytest.mark.parametrize("beams", [2, 4])
def test_beam_search_equals_beam_search_without_a_cache(beams):
    model, ids = tiny_model(), random_ids(1, 7)
    assert generated(model, ids, num_beams=beams)[0].tolist() == models.beam_search(model, ids, NUM_NEW, beams)


def test_sampling_with_a_seed_equals_sampling_without_a_cache():
    model, ids = tiny_model(), random_ids(2, 7)
    torch.manual_seed(3)
    output = generated(model, ids, do_sample=True, top_k=0, temperature=0.8)
    torch.manual_seed(3)
    expected = ids
    for _ in range(NUM_NEW):
        logits = model(expected, use_cache=False).logits[:, -1].float() / 0.8
        expected = torch.cat([expected, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    assert torch.equal(output, expected)


def test_num_return_sequences_with_sampling_and_beams():
    model = tiny_model()
    _, ids, mask = padded_batch([3, 8], "left")
    torch.manual_seed(0)
    output = generated(model, ids, attention_mask=mask, do_sample=True, num_return_sequences=3)
    assert output.shape == (6, 8 + NUM_NEW)
    assert torch.equal(output[:, :8], ids.repeat_interleave(3, dim=0))
    assert len({tuple(row.tolist()) for row in output}) == 6
    beams = generated(model, ids, attention_mask=mask, num_beams=3, num_return_sequences=3)
    assert torch.equal(beams[::3], generated(model, ids, attention_mask=mask, num_beams=3))


def test_streamers_print_the_output(continued_prompts, tokenizer, capsys):
    model, _ = continued_prompts
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=30, do_sample=False, streamer=TextStreamer(tokenizer))
    assert capsys.readouterr().out.strip() == tokenizer.decode(output[0]).strip()


def test_generate_continues_from_a_cache():
    model, ids, more = tiny_model(), random_ids(1, 13), random_ids(1, 4, seed=1)
    cache = FoldedCache(model.config)
    first = model.generate(ids, max_new_tokens=6, do_sample=False, past_key_values=cache)
    whole_text = torch.cat([first, more], dim=1)
    assert torch.equal(generated(model, whole_text, past_key_values=cache), greedy(model, whole_text))


@pytest.mark.parametrize("given", ["whole text", "new tokens"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"prefill_chunk_size": 6}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}],
    ids=["greedy", "chunks", "beams", "drafts"],
)
def test_a_cache_of_fewer_columns_than_the_new_tokens(options, padded, given):
    """As for other models: the input is the whole text, or the new tokens with the mask of the whole text."""
    model, ids, mask = tiny_model(), repeating_ids(17), torch.ones(1, 17, dtype=torch.long)
    mask[:, 0] = not padded
    expected = generated(model, ids[:, padded:], num_beams=options.get("num_beams", 1))[:, 17 - padded :]
    for seen in (2, 5, 12):
        cache = FoldedCache(model.config)
        model(ids[:, :seen], attention_mask=mask[:, :seen], past_key_values=cache)
        cache.batch_repeat_interleave(options.get("num_beams", 1))
        inputs = ids if given == "whole text" else ids[:, seen:]
        if "prompt_lookup_num_tokens" in options and padded and given == "new tokens":
            with pytest.raises(ValueError, match=f"17 columns, and the input has {17 - seen}: .* pass its tokens too"):
                generated(model, inputs, attention_mask=mask, past_key_values=cache, **options)
            continue
        output = generated(model, inputs, attention_mask=mask, past_key_values=cache, **options)
        assert torch.equal(output[:, inputs.shape[1] :], expected)


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 6}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 4}])
def test_a_cache_that_has_all_of_the_input_is_refused(options, monkeypatch):
    """transformers would read the whole text again, or leave out as many of its first tokens as the cache has more."""
    model, ids = tiny_model(), repeating_ids(17)
    cache = FoldedCache(model.config)
    model(ids, past_key_values=cache)
    monkeypatch.setattr(CondenseModel, "forward", lambda *arguments, **given: pytest.fail("work was done"))
    for text in (ids, ids[:, :5]):
        with pytest.raises(
            ValueError, match=rf"has read 17 columns and the input {text.shape[1]}: pass the whole text"
        ):
            generated(model, text, past_key_values=cache, **options)


def test_an_ended_row_does_not_change_other_rows():
    model = tiny_model()
    rows, ids, mask = padded_batch([3, 13, 7], "left")
    answers = [greedy(model, tokens[None])[0, len(tokens) :].tolist() for tokens in rows]
    end = answers[1][2]  # the second row ends at its third new token
    output = generated(model, ids, attention_mask=mask, eos_token_id=end, pad_token_id=0)[:, 13:]
    for row, answer in enumerate(answers):
        stop = answer.index(end) + 1 if end in answer else NUM_NEW
        assert output[row, :stop].tolist() == answer[:stop]


def test_other_caches_are_refused():
    cache, flex = FoldedCache(tiny_model().config), {"attn_implementation": "flex_attention"}
    with pytest.raises(ValueError, match="the cache is a tuple: pass a FoldedCache"):
        tiny_model().generate(random_ids(1, 4), max_new_tokens=2, past_key_values=((),))
    for name, fields, options, words in (
        ("static", {}, {"past_key_values": cache}, "='static' makes a cache, and another is given as cache"),
        ("static", flex, {}, "='static' has no step for attn.*or leave it out"),
    ):
        with pytest.raises(ValueError, match=words):
            tiny_model(**fields).generate(random_ids(1, 4), max_new_tokens=2, cache_implementation=name, **options)


def test_a_cache_of_transformers_has_no_effect(caplog):
    model, ids = tiny_model(), random_ids(1, 8)
    output = generated(model, ids, cache_implementation="offloaded", return_dict_in_generate=True)
    assert type(output.past_key_values) is FoldedCache and torch.equal(output.sequences, generated(model, ids))
    assert caplog.text.count("cache_implementation='offloaded' has no effect") == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_generation_without_a_cache(side):
    """`use_cache=False` gives the same tokens, and reads the whole text for each."""
    model, (_, ids, mask) = tiny_model(), padded_batch([3, 13, 7], side)
    options = {"attention_mask": mask, "return_dict_in_generate": True}
    output = generated(model, ids, use_cache=False, **options)
    assert output.past_key_values is None
    assert torch.equal(output.sequences, generated(model, ids, **options).sequences)
    assert torch.equal(output.sequences, generated(model, ids, use_cache=None, **options).sequences)
    for text, more in ((ids[:1], {"num_beams": 3}), (ids[1:2], {"new_token_duration": 0.5})):
        assert torch.equal(generated(model, text, use_cache=False, **more), generated(model, text, **more))


UNPAGED = {
    "folded": lambda: tiny_model(attn_implementation="sdpa"),
    "stock hybrid": lambda: to_depth_llama(convert_to_depth(tiny_model(attn_implementation="sdpa"), 1, 2)),
    "wrapper": lambda: MultiTokenForCausalLM.from_base(to_stock(tiny_model(attn_implementation="sdpa")), 2),
}


@pytest.mark.parametrize("kind", UNPAGED)
def test_continuous_batching_is_refused(kind):
    """transformers returned empty answers. `transformers serve` asks whether a model has the method."""
    model = UNPAGED[kind]()
    assert not hasattr(model, "init_continuous_batching")
    for start in (
        lambda: model.generate_batch([[3, 4], [5]], max_new_tokens=2),
        lambda: model.continuous_batching_context_manager().__enter__(),
        lambda: generated(model, random_ids(1, 4), cache_implementation="paged"),
    ):
        with pytest.raises(ValueError, match=rf"continuous batching .*{type(model).__name__} can't use: call generate"):
            start()


@pytest.mark.parametrize("stored", [{"use_cache": False}, {"cache_implementation": "offloaded"}])
@pytest.mark.parametrize("given", ["nothing", "a copy", "a cache"])
def test_a_stored_setting_of_other_caches_has_no_effect(stored, given, tmp_path):
    """It is stored in config.json or generation_config.json; pipelines pass a copy of the latter."""
    model, ids = tiny_model(), random_ids(1, 7)
    expected = greedy(model, ids)
    for name, value in stored.items():
        setattr(model.generation_config, name, value)
        setattr(model.config, name, value) if name == "use_cache" else None
    model.save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="sdpa")
    assert vars(loaded.generation_config).items() >= stored.items()
    options = {
        "nothing": {},
        "a copy": {"generation_config": copy.deepcopy(loaded.generation_config)},
        "a cache": {"past_key_values": FoldedCache(loaded.config)},
    }[given]
    output = generated(loaded, ids, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected) and isinstance(output.past_key_values, FoldedCache)


@pytest.mark.parametrize(("name", "fixed", "steps"), [("static", False, NUM_NEW - 1), ("dynamic", True, 0)])
def test_cache_implementations_are_those_of_steps(name, fixed, steps, noted):
    """ "static" is fixed decoding, "dynamic" is none, for the call; other calls have the model's setting."""
    model, ids, counts = tiny_model(), random_ids(2, 7), noted(modeling, "decode")
    model.fixed_decoding = fixed
    expected = greedy(model, ids)
    output = generated(model, ids, cache_implementation=name)
    assert torch.equal(output, expected) and len(counts) == steps and model.fixed_decoding is fixed
    assert torch.equal(generated(model, ids), expected)
    assert len(counts) == (NUM_NEW - 1 if fixed else steps)


def test_generation_from_embeddings():
    """Alone, with their ids, with padding, durations and beams: the new tokens are those of the ids."""
    model, (_, ids, mask) = tiny_model(), padded_batch([3, 13, 7], "left")
    embeds = model.get_input_embeddings()(ids).detach()
    for options in (
        {}, {"num_beams": 3}, {"durations": random_durations(3, 13)}, {"new_token_duration": 0.5}, {"do_sample": False},
    ):  # fmt: skip
        options = {"attention_mask": mask, **options}
        expected = generated(model, ids, **options)
        assert torch.equal(generated(model, ids, inputs_embeds=embeds, **options), expected)
        assert torch.equal(generated(model, inputs_embeds=embeds, **options), expected[:, 13:])
    assert not torch.equal(generated(model, inputs_embeds=embeds.flip(1), attention_mask=mask), expected[:, 13:])
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"prefill_chunk_size": 4}):
        with pytest.raises(ValueError, match="inputs_embeds.*leave out one of the two"):
            model.generate(ids[1:2], inputs_embeds=embeds[1:2], max_new_tokens=2, do_sample=False, **options)


@pytest.mark.parametrize("memory", ["output", "shares"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_drafts_of_an_early_exit_do_not_change_tokens(layers, memory, noted):
    """The drafts come from the first layers: their logits are those of a model that has no more."""
    model, ids = tiny_model(**models.MEMORIES[memory]), repeating_ids(13)
    drafts = noted(EarlyExitCandidateGenerator, "get_candidates")
    drafted = generated(model, ids, assistant_early_exit=layers)
    assert torch.equal(drafted, greedy(model, ids)) and model.config.num_hidden_layers == 3
    shallow = copy.deepcopy(model)
    shallow.model.layers, shallow.config.num_hidden_layers = shallow.model.layers[:layers], layers
    if memory == "shares":
        shallow.config.memory_share = shallow.config.memory_share[:layers]
    text, logits = drafts[0].result
    expected = shallow(text[:, :-1]).logits[:, ids.shape[1] - 1 :]
    torch.testing.assert_close(logits.double(), expected, atol=1e-5, rtol=1e-5)
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"assistant_early_exit={wrong}: choose 1 to 3"):
            model.generate(ids, assistant_early_exit=wrong, max_new_tokens=2, do_sample=False)


def repeating_ids(num_tokens):
    """A text that repeats its patterns, so that prompt lookup finds drafts."""
    return random_ids(1, 7).repeat(1, -(-num_tokens // 7))[:, :num_tokens]


def noisy_copy(model, scale):
    """An assistant whose drafts are often right: the model with noise on its weights."""
    assistant = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    for parameter in assistant.parameters():
        parameter.data += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    assistant.generation_config.num_assistant_tokens = 6  # and no shorter draft if the assistant is unsure
    assistant.generation_config.assistant_confidence_threshold = 0.0
    return assistant


@functools.cache
def undrafted(segment_length, num_prompt, num_new):
    ids = repeating_ids(num_prompt)
    return tiny_model(segment_length=segment_length).generate(ids, max_new_tokens=num_new, do_sample=False)


KINDS, PROMPT_TOKENS = ("prompt lookup", "folded assistant", "stock assistant"), (3, 10, 26)
PAIRS = [(KINDS[i], length, PROMPT_TOKENS[(i + j) % 3]) for i in range(3) for j, length in enumerate((4, 5, 64))]


@pytest.mark.parametrize(("kind", "segment_length", "num_prompt"), PAIRS)
def test_drafts_do_not_change_tokens(kind, segment_length, num_prompt, noted):
    """Assisted decoding and prompt lookup write the tokens of greedy decoding, over many segment borders. In each case
    the model accepts some tokens of a draft and removes others.
    """
    model, ids = tiny_model(segment_length=segment_length), repeating_ids(num_prompt)
    num_new = 72 - num_prompt if segment_length == 64 else 26
    options = {
        "prompt lookup": {"prompt_lookup_num_tokens": 9, "max_matching_ngram_size": 2},
        "folded assistant": {"assistant_model": noisy_copy(model, 0.02)},
        "stock assistant": {"assistant_model": to_stock(noisy_copy(model, 0.0))},
    }[kind]
    expected, crops = undrafted(segment_length, num_prompt, num_new), noted(FoldedCache, "crop")
    assert torch.equal(generated(model, ids, max_new_tokens=num_new, **options), expected)
    removed = {-call.arguments[1] for call in crops}
    assert max(removed) > 1 and len(removed) > 1


@pytest.mark.parametrize("seen", [0, 1, 6, 19])
@pytest.mark.parametrize("kind", ["prompt lookup", "assistant"])
def test_drafts_continue_a_cache(kind, seen):
    """The cache holds the first tokens of the text, as after an earlier call of `generate`."""
    model, ids = tiny_model(segment_length=5), repeating_ids(20)
    lookup = {"prompt_lookup_num_tokens": 4}
    drafts = lookup if kind == "prompt lookup" else {"assistant_model": noisy_copy(model, 0.02)}
    plain = undrafted(5, 20, 22)
    cache = FoldedCache(model.config)
    if seen:
        model(ids[:, :seen], past_key_values=cache)
    first = model.generate(ids, past_key_values=cache, max_new_tokens=11, do_sample=False, **drafts)
    assert torch.equal(first, plain[:, :31]) and not cache.is_recording
    again = model.generate(first, past_key_values=cache, max_new_tokens=11, do_sample=False, **drafts)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("first", [2, 3, 5, 7])
def test_a_folded_assistant_of_one_token(first):
    """The assistant's cache goes back to the empty state."""
    model, ids = tiny_model(segment_length=5), torch.tensor([[first]])
    drafted = model.generate(ids, assistant_model=noisy_copy(model, 0.3), max_new_tokens=12, do_sample=False)
    assert torch.equal(drafted, model.generate(ids, max_new_tokens=12, do_sample=False))


def test_drafts_longer_than_a_cache_can_remove_are_refused():
    with pytest.raises(ValueError, match=rf"prompt_lookup_num_tokens={CROP_TOKENS + 1}.*smaller"):
        tiny_model().generate(repeating_ids(9), max_new_tokens=2, prompt_lookup_num_tokens=CROP_TOKENS + 1)


def test_generation_continues_after_drafts():
    """The state after drafts is the state after the same tokens; its size does not depend on the number of drafts."""
    model, ids = tiny_model(segment_length=5), repeating_ids(133)
    options = {"prompt_lookup_num_tokens": 9, "return_dict_in_generate": True}
    output = generated(model, ids, max_new_tokens=31, **options)
    plain = generated(model, ids, max_new_tokens=50)
    continued = generated(model, output.sequences, past_key_values=output.past_key_values, max_new_tokens=19)
    assert torch.equal(continued, plain)
    longer = generated(model, ids, max_new_tokens=62, **options)
    assert longer.past_key_values.num_bytes <= 1.02 * output.past_key_values.num_bytes


FOR_STOCK = [{"stop_strings": ["."]}, {"stop_strings": [" was "], "num_beams": 2}]
FOR_STOCK += [{"token_healing": True}, {"guidance_scale": 1.5}]


@pytest.mark.parametrize("options", FOR_STOCK, ids=lambda options: next(iter(options)))
def test_options_that_need_a_tokenizer_work_as_in_the_stock_model(options, stories, tokenizer):
    """With a pretrained model and a text within one segment, the tokens are the same."""
    inputs = tokenizer("Once upon a time, there was", return_tensors="pt", return_token_type_ids=False)
    models_of_text = (kind.from_pretrained(stories) for kind in (LlamaForCausalLM, CondenseForCausalLM))
    options = {**inputs, **options, "tokenizer": tokenizer, "max_new_tokens": 30}
    outputs = [generated(model, **options) for model in models_of_text]
    assert torch.equal(*outputs) and outputs[0].shape[1] > inputs["input_ids"].shape[1]
    if options.get("stop_strings") == ["."]:
        assert tokenizer.decode(outputs[1][0]).endswith(".") and outputs[1].shape[1] < 30


def test_stop_strings_work_across_segments(stories, tokenizer):
    """Up to the stop string, the text is that of generation without one."""
    model = CondenseForCausalLM.from_pretrained(stories, segment_length=8)
    inputs = tokenizer("Once upon a time, there was", return_tensors="pt", return_token_type_ids=False)
    inputs["max_new_tokens"] = 40
    unstopped = tokenizer.decode(generated(model, **inputs)[0])
    stop = unstopped[len(unstopped) // 2 :][:3]
    stopped = tokenizer.decode(generated(model, **inputs, tokenizer=tokenizer, stop_strings=[stop])[0])
    assert stop in stopped and unstopped.startswith(stopped) and len(stopped) < len(unstopped)


def test_a_folded_model_has_no_longest_text_to_be_reminded_of(caplog):
    """The stock model, which has one, still says so: the control."""
    caplog.set_level("WARNING", logger="transformers")
    model = tiny_model(max_position_embeddings=37)  # transformers says each sentence once, and this has the number
    generated(model, random_ids(1, 45))
    assert "friendly reminder" not in caplog.text
    generated(to_stock(model), random_ids(1, 45))
    assert "exceeded the model's predefined maximum length (37)" in caplog.text


def test_forward_refuses_arguments_without_effect():
    """It accepts the arguments that `generate` passes; it refuses unsupported outputs and unknown names."""
    model, ids = tiny_model(), random_ids(1, 7)
    expected = model(ids).logits
    accepted = model(ids, cache_position=torch.arange(7), output_attentions=False, output_hidden_states=None).logits
    torch.testing.assert_close(accepted, expected, atol=0, rtol=0)
    with pytest.raises(ValueError, match="cache_position"):
        model(ids, cache_position=torch.tensor([0, 1, 2, 5, 6, 7, 8]))
    with pytest.raises(TypeError, match="output_attentions"):
        model.generate(ids, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)
    with pytest.raises(TypeError, match="duration'"):
        model(ids, duration=torch.ones(1, 7))


def test_nan_logits_stop_generation():
    model, ids = tiny_model(), random_ids(1, 7)
    model.lm_head.weight[3] = float("nan")
    processors = LogitsProcessorList([RefuseNonFiniteLogits()])
    with pytest.raises(ValueError, match="the model computes logits that are not numbers"):
        model.generate(ids, max_new_tokens=2, logits_processor=processors)
