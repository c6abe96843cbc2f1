"""Every kernel, compiled for Arm and tried on emulated processors: with NumPy alone, in seconds."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Callable

import pytest

from fugaku_gpt.kernels import build
from tests.aarch64.machine import COMPILERS, TARGETS, compiler, folder, output, run_emulated

# Loads a library with the OpenMP runtime that PyTorch would have loaded, and prints what fails.
TRY = """
import ctypes, sys
from pathlib import Path
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
from fugaku_gpt.kernels import LibraryError, load_library
from fugaku_gpt.kernels.trials import failures
try:
    library = load_library(Path(sys.argv[1]))
except LibraryError as error:
    print("refused:", error)
else:
    print("lanes", library.lanes(), "bfloat16 products", library.supports_gemm(1))
    for line in failures(library, 2):
        print("wrong:", line)
"""
# Prints by how many bytes the planner's formula exceeds the workspace of products of a few sizes, of 1 and 12 threads.
WORKSPACE = """
import ctypes, sys
from pathlib import Path
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
from fugaku_gpt.kernels import load_library
from fugaku_gpt.kernels.matmul_tiling import gemm_workspace_bytes
library = load_library(Path(sys.argv[1]))
for rows, inner, columns in ((64, 64, 64), (2048, 3072, 768), (512, 768, 50304), (50304, 512, 768)):
    for kind in (0, 1):
        for threads in (1, 12):
            deferred = columns if kind and inner > 1024 else 0
            floats = library.gemm_workspace_floats(rows, columns, inner, kind, kind, threads)
            print(gemm_workspace_bytes(columns, deferred, threads) - 4 * floats)
"""
pytestmark = pytest.mark.slow

LANES = {
    "sve512": 16,
    "sve256": 8,
    "sve128": 4,
    "any-sve": 4,
    "neon": 4,
    "neoverse-v1": 8,
    "bf16-sve128": 4,
    "bf16-neon": 4,
}
BFLOAT16_TARGETS = {"neoverse-v1", "bf16-sve128", "bf16-neon"}  # with products of bfloat16 numbers

# A sum over 16-bit numbers that are widened one by one: GCC 12 and 14 load the second vector of it from the place of
# the first one where vectors have a fixed length. The second function is the form that the kernels use.
REDUCTION = """
#include <stdint.h>
#include <string.h>
static float widen(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float y; memcpy(&y, &bits, 4); return y; }
float direct(const uint16_t *x, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += widen(x[i]);
    return sum;
}
float by_blocks(const uint16_t *x, int64_t n)
{
    float sum = 0, block[64];
    for (int64_t begin = 0; begin < n; begin += 64) {
        int64_t count = n - begin < 64 ? n - begin : 64;
        for (int64_t i = 0; i < count; i++) block[i] = widen(x[begin + i]);
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < count; i++) sum += block[i];
    }
    return sum;
}
"""
SUM = """
import ctypes, sys
import numpy as np
library = ctypes.CDLL(sys.argv[1])
numbers = (np.arange(203) % 13).astype(np.float32)
halves = (numbers.view(np.uint32) >> 16).astype(np.uint16)
for name in ("direct", "by_blocks"):
    function = getattr(library, name)
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_float
    print(name, function(halves.ctypes.data, halves.size) == numbers.sum())
"""

# AdamW, GELU and SwiGLU of numbers of every exponent, against float64: the largest error in roundings of the result.
ACCURACY = """
import ctypes, math, sys
from pathlib import Path
import numpy as np
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
from fugaku_gpt.kernels import load_library
library = load_library(Path(sys.argv[1]))
random = np.random.default_rng(1)
mantissas = np.concatenate([[0, 1, 2**22, 2**23 - 1], random.integers(0, 2**23, 60)]).astype(np.uint32)
squares = (np.arange(255, dtype=np.uint32)[:, None] << 23 | mantissas).ravel().view(np.float32)
special = np.array([0.0, -0.0, np.inf, np.nan], np.float32)
address = lambda x: x.ctypes.data

def step(second, mean, eps):
    "The change of parameters of 0 by a step of size 1 whose moments are given."
    parameters, gradients, first = np.zeros_like(second), np.zeros_like(second), np.full_like(second, mean)
    second = second.copy()
    numbers = (1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, eps)
    addresses = (address(parameters), address(gradients), address(first), address(second), None)
    library.adamw(*addresses, second.size, *numbers, 1)
    return parameters.astype(np.float64)

def roundings(actual, expected):
    return float(np.max(np.abs(actual - expected) / np.spacing(np.abs(expected).astype(np.float32))))

for eps in (1e-8, 1e-4):
    expected = -1.0 / (np.sqrt(squares.astype(np.float64)) + np.float64(np.float32(eps)))
    print("adamw", roundings(step(squares, 1.0, eps), expected))
print("special", *step(special, 1.0, 1.0))
x = np.concatenate([np.linspace(-12, 12, 40001), squares[squares < 9], -squares[squares < 9]]).astype(np.float32)
y = np.zeros_like(x)
wide, erfc = x.astype(np.float64), np.vectorize(math.erfc)
for name, is_tanh, expected in (
    ("gelu", 0, 0.5 * wide * erfc(-wide * math.sqrt(0.5))),
    ("gelu-tanh", 1, wide / (1.0 + np.exp(-math.sqrt(8.0 / math.pi) * (wide + 0.044715 * wide**3)))),
):
    library.gelu(address(x), address(y), x.size, 0, is_tanh, 1)
    error = np.abs(y - expected) / np.maximum(np.abs(expected), 2.0**-100)
    print(name, float(error[np.abs(wide) < 5].max() * 2**24))
gate = np.concatenate([np.linspace(-86, 86, 40001), squares[squares < 9], -squares[squares < 9]]).astype(np.float32)
pairs, product, wide = np.stack([gate, np.ones_like(gate)]), np.zeros_like(gate), gate.astype(np.float64)
library.swiglu(address(pairs), address(product), 1, gate.size, 0, 1)
expected = wide / (1.0 + np.exp(-wide))
print("swiglu", float((np.abs(product - expected) / np.maximum(np.abs(expected), 2.0**-100)).max() * 2**24))

# Rounding to bfloat16: LayerNorm of rows of one number is its bias. Halves between two numbers, both ways; overflow;
# and NaN whose upper half would become 0 if it were rounded up.
bits = np.concatenate([random.integers(0, 2**32, 300), random.integers(0, 2**16, 100) << 16 | 0x8000])
special_bits = [0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00000]
bits = np.concatenate([bits, special_bits]).astype(np.uint32)
rows, width = 5, bits.size
floats, ones, halves = bits.view(np.float32), np.ones(width, np.float32), np.zeros((rows, width), np.uint16)
statistics, work = np.zeros((2, rows), np.float32), np.zeros(6 * width, np.float32)
operands = (np.zeros_like(halves), ones, floats, halves, statistics[0], statistics[1])
library.layer_norm(*map(address, operands), rows, width, 1, 1e-5, address(work), 1)
wide_bits = bits.astype(np.uint64)
rounded = (wide_bits + 0x7FFF + (wide_bits >> 16 & 1) >> 16).astype(np.uint16)
is_nan = np.isnan(floats)
nan = np.isnan((halves.astype(np.uint32) << 16).view(np.float32))
print("rounding", bool((halves == rounded)[:, ~is_nan].all()), bool(nan[:, is_nan].all()), int(is_nan.sum()))

# The loss of long rows: several blocks and a rest, logits of all sizes, -infinity, NaN
columns = 4999
logits = (random.standard_normal((3, columns)) * [[1.0], [30.0], [1.0]]).astype(np.float32)
logits[0, ::7], logits[2, 4990] = -np.inf, np.nan
largest, sums, log_sums = (np.zeros(3, np.float32) for _ in range(3))
library.loss_sums(address(logits), 3, columns, columns, 0, address(largest), address(sums), 1)
wide = logits.astype(np.float64)
greatest = np.nanmax(wide, 1, keepdims=True)
expected = np.exp(wide - greatest).sum(1)
error = [float(np.max(np.abs(sums[:2] / expected[:2] - 1)) * 2**24)]
softmax, both = logits.copy(), logits.copy()
library.loss_full_rows(address(both), 3, columns, columns, 0, address(log_sums), 0.5, 1, 1)
library.loss_gradient(address(softmax), 3, columns, columns, 0, address(log_sums), 0.5, 1)
exact = 0.5 * np.exp(wide - greatest) / expected[:, None]
large = exact[:2] > 1e-20
for result in (softmax, both):
    error.append(float(np.max(np.abs(result[:2][large] / exact[:2][large] - 1)) * 2**24))
    error.append(float(np.abs(result[0, ::7]).max()))
print("loss", *error, bool((largest == greatest[:, 0]).all()), bool(np.isnan([sums[2], log_sums[2]]).all()))
"""

# Attention by blocks that end anywhere, with and without dropout, in ranges of keys of any kind and with shared keys,
# against its definition in float64; and its exponentials of arguments of every size. With logarithms of 0 in place of
# the sums', the gradients by values are 2 to the power of the last query's scores, which are products of two numbers.
ATTENTION = """
import ctypes, math, sys
from pathlib import Path
import numpy as np
ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
from fugaku_gpt.kernels import load_library
from fugaku_gpt.kernels.library import AttentionShape
library = load_library(Path(sys.argv[1]))
random = np.random.default_rng(1)
address = lambda x: None if x is None else x.ctypes.data
swap = lambda x: x.swapaxes(-1, -2)

def call(packed, heads, ranges, flags, factor, workspace=np.nan):
    "Arguments of both kernels: the inputs, the addresses of parts of another such tensor, and the workspace."
    length, slots, width = packed.shape
    kv_heads = (slots - heads) // 2
    row = slots * width
    shape = AttentionShape(1, heads, kv_heads, width, length, length, length, length, row, row, 0, 0)
    parts = lambda x: (address(x), address(x[:, heads:]), address(x[:, heads + kv_heads:]))
    work = np.full(library.attention_workspace_floats(length, width), workspace, np.float32)
    return (shape, *parts(packed), *map(address, ranges), address(flags), factor), parts, work

def attention(packed, y_grad, ranges, flags, factor):
    "The output [length, heads, width], and the gradient of packed [length, heads + 2 kv heads, width]."
    length, heads, width = y_grad.shape
    y, log_sums, grad = np.zeros_like(y_grad), np.zeros((heads, length), np.float32), np.zeros_like(packed)
    inputs, parts, work = call(packed, heads, ranges, flags, factor)
    library.attention_forward(*inputs, address(y), address(log_sums), address(work), 1)
    partial = np.full((heads, 2, length, width), np.nan, np.float32) if packed.shape[1] != 3 * heads else None
    operands = map(address, (y, y_grad, log_sums))
    library.attention_backward(*inputs, *operands, *parts(grad), address(partial), address(work), 1)
    return y, grad

def reference(packed, y_grad, ranges, flags, factor):
    length, heads, width = y_grad.shape
    x, above = packed.astype(np.float64).swapaxes(0, 1), y_grad.astype(np.float64).swapaxes(0, 1)
    kv_heads = (len(x) - heads) // 2
    sharing = heads // kv_heads
    q, k, v = x[:heads], *(np.repeat(part, sharing, 0) for part in (x[heads:-kv_heads], x[-kv_heads:]))
    keys = np.arange(length)
    seen = (keys >= ranges[0][:, None]) & (keys < ranges[1][:, None])
    scores = np.where(seen, q @ swap(k) / math.sqrt(width), -1e300)
    p = np.exp(scores - scores.max(-1, keepdims=True)) * seen
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    stays = 1.0 if flags is None else flags * factor
    p_grad = stays * (above @ swap(v))
    scores_grad = p * (p_grad - (p_grad * p).sum(-1, keepdims=True)) / math.sqrt(width)
    sums = (part.reshape(kv_heads, sharing, length, width).sum(1) for part in
            (swap(scores_grad) @ q, swap(p * stays) @ above))
    return ((p * stays) @ v).swapaxes(0, 1), np.concatenate([scores_grad @ k, *sums]).swapaxes(0, 1)

def key_ranges(kind, length):
    keys = np.arange(length)
    if kind == "causal":
        first, end = 0 * keys, keys + 1
    elif kind == "padded":
        first, end = np.where(keys < length // 2, 0, length // 2), np.full(length, length // 2)
    elif kind == "documents":
        starts = np.unique([0, length // 3, 2 * length // 3, length])
        first, end = (starts[np.searchsorted(starts, keys, "right") + i] for i in (-1, 0))
    else:
        bounds = np.sort(random.integers(0, length + 1, (2, length)), 1)
        first, end = bounds.min(0), bounds.max(0)
    return first.astype(np.int32), end.astype(np.int32)

worst, masked = 0.0, 0.0
cases = [(width, drops, "causal", 3) for width, drops in ((8, True), (40, False), (64, True), (64, False))]
cases += [(40, True, "padded", 8), (16, False, "documents", 4), (64, True, "any", 4), (20, False, "any", 3)]
for length in (1, 2, 63, 65, 97, 150, 193):
    for width, has_dropout, kind, slots in cases:
        heads = {3: 1, 4: 2, 8: 4}[slots]
        packed = random.standard_normal((length, slots, width)).astype(np.float32)
        y_grad = random.standard_normal((length, heads, width)).astype(np.float32)
        flags = (random.random((heads, length, length)) < 0.8).astype(np.uint8) if has_dropout else None
        arguments = (packed, y_grad, key_ranges(kind, length), flags, 1.25 if has_dropout else 1.0)
        for actual, expected in zip(attention(*arguments), reference(*arguments)):
            error = np.abs(actual - expected).max() / (1.0 + np.abs(expected).max())
            error = float(error) if error == error else math.inf
            worst, masked = (max(worst, error), masked) if kind == "causal" else (worst, max(masked, error))
print("attention", worst * 2**24)
print("masked", masked * 2**24)

packed[100, 1] = np.nan
y, _ = attention(packed, y_grad, key_ranges("causal", length), None, 1.0)
print("nan", bool(np.isnan(y[100:]).all()), bool(np.isnan(y[:96]).any()))

# keys of 48 heads: exponents of all sizes, the range in which results become denormal, and what lies below
length, heads = 64, 48
sizes = np.float32(2.0) ** random.integers(-126, 6, length * heads) * random.uniform(1, 2, length * heads)
keys = -sizes.reshape(length, heads).astype(np.float32)
keys[:, 8:24] = random.uniform(-87.5, 0.0, (length, 16))
keys[:, 24:32] = random.uniform(0.0, 40.0, (length, 8))
keys[:, 32:40] = random.uniform(-89.0, -86.0, (length, 8))
keys[:, 40:] = -(np.float32(2.0) ** random.integers(7, 120, (length, 8)))
keys[0, 40:] = -np.inf
packed = np.zeros((length, 3 * heads, 1), np.float32)
packed[:, :heads], packed[:, heads:2 * heads, 0] = 1.0, keys
y_grad = np.zeros((length, heads, 1), np.float32)
y_grad[-1] = 1.0
gradient, zeros = np.zeros_like(packed), np.zeros((heads, length), np.float32)
ranges = key_ranges("causal", length)
inputs, parts, work = call(packed, heads, ranges, None, 1.0)
operands = map(address, (np.zeros_like(y_grad), y_grad, zeros))
library.attention_backward(*inputs, *operands, *parts(gradient), None, address(work), 1)
powers = gradient[:, 2 * heads:, 0]
scores = np.float32(1.44269504088896341) * keys
seen = scores >= -126
expected = np.exp2(scores[seen].astype(np.float64))
print("exponentials", float((np.abs(powers[seen] - expected) / np.spacing(expected.astype(np.float32))).max()))
print("below", int((~seen).sum()), bool((powers[~seen] == 0.0).all()))
"""

SOAKED = {*BFLOAT16_TARGETS, "any-sve"}  # targets that `make soak-arm` compiles by other compilers, too
TRIED = [
    pytest.param(name, target, marks=[pytest.mark.soak] if name != "gcc-12" and target in SOAKED else [])
    for name in COMPILERS
    for target in TARGETS
]
MEASURED = ("sve512", "sve128", "neon")  # targets of GCC 12 whose results are compared for numbers of every size


@pytest.fixture(scope="session")
def libraries(shared: Path) -> "Callable[[str, str], Path]":
    """Returns what compiles the kernels for a processor, each once for all workers."""

    def compiled(name: str, target: str) -> Path:
        command, directory = compiler(name), shared / "libraries" / name / target
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (directory / "kernels.so").exists():
                assert build._compile([command], TARGETS[target], directory / "kernels.so") == ""
        return directory / "kernels.so"

    return compiled


def _runtime(name: str) -> str:
    """Returns the OpenMP runtime of a compiler: GCC's, or LLVM's."""
    libraries = folder() / "sysroot" / "usr" / "lib"
    if name.startswith("clang"):
        return str(libraries / "llvm-19" / "lib" / "libomp.so.5")
    return str(libraries / "aarch64-linux-gnu" / "libgomp.so.1")


def _run(name: str, library: Path, processor: str, *programs: str) -> "list[list[str]]":
    """Returns the lines that each program prints; they run in one process, since starting it takes longer."""
    program = "\nprint(flush=True)\n".join(programs)
    numpy = str(folder() / "numpy")
    lines = output(run_emulated(["-c", program, str(library), _runtime(name)], processor, packages=numpy))
    return [printed.splitlines() for printed in "\n".join(lines).split("\n\n")]


@pytest.mark.parametrize(("name", "target"), TRIED)
def test_each_kernel_computes_correct_results(name: str, target: str, libraries: "Callable[[str, str], Path]") -> None:
    is_measured = name == "gcc-12" and target in MEASURED
    programs = [TRY, ATTENTION, ACCURACY] if is_measured else [TRY, ATTENTION]
    trials, attention, *accuracy = _run(name, libraries(name, target), target, *programs)
    assert trials == [f"lanes {LANES[target]} bfloat16 products {target in BFLOAT16_TARGETS}"]
    _check_attention(attention)
    if is_measured:
        _check_accuracy(accuracy[0])


def _check_attention(lines: "list[str]") -> None:
    """Attention is right where blocks end, and for scores of every size."""
    figures = [(line.split()[0], line.split()[1:]) for line in lines]
    assert [figure for figure, _ in figures] == ["attention", "masked", "nan", "exponentials", "below"], lines
    assert all(float(figure) <= 64.0 for _, (figure, *_) in figures[:2]), lines  # roundings of the largest numbers
    assert figures[2][1] == ["True", "False"], lines
    assert float(figures[3][1][0]) <= 1.5, lines
    assert int(figures[4][1][0]) > 400 and figures[4][1][1] == "True", lines


def _check_accuracy(lines: "list[str]") -> None:
    """Quotients, roots, exponentials and rounding are right for numbers of every size."""
    figures = [(line.split()[0], line.split()[1:]) for line in lines]
    assert [name for name, _ in figures] == [
        *["adamw"] * 2,
        "special",
        "gelu",
        "gelu-tanh",
        "swiglu",
        "rounding",
        "loss",
    ]
    assert all(float(value) <= 2.5 for name, (value, *_) in figures if name == "adamw"), lines
    assert figures[2][1] == ["-1.0", "-1.0", "0.0", "nan"], lines
    assert all(float(value) <= 40.0 for name, (value, *_) in figures if name.startswith(("gelu", "swiglu"))), lines
    assert figures[6][1][:2] == ["True", "True"] and int(figures[6][1][2]) >= 3, lines
    sum_error, error, masked, total_error, total_masked, *is_right = figures[7][1]
    assert float(sum_error) <= 8.0 and float(masked) == float(total_masked) == 0.0 and is_right == ["True"] * 2, lines
    assert float(error) <= 64.0 and float(total_error) <= 64.0, lines  # of exp(x - y) with x and y of about 100


@pytest.mark.parametrize("target", ["sve512", "neoverse-v1", "bf16-neon"])
def test_the_workspace_formula_covers_that_of_products(target: str, libraries: "Callable[[str, str], Path]") -> None:
    (lines,) = _run("gcc-12", libraries("gcc-12", target), target, WORKSPACE)
    assert len(lines) == 16 and all(int(line) >= 0 for line in lines), lines


@pytest.mark.parametrize(
    ("processor", "reason"),
    [("sve256", "and this process has 256 bits"), ("sve128", "and this process has 128 bits"), ("neon", "has none")],
)
def test_a_library_for_longer_vectors_is_refused_and_does_not_end_the_process(
    processor: str, reason: str, libraries: "Callable[[str, str], Path]"
) -> None:
    (lines,) = _run("gcc-12", libraries("gcc-12", "sve512"), processor, TRY)
    assert len(lines) == 1 and lines[0].startswith("refused: they are compiled for SVE vectors of 512 bits")
    assert lines[0].endswith(reason)


@pytest.mark.parametrize("processor", ["sve512", "sve256", "sve128"])
def test_a_library_for_neon_runs_on_processors_with_sve(
    processor: str, libraries: "Callable[[str, str], Path]"
) -> None:
    (lines,) = _run("gcc-12", libraries("gcc-12", "neon"), processor, TRY)
    assert lines[1:] == []


def test_a_library_for_another_runtime_names_the_missing_symbol(libraries: "Callable[[str, str], Path]") -> None:
    (lines,) = _run("gcc-12", libraries("clang-19", "sve512"), "sve512", TRY)
    assert len(lines) == 1 and lines[0].startswith("refused: they do not load: undefined symbol: __kmpc_")


@pytest.mark.parametrize("target", ["sve512", "sve256"])
@pytest.mark.parametrize("name", COMPILERS)
def test_sums_of_16_bit_numbers_are_right_in_the_form_that_the_kernels_use(
    name: str, target: str, tmp_path: Path
) -> None:
    (tmp_path / "sums.c").write_text(REDUCTION, encoding="utf-8")
    command = [compiler(name), "-std=gnu11", "-O3", "-fPIC", "-fopenmp-simd", *TARGETS[target], "-shared"]
    assert build._run([*command, "-o", "sums.so", "sums.c"], str(tmp_path)) == ""
    numpy = str(folder() / "numpy")
    lines = output(run_emulated(["-c", SUM, str(tmp_path / "sums.so")], target, packages=numpy))
    assert "by_blocks True" in lines
    if name.startswith("clang"):
        assert "direct True" in lines
