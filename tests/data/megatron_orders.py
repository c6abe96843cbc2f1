"""Orders of samples by Megatron-Core's own wheel: ``python -m tests.data.megatron_orders`` writes their digests to
``megatron_orders.json`` beside this file. It needs PyTorch and what ``pip install --no-deps megatron-core==0.16.1``
puts on the path; of the wheel, ``BlendedMegatronDatasetBuilder`` builds ``GPTDataset`` with its compiled helpers."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from tests.data.files import write_megatron

RECORDED = Path(__file__).with_name("megatron_orders.json")
SEQ_LEN, EVAL_INTERVAL, EVAL_BATCHES, BATCH = 7, 50, 3, 4
COMPARED_SAMPLES = 40
Digests = Dict[str, str]


class Case(NamedTuple):
    """A run whose order is compared."""

    name: str
    corpora: int
    weights: Tuple[float, ...]
    split: Tuple[float, ...]
    iterations: int


CASES = (
    Case("part of an epoch", 1, (), (90, 10, 0), 60),
    Case("a short last epoch", 1, (), (80, 15, 5), 330),
    Case("a long last epoch", 1, (), (90, 8, 2), 560),
    Case("a weighted blend", 3, (0.3, 0.5, 1.7), (80, 15, 5), 500),
    Case("one corpus with a weight", 1, (2.0,), (1, 0, 0), 200),
    Case("a blend without weights", 3, (), (80, 15, 5), 90),
)
SEEDS = (1234, 7, 2**32 - 1)


def write_corpora(folder: Path, count: int) -> List[Path]:
    """Writes corpora of 250 documents of 0 to 19 tokens, the same at each call; returns their prefixes."""
    random = np.random.RandomState(5)
    prefixes = []
    for number in range(count):
        prefixes.append(folder / f"corpus-{number}")
        lengths = random.randint(0, 20, size=250).tolist()
        write_megatron(prefixes[-1], [random.randint(0, 1000, size=length).tolist() for length in lengths])
    return prefixes


def digest(values: "np.ndarray[Any, np.dtype[Any]]") -> str:
    """SHA-256 of an array's type, shape and bytes."""
    head = f"{values.dtype.str} {values.shape} ".encode()
    return hashlib.sha256(head + np.ascontiguousarray(values).tobytes()).hexdigest()


def sizes_of(case: Case) -> List[int]:
    """Samples of train, valid and test, as Megatron's training asks for them."""
    validations = case.iterations // EVAL_INTERVAL + 1
    return [case.iterations * BATCH, validations * EVAL_BATCHES * BATCH, EVAL_BATCHES * BATCH]


def order_by_wheel(prefixes: Sequence[Path], case: Case, seed: int) -> List[Optional[Digests]]:
    """The digests of the index arrays and of the first samples of train, valid and test, by the wheel; None for a
    split without a share."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad = 60000, 0, -1
        unique_identifiers: Dict[str, str] = {}

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=SEQ_LEN,
        blend=([str(prefix) for prefix in prefixes], list(case.weights) or None),
        split=",".join(map(str, case.split)),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=None,  # beside the corpora: with a folder of its own, a blend needs torch.distributed
        mid_level_dataset_surplus=0.005,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes_of(case), lambda: True, config).build()
    return [_digests_of(dataset) if dataset is not None else None for dataset in built]


def _digests_of(dataset: Any) -> Digests:
    streams = getattr(dataset, "datasets", [dataset])
    digests = {
        f"{number}-{name}": digest(getattr(stream, name))
        for number, stream in enumerate(streams)
        for name in ("document_index", "sample_index", "shuffle_index")
    }
    if streams != [dataset]:
        digests.update({f"blend-{name}": digest(getattr(dataset, name)) for name in _OF_BLEND})
    rows = [dataset[number] for number in range(min(COMPARED_SAMPLES, len(dataset)))]
    tokens = [[*row["tokens"].tolist(), int(row["labels"][-1])] for row in rows]
    return {**digests, "samples": digest(np.array(tokens, dtype=np.int64))}


_OF_BLEND = ("dataset_index", "dataset_sample_index")


def main() -> None:
    """Writes the digests of all cases and seeds."""
    with tempfile.TemporaryDirectory() as folder:
        prefixes = write_corpora(Path(folder), max(case.corpora for case in CASES))
        recorded = {
            case.name: {str(seed): order_by_wheel(prefixes[: case.corpora], case, seed) for seed in SEEDS}
            for case in CASES
        }
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
