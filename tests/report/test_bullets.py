"""Tests of lists of bullets: how they are read and written, and what is marked in them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fugaku_gpt.config.schema import DTYPES, RECOMPUTE
from fugaku_gpt.errors import UsageError
from fugaku_gpt.records.bullet_form import pair_of, pair_text
from fugaku_gpt.records.run import FAILED, HUNG, INTERRUPTED, LOST, OK, OUT_OF_MEMORY, REFUSED, TIMEOUT
from fugaku_gpt.report.bullets import Bullet, bullet_text, marks_of, read_bullets

SHEET = """\
# Rates, by hand (of spring)

Prose with a batch size of 64: ~ 3 images/s.

## vision1 on 4x L4, fp32, bucket=16+30
- global batch size 64, remat=True, bf16: ~ 70 images/s
- compile time: 2 minutes
* batch size: 1,024, remat=False: OOM
## tiny on Apple M1 CPU
  1. global batch size 8, recompute=selective, seq_len=128, flat: 1,234.5 samples per second (one try)
## Once more, flat
+ global batch size 8: hang
"""


def only(line: str, *given: str) -> Bullet:
    (bullet,) = read_bullets(f"- {line}\n", "s.md", given)
    return bullet


def test_settings_are_of_the_bullet_then_of_the_title() -> None:
    first, last, other, bare = read_bullets(SHEET, "s.md")
    assert first == Bullet(
        64, "vision1", "4x L4", "full", "bfloat16", more=("bucket=16+30",), rate=70.0, sample="images", line=6
    )
    assert last == Bullet(
        1024, "vision1", "4x L4", "none", "float32", more=("bucket=16+30",), status=OUT_OF_MEMORY, line=8
    )
    assert (other.model, other.hardware, other.recompute, other.seq_len) == ("tiny", "Apple M1 CPU", "selective", 128)
    assert (other.more, other.rate, other.sample, other.remark) == (("flat",), 1234.5, "samples", "one try")
    assert (bare.model, bare.hardware, bare.status, bare.line) == ("", "", HUNG, 12)


def test_titles_hold_for_the_titles_below_them() -> None:
    text = """\
# vision1 on 4x L4, fp32, bucket=16+30
## Second try, bucket=30
- batch 8, bf16: OOM
### Third
- batch 8: OOM
## Fourth
- batch 8: OOM
# Results
- batch 8: OOM
"""
    second, third, fourth, last = read_bullets(text, "s.md", ["model=124M"])
    assert {(b.model, b.hardware) for b in (second, third, fourth)} == {("vision1", "4x L4")}
    assert (second.dtype, second.more) == ("bfloat16", ("bucket=30",)) and third.dtype == "float32"
    assert third.more == ("bucket=30",) and fourth.more == ("bucket=16+30",)
    assert (last.model, last.hardware, last.dtype, last.more) == ("124M", "", None, ())


@pytest.mark.parametrize(
    ("line", "size", "seq_len"),
    [
        ("global batch size 1,024, bf16: ~ 50 images/s", 1024, None),
        ("global batch size 1,048,576, seq_len=2,048, bf16: OOM", 2**20, 2048),
        ("batch 64,bf16: OOM", 64, None),
        ("batch 64,128, bf16: OOM", 64_128, None),
    ],
)
def test_a_comma_stands_between_thousands(line: str, size: int, seq_len: object) -> None:
    bullet = only(line)
    assert (bullet.global_batch, bullet.seq_len, bullet.dtype, bullet.more) == (size, seq_len, "bfloat16", ())


def test_values_with_other_characters_are_in_quotes() -> None:
    bullet = only('batch 8, profile="env/a: b, \\"c\\".yaml", order="tp,dp,pp", tp="x", dtype="int8", dp="2": OOM')
    assert bullet.more == ('profile="env/a: b, \\"c\\".yaml"', 'order="tp,dp,pp"', 'tp="x"', 'dtype="int8"')
    assert [pair_of(text) for text in bullet.more[:2]] == [("profile", 'env/a: b, "c".yaml'), ("order", "tp,dp,pp")]
    assert (bullet.tp, bullet.dtype, bullet.dp, only(bullet_text(bullet))) == (None, None, 2, bullet)


@given(st.text(max_size=40))
def test_a_value_is_read_as_it_was_written(value: str) -> None:
    (text,) = only(f"batch 8, {pair_text('profile', value)}: OOM").more
    assert pair_of(text) == ("profile", value)


@pytest.mark.parametrize(
    "line",
    [
        "global batch size 64, recompute=full, float32: ~ 50 samples/s",
        "global batch size 64, recompute=full, fp32, seq_len=1024: ~ 50 samples/s",
        "global batch size 64, remat=True, fp32: ~ 50 images/s",
    ],
)
def test_our_own_bullets_and_the_older_ones_are_read(line: str) -> None:
    bullet = only(line)
    assert (bullet.global_batch, bullet.recompute, bullet.dtype, bullet.rate) == (64, "full", "float32", 50.0)
    assert only(bullet_text(bullet)) == bullet


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("OOM", OUT_OF_MEMORY),
        ("refused", REFUSED),
        ("interrupted", INTERRUPTED),
        ("lost", LOST),
        ("hang", HUNG),
        ("timeout", TIMEOUT),
        ("x", FAILED),
    ],
)
def test_how_a_run_failed_stands_instead_of_the_rate(word: str, status: str) -> None:
    assert (only(f"batch 8: {word}").status, only(f"batch 8: {word}").rate) == (status, None)
    assert only(bullet_text(only(f"batch 8: {word} (at the first step)"))).remark == "at the first step"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("global batch size 64, fp32", "no colon with a rate or OOM"),
        ("global batch size 64 fp32: OOM", "'fp32': a comma must follow the batch"),
        ("global batch size 0: OOM", "global batch size 0: must be a whole number from 1"),
        ("global batch size 64, fp32, bf16: OOM", "bf16: dtype is stated twice"),
        ("global batch size 64, remat=maybe: OOM", "recompute=maybe: valid: true, false, none, selective, full"),
        ("global batch size 64, dtype=int8: OOM", "dtype=int8: valid: float32,"),
        ("global batch size 64, seq_len=1k: OOM", "seq_len 1k: must be a whole number"),
        ("global batch size 64, seq_len=1,02: OOM", "'02' is no setting"),
        ("global batch size 64,12: OOM", "global batch size 64,12: must be a whole number"),
        ("global batch size 64k, fp32: OOM", "'global batch size 64k, fp32: OOM': a bullet of a batch begins with it"),
        ("**global batch size 64**, fp32: OOM", "'**global batch size 64**, fp32: OOM': a bullet of a batch"),
        ("batch size ~64: OOM", "'batch size ~64: OOM': a bullet of a batch begins with it"),
        ("fp32, batch 64: ~ 50 images/s", "'fp32, batch 64: ~ 50 images/s': a bullet of a batch begins with it"),
        ("global batch size 64, $(rm): OOM", "'$(rm)' is no setting"),
        ("global batch size 64: ~ fast", "'~ fast': neither a rate such as '~ 50 samples/s'"),
        ("global batch size 64: ~ 0 images/s", "rate 0: must be a number from 1e-09 to 1e+12"),
        ("global batch size 64: 1,0 images/s", "rate 1,0: must be a number"),
        ("global batch size 64: 1e99 images/s", "rate 1e99: must be a number from"),
        ("global batch size 64: 50 tokens/s", "'50 tokens/s': tokens/s alone; state the samples/s, too"),
        ("global batch size 64: 5 samples/s, 5 images/s", "'5 samples/s, 5 images/s': two rates"),
        ("global batch size 64: 5 samples/s, fast", "'5 samples/s, fast': neither a rate"),
    ],
)
def test_an_error_names_file_and_line(line: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_bullets(f"# Sheet\n\n- {line}\n", "s.md")
    assert str(error.value).startswith(f"s.md:3: {message}")


def test_a_title_s_setting_that_is_wrong_is_an_error_of_that_line() -> None:
    with pytest.raises(UsageError, match=r"^s\.md:1: seq_len 0: must be"):
        read_bullets("# tiny on 2x T4, seq_len=0\n- batch 8: OOM\n", "s.md")


def test_a_text_without_a_bullet_of_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^s\.md: no bullet of a batch in it, such as"):
        read_bullets(
            "# tiny\n- compile time: long\n- batch norm, 2 layers: on\n- 5 minutes for a batch: long\n", "s.md"
        )


def test_given_settings_hold_where_the_sheet_says_nothing() -> None:
    bullet = only("batch 8, bf16: OOM", "model=124M", "hardware=4x L4", "dtype=fp32", "seq_len=1024")
    assert (bullet.model, bullet.hardware, bullet.dtype, bullet.seq_len) == ("124M", "4x L4", "bfloat16", 1024)
    for text, message in (("size=1", "unknown key; valid: model, hardware, "), ("dtype", "not KEY=VALUE")):
        with pytest.raises(UsageError, match=f"--set {text}: {message}"):
            only("batch 8: OOM", text)


def test_the_result_of_a_search_for_the_frontier_is_read() -> None:
    bullet = only("global batch size 96, recompute=none, float32, tp=2, zero=1: ~ 1,234.5 samples/s, ~ 158000 tokens/s "
                  "(largest, fastest)")  # fmt: skip
    assert (bullet.rate, bullet.tokens, bullet.sample) == (1234.5, 158000.0, "samples")
    assert (bullet.tp, bullet.more, bullet.remark) == (2, ("zero=1",), "largest, fastest")
    assert marks_of([bullet, only("global batch size 48, recompute=none, float32, tp=2, zero=1: ~ 9 samples/s")]) == [
        (), (),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "rounding"),
    [
        ("50", 0.5),
        ("50.0", 0.05),
        ("1,050", 0.5),
        ("5e1", 0.0),
        ("1230", 5.0),
        ("1234", 0.5),
        ("14000", 50.0),
        ("1230.0", 0.05),
    ],
)
def test_a_rate_is_rounded_to_the_last_sure_digit(text: str, rounding: float) -> None:
    bullet = only(f"batch 8: ~ {text} seqs/s")
    assert bullet.rounding == pytest.approx(rounding) and bullet.sample == "sequences"


def test_marks_are_of_a_single_setting_each() -> None:
    text = """\
- batch 128, bf16, flat: 92 images/s
- batch 256, bf16, flat: OOM
- batch 160, bf16, flat: OOM
- batch 144, bf16, flat: 90 images/s
- batch 192, bf16: 150 images/s
- batch 64, fp32: 10 images/s
- batch 32, fp32: OOM
"""
    fastest, largest = ("fastest",), ("largest before OOM at 160",)
    assert marks_of(read_bullets(text, "s.md")) == [fastest, (), (), largest, (), (), ()]


def test_long_lines_of_blanks_and_brackets_take_no_time() -> None:
    blanks = " " * 3_000  # of 20,000 characters, the most of a line
    text = f"#{blanks}a{blanks}on{blanks}\n-{blanks}batch 8{blanks}:{blanks}OOM{blanks}({blanks}x{blanks})\n"
    assert read_bullets(text, "s.md")[0].status == OUT_OF_MEMORY


COUNTS = st.none() | st.integers(1, 2**20)


@given(
    st.builds(
        Bullet,
        global_batch=st.integers(1, 2**20),
        recompute=st.none() | st.sampled_from(RECOMPUTE),
        dtype=st.none() | st.sampled_from(DTYPES),
        seq_len=COUNTS,
        micro_batch=COUNTS,
        dp=COUNTS,
        more=st.lists(st.sampled_from(["flat", "bucket=30", "two words"]), max_size=2, unique=True).map(tuple),
        rate=st.none() | st.integers(1, 999).map(float),
        tokens=st.none() | st.integers(1, 999).map(float),
        sample=st.just("samples"),
        remark=st.sampled_from(["", "fastest"]),
        line=st.just(1),
    ),
    st.sampled_from([OUT_OF_MEMORY, HUNG, REFUSED]),
)
def test_a_written_bullet_is_read_as_it_was(bullet: Bullet, status: str) -> None:
    if bullet.rate is None:
        bullet = Bullet(**{**vars(bullet), "status": status, "tokens": None})
    assert only(bullet_text(bullet)) == bullet and (bullet.rate is None) == (bullet.status != OK)
