"""Documents for summaries: which of them are read, in which order, and what becomes of broken ones."""

import pytest

from condense.eval.tasks.corpus import find_source, read_corpus
from condense.training.data.summarization import AFTER, BEFORE, prompt_ids
from condense.training.small_llama import word_tokenizer

from .documents import WORDS, write_lines


def test_documents_are_the_first_and_the_shortest_come_first(tmp_path):
    tokenizer = word_tokenizer([BEFORE, AFTER, *WORDS])
    texts = ["the cat sat on the mat", "two dogs", "a red house", "the sea", "one old mat"]
    path = write_lines(tmp_path / "data.jsonl", [{"text": text, "summary": text.upper()} for text in texts])
    corpus = read_corpus(find_source(str(path)), tokenizer, num_documents=4)
    assert [document.text for document in corpus.documents] == ["two dogs", "the sea", "a red house", texts[0]]
    assert corpus.num_tokens == [2, 2, 3, 6] and corpus.left_out == {}
    frame = len(prompt_ids(tokenizer, ""))
    corpus = read_corpus(find_source(str(path)), tokenizer, num_documents=4, longest=frame + 2)
    assert [document.text for document in corpus.documents] == ["two dogs", "the sea"]
    assert corpus.left_out == {f"prompt over {frame + 2} tokens": 2}  # of the first four, not of all
    with pytest.raises(ValueError, match=rf"no document to summarise \(prompt over {frame} tokens: 5\)"):
        read_corpus(find_source(str(path)), tokenizer, longest=frame)


def test_broken_documents(tmp_path):
    tokenizer = word_tokenizer(WORDS)
    lines = ['{"text": "a cat", "summary": "cat"}', '{"text": "a cat"}', "{", '{"text": "a cat", "summary": "猫 です"}']
    path = tmp_path / "data.jsonl"
    for broken, message in (
        (lines[1], r"2: missing field \('summary'; there are 'text': .* --summary-field .*--bad-documents skip"),
        (lines[2], r"data.jsonl:2: broken JSON"),
        (lines[3], r"data.jsonl:2: summary without words of a-z and 0-9 \('猫 です'\)"),
    ):
        path.write_text(f"{lines[0]}\n{broken}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_corpus(find_source(str(path)), tokenizer)
    path.write_text("\n".join([*lines, lines[1], lines[0]]), encoding="utf-8")
    corpus = read_corpus(find_source(str(path)), tokenizer, num_documents=2, bad_documents="skip")
    assert len(corpus.documents) == 2  # broken ones don't count
    assert corpus.left_out == {"missing field": 2, "broken JSON": 1, "summary without words of a-z and 0-9": 1}
    path.write_text("")
    with pytest.raises(ValueError, match=r"data.jsonl has no document to summarise \(it is empty\)"):
        read_corpus(find_source(str(path)), tokenizer)


def test_known_data_sets(tmp_path, monkeypatch):
    """With the fields that they have on the hub; SciTLDR comes as the file of one of its configurations."""
    from datasets import Dataset, IterableDataset

    rows = {
        ("abisee/cnn_dailymail", "3.0.0", "test"): {"article": "long", "highlights": "one .\ntwo .", "id": "x"},
        ("kmfoda/booksum", None, "test"): {"chapter": "long", "summary_text": "one", "summary": "{}", "book_id": "y"},
    }

    def load_dataset(hub, name, split, **options):
        return IterableDataset.from_generator(lambda: iter([rows[hub, name, split]]))

    def download(repository, file, repo_type, revision):
        assert (repository, repo_type, revision) == ("allenai/scitldr", "dataset", "refs/convert/parquet")
        folder, split, name = file.split("/")
        assert (folder, split) == ("Abstract", "test")
        Dataset.from_list([{"source": ["a b.", "c."], "target": ["one", "two"]}]).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    tokenizer = word_tokenizer(WORDS)
    for name, text, summary in (
        ("cnn_dailymail", "long", "one .\ntwo ."), ("booksum", "long", "one"), ("scitldr", "a b. c.", "one")
    ):  # fmt: skip
        (document,) = read_corpus(find_source(name), tokenizer).documents
        assert (document.text, document.summary) == (text, summary)
