"""Streams of the hub, on local files."""


def stream_files(monkeypatch, kind, pattern) -> list[tuple[tuple, dict]]:
    """Lets `datasets.load_dataset` stream local files. Returns a list that gets the arguments of each call."""
    import datasets  # not in every worker process

    load, asked = datasets.load_dataset, []

    def load_dataset(*names, **options):
        asked.append((names, options))
        return load(kind, data_files=str(pattern), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked
