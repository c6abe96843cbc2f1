"""Tests of the order of samples: Megatron's windows over permuted documents, without state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Iterator, List, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.data.permutation import permutation, permuted_index, stream_key
from fugaku_gpt.data.sample_checks import NoSamples
from fugaku_gpt.data.samples import SampleSource, open_samples, split_bounds, splits_of
from fugaku_gpt.errors import DataError
from tests.data.files import write_megatron

SEED = 11


def config_of(*paths: Path, seq_len: int = 5, settings: Sequence[str] = ()) -> RunConfig:
    fixed = [f"model.seq_len={seq_len}", "model.vocab_size=30000", f"training.seed={SEED}", "data.split=[1,0,0]"]
    return load_run_config(overrides=[*fixed, f"data.paths={json.dumps([str(path) for path in paths])}", *settings])


def documents_of(lengths: Sequence[int]) -> List[List[int]]:
    """Documents whose tokens are all different."""
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + length)) for start, length in zip(starts.tolist(), lengths)]


def megatron_windows(ordered: Iterator[List[int]], seq_len: int) -> Iterator[List[int]]:
    """Yields the samples of Megatron's sample index: each takes seq_len + 1 tokens from the ordered documents, and the
    next starts at the last token taken."""
    document, offset = next(ordered), 0
    while True:
        sample: List[int] = []
        while True:
            sample += document[offset : offset + seq_len + 1 - len(sample)]
            if len(sample) == seq_len + 1:
                offset = document.index(sample[-1])
                break
            document, offset = next(ordered), 0
        yield sample


def endless(documents: List[List[int]], key: int) -> Iterator[List[int]]:
    epoch = 0
    while True:
        for number in permutation(stream_key(key, "documents", epoch), len(documents)).tolist():
            yield documents[number]
        epoch += 1


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(lambda lengths: sum(lengths) >= 12)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 11), st.randoms(use_true_random=False))
def test_windows_are_megatrons(
    tmp_path_factory: pytest.TempPathFactory, lengths: List[int], s: int, random: object
) -> None:
    documents = documents_of(lengths)
    folder = tmp_path_factory.mktemp("corpus")
    write_megatron(folder / "c", documents)
    source = open_samples(config_of(folder / "c", seq_len=s), "train")
    total = sum(lengths)
    key = stream_key(SEED, "train", 0)
    walk = megatron_windows(endless(documents, key), s)
    number = 0
    for epoch in range(3):
        first, last = -(-epoch * total // s), -(-(epoch + 1) * total // s)  # windows that start in this epoch
        windows = [next(walk) for _ in range(first, last)]
        samples = [source.sample(n).tolist() for n in range(first, last)]
        assert sorted(samples) == sorted(windows)
        keys = stream_key(key, "windows", epoch)
        assert samples == [windows[permuted_index(keys, last - first, n)] for n in range(last - first)]
        number = last
    again = open_samples(config_of(folder / "c", seq_len=s), "train")
    assert again.sample(number - 1).tolist() == source.sample(number - 1).tolist(), "at random as in sequence"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 11))
def test_documents_begin_where_the_indices_of_the_corpora_say(
    tmp_path_factory: pytest.TempPathFactory, lengths: List[int], others: List[int], s: int
) -> None:
    documents = documents_of([*lengths, *others])  # the tokens of one corpus are not those of the other
    folder = tmp_path_factory.mktemp("corpus")
    write_megatron(folder / "a", documents[: len(lengths)])
    write_megatron(folder / "b", documents[len(lengths) :])
    source = open_samples(config_of(folder / "a", folder / "b", seq_len=s), "train")
    count = 3 * sum([*lengths, *others]) // s  # some epochs of each
    batch = source.packed_batch(2, count)
    assert np.array_equal(batch.tokens, source.batch(2, count))
    first_tokens = [document[0] for document in documents if document]
    assert np.array_equal(batch.begins, np.isin(batch.tokens, first_tokens))


def test_a_document_mask_makes_other_samples_of_the_same_corpus(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", documents_of([7, 13, 1, 19]))
    mask = "data.document_mask=true"
    choices: List[Sequence[str]] = [(), (mask,), (mask, "data.reset_positions=true")]
    choices.append((mask, "data.loss_across_documents=true"))
    fingerprints = [open_samples(config_of(tmp_path / "c", settings=choice), "train").fingerprint for choice in choices]
    assert len(set(fingerprints)) == len(choices)


def test_an_epoch_shows_each_token_once(tmp_path: Path) -> None:
    documents = documents_of([7, 13, 1, 19])  # 40 tokens, 8 samples of 5
    write_megatron(tmp_path / "c", documents)
    source = open_samples(config_of(tmp_path / "c"), "train")
    assert (source.tokens, source.documents, source.seq_len) == (40, 4, 5)
    for epoch in range(4):
        batch = source.batch(8 * epoch, 8)
        assert batch.shape == (8, 6) and batch.dtype == np.int64
        assert sorted(batch[:, :-1].ravel().tolist()) == list(range(40)), "inputs"
    orders = {tuple(source.batch(8 * epoch, 8).ravel().tolist()) for epoch in range(4)}
    assert len(orders) == 4, "epochs differ"


def test_the_seed_and_the_split_change_the_order(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", documents_of([9] * 30))
    split = "data.split=[1,1,1]"

    def batches(seed: int, name: str) -> List[List[int]]:
        settings = [split, f"training.seed={seed}"]
        token_rows: List[List[int]] = (
            open_samples(config_of(tmp_path / "c", settings=settings), name).batch(0, 18).tolist()
        )
        return token_rows

    assert batches(1, "train") == batches(1, "train") != batches(2, "train")
    for number, name in enumerate(("train", "valid", "test")):
        inputs = sorted(token for sample in batches(1, name) for token in sample[:-1])
        assert inputs == list(range(90 * number, 90 * (number + 1))), "splits share no document"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3000), st.tuples(st.integers(1, 1000), st.integers(0, 100), st.integers(0, 100)))
def test_splits_partition_the_documents(documents: int, shares: Sequence[int]) -> None:
    bounds = split_bounds(documents, shares)
    assert bounds[0][0] == 0 and bounds[-1][1] == documents
    assert all(first <= last for first, last in bounds)
    assert [last for _, last in bounds[:-1]] == [first for first, _ in bounds[1:]]


@pytest.mark.parametrize(
    ("documents", "expected"),
    [(1000, [969, 30, 1]), (454, [440, 14, 0]), (100, [97, 3, 0]), (16, [16, 0, 0]), (1, [1, 0, 0])],
)
def test_splits_round_as_megatrons(documents: int, expected: List[int]) -> None:
    assert [last - first for first, last in split_bounds(documents, (969, 30, 1))] == expected


@pytest.mark.parametrize(
    ("lengths", "shares", "expected"),
    [
        ([9] * 16, (969, 30, 1), [15, 1, 0]),
        ([9] * 17, (969, 30, 1), [16, 1, 0]),
        ([9, 9], (969, 30, 1), [1, 1, 0]),
        ([9] * 40, (98, 1, 1), [39, 1, 0]),
        ([9] * 16, (1, 0, 0), [16, 0, 0]),
        ([9], (969, 30, 1), [1, 0, 0]),
        ([9, 5], (969, 30, 1), [2, 0, 0]),
        ([5, 9], (969, 30, 1), [2, 0, 0]),
        ([3, 3, 9], (969, 30, 1), [2, 1, 0]),
    ],
)
def test_a_small_corpus_has_a_document_for_validation_if_both_splits_have_a_sample(
    lengths: List[int], shares: Sequence[float], expected: List[int]
) -> None:
    bounds = splits_of(np.array(lengths), shares, 5)
    assert [last - first for first, last in bounds] == expected
    assert bounds[0][0] == 0 and [last for _, last in bounds[:-1]] == [first for first, _ in bounds[1:]]


def test_the_validation_of_a_small_corpus_has_samples_that_training_has_not(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", documents_of([9] * 3))
    config = config_of(tmp_path / "c", settings=["data.split=[969,30,1]"])
    train, valid = open_samples(config, "train"), open_samples(config, "valid")
    assert (train.documents, valid.documents) == (2, 1)
    assert set(valid.batch(0, 9).ravel().tolist()) == set(range(18, 27))
    assert set(train.batch(0, 9).ravel().tolist()) == set(range(18))
    longer = open_samples(config_of(tmp_path / "c", seq_len=10, settings=["data.split=[969,30,1]"]), "train")
    assert longer.documents == 3, "no document is long enough"
    unsplit = open_samples(config_of(tmp_path / "c"), "train")
    assert len({train.fingerprint, longer.fingerprint, unsplit.fingerprint}) == 3


def test_a_corpus_without_a_validation_part_says_why(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", documents_of([99]))
    with pytest.raises(NoSamples, match=r"its valid split has 0 tokens in 0 documents of 1, less than one sample"):
        open_samples(config_of(tmp_path / "c", settings=["data.split=[969,30,1]"]), "valid")


def test_corpora_are_blended_by_weight(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [[1] * 40] * 3)
    write_megatron(tmp_path / "b", [[2] * 40])

    def share(source: SampleSource) -> float:
        return float(np.mean(source.batch(0, 1000) == 1))

    paths = (tmp_path / "a", tmp_path / "b")
    by_tokens = open_samples(config_of(*paths), "train")
    by_weight = open_samples(config_of(*paths, settings=["data.weights=[1,9]"]), "train")
    assert share(by_tokens) == pytest.approx(0.75, abs=0.001)
    assert share(by_weight) == pytest.approx(0.1, abs=0.001)
    assert by_tokens.tokens == 160 and by_tokens.documents == 4
    assert by_tokens.fingerprint != by_weight.fingerprint


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    write_megatron(tmp_path / "c", [[1] * 40])
    before = open_samples(config_of(tmp_path / "c"), "train").fingerprint
    assert open_samples(config_of(tmp_path / "c.bin"), "train").fingerprint == before, "not the name"
    write_megatron(tmp_path / "c", [[1] * 39 + [2]])
    assert open_samples(config_of(tmp_path / "c"), "train").fingerprint != before
    write_megatron(tmp_path / "c", [[1] * 41])
    assert open_samples(config_of(tmp_path / "c"), "train").fingerprint != before


@pytest.mark.parametrize(("tokens", "wrong"), [([1, 30000, 3], "30000"), ([1, -2, 3], "-2")])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, tokens: List[int], wrong: str) -> None:
    write_megatron(tmp_path / "c", [tokens * 5])
    source = open_samples(config_of(tmp_path / "c"), "train")
    with pytest.raises(DataError, match=rf"c\.bin: token id {wrong} .* model.vocab_size is 30000"):
        source.batch(0, 3)


def test_paths_without_enough_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.paths: empty.*data prepare"):
        open_samples(config_of(), "train")
    with pytest.raises(DataError, match="neither a folder made by"):
        open_samples(config_of(tmp_path / "nothing"), "train")
    write_megatron(tmp_path / "c", [[1, 2, 3]])
    with pytest.raises(DataError, match=r"train split has 3 tokens .* model.seq_len \+ 1 = 6"):
        open_samples(config_of(tmp_path / "c"), "train")
    with pytest.raises(DataError, match="valid split has 0 tokens"):
        open_samples(config_of(tmp_path / "c"), "valid")
