"""Tests of Megatron-Core's order of samples, against index arrays that its own wheel has built."""

from __future__ import annotations

import inspect
import json
import resource
import struct
import textwrap
from functools import partial
from pathlib import Path
from typing import Any, List, Optional, Sequence

import numpy as np
import pytest

from fugaku_gpt.cli.main import run
from fugaku_gpt.config import RunConfig, load_run_config
from fugaku_gpt.data import indexed, megatron_samples
from fugaku_gpt.data.corpus import read_manifest
from fugaku_gpt.data.megatron_order import StreamOrder, order_blend, order_stream, split_bounds
from fugaku_gpt.data.megatron_samples import MegatronSamples
from fugaku_gpt.data.packed_batch import PackedBatch
from fugaku_gpt.data.sample_checks import NoSamples
from fugaku_gpt.data.samples import SPLITS, open_samples
from fugaku_gpt.errors import ConfigError, DataError
from tests.data import megatron_orders
from tests.data.files import write_megatron
from tests.data.megatron_orders import CASES, COMPARED_SAMPLES, SEEDS, Case, Digests, digest, write_corpora


@pytest.fixture(scope="module", name="corpora")
def _corpora(tmp_path_factory: pytest.TempPathFactory) -> List[Path]:
    return write_corpora(tmp_path_factory.mktemp("corpora"), 3)


def config_of(prefixes: Sequence[Path], case: Case, seed: int, *settings: str) -> RunConfig:
    return load_run_config(
        overrides=[
            f"model.seq_len={megatron_orders.SEQ_LEN}",
            "model.vocab_size=1000",
            f"data.paths={json.dumps(list(map(str, prefixes[: case.corpora])))}",
            f"data.weights={json.dumps(case.weights)}",
            f"data.split={json.dumps(case.split)}",
            "data.order=megatron",
            f"training.seed={seed}",
            f"training.iterations={case.iterations}",
            f"training.global_batch={megatron_orders.BATCH}",
            f"training.eval_interval={megatron_orders.EVAL_INTERVAL}",
            f"training.eval_batches={megatron_orders.EVAL_BATCHES}",
            *settings,
        ]
    )


def opened(config: RunConfig, split: str = "train") -> MegatronSamples:
    samples = open_samples(config, split)
    assert isinstance(samples, MegatronSamples)
    return samples


def digests_of(samples: MegatronSamples, folder: Path, split: str) -> Digests:
    """Writes the indices, reads the files with NumPy alone, and reads samples through them."""
    samples.write_indices(folder)
    samples.open_indices(folder)
    arrays = (path for path in folder.glob(f"*-{split}-*.npy") if not path.stem.endswith("-checksums"))
    digests = {path.stem.split(f"-{split}-")[1]: digest(np.load(path)) for path in arrays}
    return {**digests, "samples": digest(samples.batch(0, min(COMPARED_SAMPLES, samples.size)))}


def order_of(corpora: Sequence[Path], case: Case, seed: int, folder: Path) -> List[Optional[Digests]]:
    config = config_of(corpora, case, seed)
    return [
        digests_of(opened(config, split), folder, split) if share else None for split, share in zip(SPLITS, case.split)
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.name))
def test_all_indices_and_samples_are_those_that_the_wheel_has_built(
    corpora: List[Path], tmp_path: Path, case: Case, seed: int
) -> None:
    """Compares with digests of what megatron-core 0.16.1 built; ``tests/data/megatron_orders.py`` says how."""
    recorded = json.loads(megatron_orders.RECORDED.read_text(encoding="utf-8"))[case.name][str(seed)]
    assert order_of(corpora, case, seed, tmp_path) == recorded


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("seed", [3, 2**31])
def test_all_indices_and_samples_are_those_of_an_installed_wheel(
    corpora: List[Path], tmp_path: Path, seed: int
) -> None:
    pytest.importorskip(
        "megatron.core.datasets.gpt_dataset",
        reason="megatron-core is not installed; to compare with it: pip install --no-deps megatron-core",
    )
    copies = tmp_path / "wheel"  # the wheel makes folders with the names of the prefixes
    copies.mkdir()
    prefixes = write_corpora(copies, len(corpora))
    for number, case in enumerate(CASES):
        folder = tmp_path / str(number)
        folder.mkdir()
        by_wheel = megatron_orders.order_by_wheel(prefixes[: case.corpora], case, seed)
        assert order_of(corpora, case, seed, folder) == by_wheel, case.name


def test_both_ways_to_choose_a_corpus_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.RandomState(2).dirichlet(np.ones(9)).tolist()
    by_loop = order_blend(weights, 3000)
    monkeypatch.setattr("fugaku_gpt.data.megatron_order._MOST_LOOPED_CORPORA", 1)
    for one, other in zip(by_loop, order_blend(weights, 3000)):
        assert one.dtype == other.dtype and one.tolist() == other.tolist()


def test_samples_read_at_random_and_after_a_restart_are_those_read_in_turn(corpora: List[Path], tmp_path: Path) -> None:
    config = config_of(corpora, CASES[3], 7)
    samples = opened(config)
    in_turn = samples.batch(0, 600)
    assert "was built in" in samples.write_indices(tmp_path)[0]
    resumed = opened(config)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "is read from" in resumed.write_indices(tmp_path)[0]
    resumed.open_indices(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files, "nothing is built twice"
    assert resumed.batch(311, 5).tolist() == in_turn[311:316].tolist()
    assert resumed.batch(0, 5).tolist() == in_turn[:5].tolist()


def test_the_number_of_samples_can_be_stated_so_that_a_longer_run_has_the_same_order(corpora: List[Path]) -> None:
    case = CASES[1]
    short, long = config_of(corpora, case, 7), config_of(corpora, case, 7, "training.iterations=400")
    assert opened(short).fingerprint != opened(long).fingerprint
    stated = [
        opened(config_of(corpora, case, 7, f"training.iterations={count}", "data.order_samples=1600"))
        for count in (100, 400)
    ]
    assert stated[0].fingerprint == stated[1].fingerprint == opened(long).fingerprint
    assert stated[0].batch(0, 50).tolist() == opened(long).batch(0, 50).tolist()


@pytest.mark.parametrize(("settings", "corpora_read"), [((), 1), (("data.weights=[3,1,2]",), 3)])
def test_documents_begin_where_the_indices_of_the_corpora_say(
    tmp_path: Path, settings: Sequence[str], corpora_read: int
) -> None:
    lengths = np.random.RandomState(4).randint(0, 20, size=3 * 80).tolist()  # some have no token
    ends = np.cumsum(lengths).tolist()
    documents = [list(range(end - length, end)) for end, length in zip(ends, lengths)]  # all tokens differ
    prefixes = [tmp_path / str(number) for number in range(3)]
    for number, prefix in enumerate(prefixes):
        write_megatron(prefix, documents[number * 80 : number * 80 + 80])
    case = Case("", corpora_read, (), (1, 0, 0), 600)
    samples = opened(config_of(prefixes, case, 7, f"model.vocab_size={ends[-1]}", *settings))
    batch = samples.packed_batch(3, 2000)  # some epochs of each
    assert np.array_equal(batch.tokens, samples.batch(3, 2000))
    first_tokens = [document[0] for document in documents if document]
    assert np.array_equal(batch.begins, np.isin(batch.tokens, first_tokens))


def test_documents_of_a_prepared_corpus_begin_after_the_end_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    texts = inspect.getsource(textwrap).split("\n\n")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert (
        run(["data", "prepare", str(tmp_path / "texts.jsonl"), "--vocab-size", "300", "--out", str(tmp_path / "c")])
        == 0
    )
    end = read_manifest(tmp_path / "c")["end_of_document"]["id"]
    config = config_of([tmp_path / "c"], Case("", 1, (), (9, 1, 0), 500), 7)
    for split in ("train", "valid"):
        samples = opened(config, split)
        batch = samples.packed_batch(0, samples.size)
        follows_end = batch.tokens[:, :-1] == end
        assert follows_end.any() and np.array_equal(batch.begins[:, 1:], follows_end)
        samples.write_indices(tmp_path)
        windows = np.argsort(np.load(next(tmp_path.glob(f"*-{split}-0-shuffle_index.npy"))))
        in_turn = PackedBatch(batch.tokens[windows], batch.begins[windows])  # neighbours share a token
        assert np.array_equal(in_turn.tokens[1:, 0], in_turn.tokens[:-1, -1])
        assert np.array_equal(in_turn.begins[1:, 0], in_turn.begins[:-1, -1]) and in_turn.begins[0, 0]


def test_a_document_mask_makes_other_samples_of_the_same_indices(corpora: List[Path], tmp_path: Path) -> None:
    mask = "data.document_mask=true"
    choices: List[Sequence[str]] = [(), (mask,), (mask, "data.reset_positions=true")]
    choices.append((mask, "data.loss_across_documents=true"))
    fingerprints = set()
    for choice in choices:
        samples = opened(config_of(corpora, CASES[0], 7, *choice))
        fingerprints.add(samples.fingerprint)
        samples.write_indices(tmp_path)
    assert len(fingerprints) == len(choices) and len(list(tmp_path.iterdir())) == 3 + 1


def test_a_damaged_file_is_built_again_or_refused(
    corpora: List[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(corpora, CASES[0], 7)
    expected = opened(config).batch(0, 20).tolist()
    opened(config).write_indices(tmp_path)
    index = next(tmp_path.glob("*shuffle_index.npy"))
    content = index.read_bytes()
    for damaged in (content[:-4], b"", b"\x93NUMPY\x01\x00", b"not an array", content.replace(b"<u4", b"<i4")):
        index.write_bytes(damaged)
        with pytest.raises(DataError, match="missing or damaged"):
            opened(config).open_indices(tmp_path)
        opened(config).write_indices(tmp_path)
        samples = opened(config)
        samples.open_indices(tmp_path)
        assert samples.batch(0, 20).tolist() == expected
    for name in ("shuffle", "sample", "document"):
        index = next(tmp_path.glob(f"*{name}_index.npy"))
        content = index.read_bytes()
        for byte in (b"\x00", b"\xff"):
            index.write_bytes(content[:128] + byte * (len(content) - 128))
            samples = opened(config)
            samples.open_indices(tmp_path)
            with pytest.raises(DataError, match=rf"{name}_index\.npy: an index of the samples is damaged: .*; remove "):
                samples.sample(0)
        index.write_bytes(content)
    for field in StreamOrder._fields:
        samples = opened(config)
        with monkeypatch.context() as context:
            context.setattr(megatron_samples, "order_stream", partial(_order_of_ones, field))
            with pytest.raises(DataError, match="indices of the samples: damaged"):
                samples.sample(0)


def _order_of_ones(field: str, *arguments: Any) -> StreamOrder:
    """An order with all bits set in one of its arrays."""
    order = order_stream(*arguments)
    array = getattr(order, field)
    return order._replace(**{field: np.frombuffer(b"\xff" * array.nbytes, array.dtype).reshape(array.shape)})


@pytest.mark.parametrize(
    ("length", "message"), [(-1, "one of them is negative"), (0, r"they add up to \d+, and their bytes are \d+ tokens")]
)
def test_lengths_that_are_damaged_in_a_large_index_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, message: str
) -> None:
    monkeypatch.setattr(indexed, "CHECKED_AT_ONCE", 2)
    write_megatron(tmp_path / "c", [[1] * 400] * 9)
    content = bytearray((tmp_path / "c.idx").read_bytes())
    struct.pack_into("<3i", content, indexed.HEADER.size + 4 * 3, length, length, length)
    (tmp_path / "c.idx").write_bytes(bytes(content))
    samples = opened(config_of([tmp_path / "c"], Case("", 1, (), (1, 0, 0), 20), 7))
    with pytest.raises(
        DataError, match=rf"c\.idx: damaged: of the lengths of sequences 0 to 8 {message}; .*data verify"
    ):
        samples.write_indices(tmp_path / "order")
    assert not list((tmp_path / "order").iterdir())


def test_an_index_that_cannot_be_written_is_named(corpora: List[Path], tmp_path: Path) -> None:
    samples = opened(config_of(corpora, CASES[0], 7))
    (tmp_path / "order").write_text("no folder")
    with pytest.raises(DataError, match=r"/order: an index of the samples cannot be written: File exists"):
        samples.write_indices(tmp_path / "order")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limit[1]))
    try:
        with pytest.raises(
            DataError, match=r"/indices/.*_index.npy: an index of the samples cannot be written: File too large"
        ):
            samples.write_indices(tmp_path / "indices")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list((tmp_path / "indices").iterdir())


def test_an_order_with_too_few_samples_is_refused(corpora: List[Path]) -> None:
    too_few = config_of(corpora, CASES[0], 7, "data.order_samples=10", "training.iterations=100000")
    with pytest.raises(DataError, match=r"the run takes 400000 samples, and the order has .*order_samples of 400"):
        open_samples(too_few, "train")
    once = config_of(corpora, CASES[5], 7, "training.iterations=100000")
    with pytest.raises(DataError, match=r"reads each corpus of a blend without weights once: state data\.weights"):
        open_samples(once, "train")
    with pytest.raises(NoSamples, match=r"the valid split of the blend has .* state data\.weights"):
        open_samples(config_of(corpora, CASES[5], 7, "training.eval_batches=1000"), "valid")
    skipping = config_of(corpora, CASES[0], 7, 'training.skip_samples=["5-1004"]', "training.iterations=200")
    with pytest.raises(DataError, match="the run takes 1800 samples"):
        open_samples(skipping, "train")
    samples = opened(config_of(corpora, CASES[3], 7))
    with pytest.raises(DataError, match=f"sample {samples.size} is asked for, and the order has {samples.size}"):
        samples.sample(samples.size)


def test_a_split_without_documents_has_no_samples(corpora: List[Path]) -> None:
    with pytest.raises(NoSamples, match="its test split has 0 tokens in 0 documents of 250"):
        open_samples(config_of(corpora, CASES[0], 7), "test")


def test_splits_end_where_the_shares_end() -> None:
    assert split_bounds(250, (969, 30, 1)) == [(0, 242), (242, 250), (250, 250)]
    assert split_bounds(1000, (1, 0, 0)) == [(0, 1000), (1000, 1000), (1000, 1000)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.order=megatron", "training.seed=4294967296"], "training.seed: 4294967296: is too large"),
        (["data.order_samples=5"], "data.order_samples: 5: needs data.order megatron"),
        (["data.order=alphabetical"], "data.order"),
    ],
)
def test_settings_that_no_order_has_are_refused(settings: List[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(overrides=settings)
