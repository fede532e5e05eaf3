"""The sequences of a run that is given more steps."""

from condense.training.data.continued import Lot, continued


class Long:
    """New documents, which fit into no short sequence."""

    def num_sequences(self, total_length):
        if total_length < 2000:
            raise ValueError(f"no prompt with its answer fits into total_length={total_length} tokens: allow more.")
        return 4

    def sequence(self, number, total_length):
        return [f"new {number}"]


class Former(Long):
    def sequence(self, number, total_length):
        return [f"old {number}"]


def test_a_length_without_further_sequences_asks_no_new_documents():
    lots = [Lot({512: 8, 4096: 8}, 10), Lot({512: 8, 4096: 12}, 14)]
    examples = continued(lambda first, last: Former() if first == 0 else Long(), 0, lots)
    assert examples.sequence(7, 512) == ["old 7"] and examples.sequence(7, 4096) == ["old 7"]
    assert examples.sequence(8, 4096) == ["new 0"]
