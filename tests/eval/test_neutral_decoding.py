"""A checkpoint's generation_config.json changes no measurement, whatever it asks for."""

import json

import pytest
from transformers import GenerationConfig

from condense import CondenseForCausalLM
from condense.eval.decoding import neutral_decoding
from condense.eval.models import load_evaluated
from condense.eval.tasks import evaluate
from condense.labs.autoregressivity.study import text_quality

from .rivals import rival, rival_tokenizer, save_rival
from .tasks.documents import made_documents, write_lines

HOSTILE = {
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[number] for number in range(20, 100)],
    "suppress_tokens": list(range(100, 200)),
    "begin_suppress_tokens": list(range(4, 100)),
    "min_new_tokens": 3,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 9,
    "repetition_penalty": 9.0,
    "encoder_repetition_penalty": 5.0,
    "num_beams": 3,
    "max_time": 1e-9,
    "stop_strings": ["a", "1"],
    "top_k": 1,
    "top_p": 0.01,
    "min_p": 0.9,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.9,
    "temperature": 9.0,
    "do_sample": True,
    "guidance_scale": 3.0,
    "num_return_sequences": 2,
    "cache_implementation": "static",
    "exponential_decay_length_penalty": [1, 9.0],
    "use_cache": False,
    "max_length": 3,
    "output_scores": True,
    "watermarking_config": {"bias": 9.0},
}
pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module", params=["llama", "folded", "mamba"])
def pair(request, tmp_path_factory):
    """Writes two checkpoints of the same weights: one asks for nothing, the other for everything."""
    root, tokenizer = tmp_path_factory.mktemp(request.param), rival_tokenizer()
    for name in ("plain", "hostile"):
        folder = root / name / "model"  # of one name, so results are equal word for word
        save_rival(folder, "mamba" if request.param == "mamba" else "llama", tokenizer)
        if request.param == "folded":
            CondenseForCausalLM.from_pretrained(folder, segment_length=16).save_pretrained(folder)
        path = folder / "generation_config.json"
        facts = json.loads(path.read_text())
        assert facts["eos_token_id"] == tokenizer.eos_token_id
        if name == "hostile":
            path.write_text(json.dumps(facts | HOSTILE))
    return root


def both(pair, tmp_path, kind, **options):
    """Returns the records of both."""
    found = []
    for name in ("plain", "hostile"):
        evaluate(kind, tmp_path / name, models=[str(pair / name / "model")], **options)
        found.append((tmp_path / name / f"{kind}.records.jsonl").read_text().splitlines()[1:])
    assert found[0]
    return found


MEASUREMENTS = {
    "passkey": {"lengths": [80], "depths": (0.0, 1.0), "num_prompts": 3},
    "facts": {"lengths": [100], "kinds": ["one_fact", "two_arguments"], "num_prompts": 3},
    "recall": {"lengths": [64], "pairs": [1, 2], "num_prompts": 3, "forms": ["multi_value"]},
    "perplexity": {"num_segments": 2, "segment_length": 16},
    "fold_cost": {"num_texts": 1, "num_tokens": 40, "segment_lengths": [16], "shares": ["0.2"], "by_position": [0]},
    "summarization": {"summary_field": "target", "new_tokens": 8},
}


def options_of(kind, tmp_path):
    """Returns the options above, and the data that some need."""
    if kind not in ("perplexity", "summarization"):
        return dict(MEASUREMENTS[kind])
    data = str(write_lines(tmp_path / "data.jsonl", made_documents(3)))
    return {**MEASUREMENTS[kind], "text_field": "source", "data": [data] if kind == "perplexity" else data}


@pytest.mark.parametrize("kind", MEASUREMENTS)
def test_a_measurement_says_itself_how_it_decodes(kind, pair, tmp_path):
    if kind == "fold_cost" and "mamba" in str(pair):
        pytest.skip("only Llamas are folded")
    plain, hostile = both(pair, tmp_path, kind, **options_of(kind, tmp_path))
    assert plain == hostile


def test_sampled_summaries_are_those_of_the_temperature(pair, tmp_path):
    plain, hostile = both(pair, tmp_path, "summarization", temperature=2.0, **options_of("summarization", tmp_path))
    assert plain == hostile
    written = [document["prediction"] for line in plain for document in json.loads(line)["record"]["documents"]]
    assert len(set(" ".join(written).split())) > 3


def test_sampled_texts_of_ablations(pair):
    written = []
    for name in ("plain", "hostile"):
        evaluated = load_evaluated(str(pair / name / "model"))
        ids_BN = evaluated.tokenizer(["a cat sat on the mat"] * 2, return_tensors="pt").input_ids
        written.append(text_quality.generate(evaluated.model, ids_BN, 9, seed=3).tolist())
    assert written[0] == written[1]


def test_the_harness(pair, tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra harness")
    from lm_eval.api.instance import Instance

    from condense.eval.harness import CondenseLM, StockLM

    assert lm_eval
    reader, answers = (CondenseLM if "folded" in str(pair) else StockLM), []
    for name in ("plain", "hostile"):
        lm = reader(str(pair / name / "model"), device="cpu", batch_size=2)
        prompts = ["a cat sat on the mat", "and saw two dogs run far away from one old red house by the sea"]
        options = {"until": [], "max_gen_toks": 9}
        requests = [Instance("generate_until", {}, (prompt, options), n) for n, prompt in enumerate(prompts)]
        answers.append(lm.generate_until(requests, disable_tqdm=True))
    assert answers[0] == answers[1] and all(len(answer.split()) > 3 for answer in answers[0])


def test_special_tokens_are_facts_of_the_model(tmp_path):
    """An end of text other than the tokenizer's ends an answer still; afterwards the model has its own wishes again."""
    tokenizer = rival_tokenizer()
    model = rival("llama", tokenizer)
    model.generation_config = own = GenerationConfig(eos_token_id=[5, 6], pad_token_id=7, bos_token_id=8, top_k=1)
    with neutral_decoding(model):
        neutral = model.generation_config.to_diff_dict()
    neutral.pop("transformers_version")
    assert neutral == {"eos_token_id": [5, 6], "pad_token_id": 7, "bos_token_id": 8}
    assert model.generation_config is own
