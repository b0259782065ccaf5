"""The kernel's arithmetic of sampling, compiled for the host, against its twins bit by bit.

What a GPU's intrinsics round to is fixed by IEEE 754, so these few functions stand in for them. Without a C++
compiler nothing is compared here; the GPU tests compare tokens.
"""

from __future__ import annotations

import ctypes
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.kernel.build import INCLUDE
from headrace.model import philox
from headrace.model.presets import PRESETS
from headrace.model.rope import frequencies
from headrace.step.oracle.exponential import exponential
from headrace.step.oracle.selection import Selection
from headrace.step.oracle.twins.sample_select import weight_at
from tests.kernel.emulated import COMPILER, HERE

HOST = r"""
#include "cuda.h"
#include "exponential.h"
#include "philox.h"
#include "rope.h"
#include "selection.h"
extern "C" {
void exponentials(const double* x, double* y, int n) { for (int i = 0; i < n; i++) y[i] = exponential(x[i]); }
void weights(const float* x, uint64_t* y, int n) { for (int i = 0; i < n; i++) y[i] = weight_of(x[i]); }
void keys(const float* x, uint32_t* y, int n) { for (int i = 0; i < n; i++) y[i] = key_of(x[i]); }
void scores(const uint32_t* x, float* y, int n) { for (int i = 0; i < n; i++) y[i] = score_of(x[i]); }
void uniforms(uint64_t seed, uint32_t position, float* y, int blocks) {
  for (int i = 0; i < blocks; i++) {
    const philox::Words w = philox::words_of_tokens(seed, position, i);
    const uint32_t words[] = {w.x, w.y, w.z, w.w};
    for (int n = 0; n < 4; n++) y[4 * i + n] = philox::uniform(words[n]);
  }
}
void noises(const float* x, float* y, double* exact, int n) {
  for (int i = 0; i < n; i++) y[i] = philox::noise(x[i]), exact[i] = philox::exact_noise(x[i]);
}
void turns(float position, const float* frequency, float* cosine, float* sine, int n) {
  for (int i = 0; i < n; i++) {
    const float2 v = rope::turned(make_float2(1, 0), position, frequency[i]);
    cosine[i] = v.x, sine[i] = v.y;
  }
}
uint64_t part(uint64_t total, uint64_t numerator, int shift) { return part_of(total, numerator, shift); }
uint64_t stay(uint64_t missing, uint64_t weight) { return equals_that_stay(missing, weight); }
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("arithmetic")
    (folder / "host.cpp").write_text(HOST)
    command = [
        COMPILER,
        "-std=c++17",
        "-O2",
        "-ffp-contract=off",
        "-shared",
        "-fPIC",
        f"-I{INCLUDE}",
        f"-I{HERE}",
    ]
    subprocess.run([*command, "-o", folder / "host.so", folder / "host.cpp"], check=True)
    library = ctypes.CDLL(str(Path(folder / "host.so")))
    library.part.restype = library.stay.restype = ctypes.c_uint64
    return library


def called(function: Any, values: np.ndarray[Any, Any], dtype: type) -> np.ndarray[Any, Any]:
    values = np.ascontiguousarray(values)
    results: np.ndarray[Any, Any] = np.zeros(len(values), dtype=dtype)
    function(ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(results.ctypes.data), len(values))
    return results


def scores() -> np.ndarray[Any, np.dtype[np.float32]]:
    generator = np.random.default_rng(1)
    values = [
        -generator.random(100_000) * 40,
        -np.exp(-generator.random(100_000) * 100),
        np.array([0.0, -0.0, -np.inf]),
    ]
    return np.concatenate(values).astype(np.float32)


def test_exponentials_have_the_twins_bits(host: ctypes.CDLL) -> None:
    generator = np.random.default_rng(0)
    x = np.concatenate([-generator.random(300_000) * 40, -generator.random(300_000) * 710])
    x = np.concatenate([x, [0.0, -0.0, -700.0, np.nextafter(-700.0, -800), -np.inf, np.nan, -5e-324]])
    ours = called(host.exponentials, x, np.float64)
    np.testing.assert_array_equal(ours.view(np.int64), exponential(x).view(np.int64))


def test_weights_have_the_twins_bits(host: ctypes.CDLL) -> None:
    selection = Selection(np.zeros(1, np.int64), np.zeros(1, np.float32), np.zeros(1, np.float32))
    selection.scores = scores()
    selection.weigh()
    np.testing.assert_array_equal(called(host.weights, selection.scores, np.uint64), selection.weights)


def test_keys_are_the_twins_and_lead_back_to_scores(host: ctypes.CDLL) -> None:
    values = scores()
    selection = Selection(np.arange(len(values)), values, values)
    selection.score(np.float32(0), 1.0)
    keys = called(host.keys, values, np.uint32)
    np.testing.assert_array_equal(keys, selection.keys)
    back = called(host.scores, keys, np.float32)
    np.testing.assert_array_equal(back, values)
    weights = called(host.weights, back[:50], np.uint64)
    assert weights.tolist() == [weight_at(int(key)) for key in keys[:50]]


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (7, 5), (2**64 - 1, 2**31 - 1), (2**40 + 3, 300_000)])
def test_uniform_numbers_are_the_references(host: ctypes.CDLL, seed: int, position: int) -> None:
    ours = np.zeros(4 * 50_000, dtype=np.float32)
    host.uniforms(ctypes.c_uint64(seed), position, ctypes.c_void_p(ours.ctypes.data), len(ours) // 4)
    right = philox.uniform_vocabulary([seed], [position], len(ours), torch.device("cpu"))[0].numpy()
    np.testing.assert_array_equal(ours, right)


def test_noise_is_the_references(host: ctypes.CDLL) -> None:
    """The C library's float32 logarithms here; the margin of SAMPLE_PICK has room for a GPU's."""
    values = np.geomspace(philox.UNIFORM_MIN, philox.UNIFORM_MAX, 100_001).astype(np.float32)
    near, exact = np.zeros_like(values), np.zeros(len(values))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (values, near, exact)]
    host.noises(*pointers, len(values))
    right = np.array([philox.gumbel_exact(value) for value in values.tolist()])
    assert np.abs(exact - right).max() < 1e-14
    assert np.abs(near - right).max() < 1e-5
    assert right.max() - right.min() < 26.0  # OUT_OF_REACH of sample_pick.h


def test_the_needed_weight_is_exact(host: ctypes.CDLL) -> None:
    generator = np.random.default_rng(2)
    shares = [
        *generator.random(300),
        0.5,
        0.25,
        0.9,
        0.999999,
        1 - 2**-53,
        1e-9,
        1e-12,
        1e-30,
        5e-324,
        2.0**-64,
    ]
    totals = [2**44, 2**44 + 1, 2**62, 2**62 - 1, *generator.integers(2**44, 2**62, 20).tolist()]
    for share in shares:
        numerator, denominator = float(share).as_integer_ratio()
        shift = denominator.bit_length() - 1
        for total in totals:
            exact = Fraction(share) * total
            ours = host.part(ctypes.c_uint64(total), ctypes.c_uint64(numerator), shift)
            assert ours == -(-exact.numerator // exact.denominator), (share, total)


def test_how_many_equals_stay_is_rounded_up(host: ctypes.CDLL) -> None:
    for missing, weight, stay in (
        (1, 1, 1),
        (10, 3, 4),
        (9, 3, 3),
        (2**62, 2**44, 2**18),
        (0, 5, 0),
        (5, 0, 0),
    ):
        assert host.stay(ctypes.c_uint64(missing), ctypes.c_uint64(weight)) == stay


TURN_BOUND = 1.5e-7  # of a cosine or sine: two roundings of numbers near 1


def turn_error(host: ctypes.CDLL, position: int, angles: np.ndarray[Any, Any]) -> float:
    """How far the kernel's cosines and sines at a position are from those of the angles."""
    own = frequencies(PRESETS["north-mini-code"], torch.device("cpu")).numpy()
    cosine, sine = np.zeros_like(own), np.zeros_like(own)
    host.turns(
        ctypes.c_float(position),
        *(ctypes.c_void_p(each.ctypes.data) for each in (own, cosine, sine)),
        len(own),
    )
    return float(max(np.abs(cosine - np.cos(angles)).max(), np.abs(sine - np.sin(angles)).max()))


@pytest.mark.parametrize("position", [0, 1, 63, 4096, 131_071, 499_999])
def test_rotations_are_those_of_the_rounded_angle(host: ctypes.CDLL, position: int) -> None:
    own = frequencies(PRESETS["north-mini-code"], torch.device("cpu")).numpy()
    rounded = (np.float32(position) * own).astype(np.float64)
    assert turn_error(host, position, rounded) < TURN_BOUND


def test_rotations_of_other_angles_are_not_within_the_bound(host: ctypes.CDLL) -> None:
    """What the model rounds must be rounded: far along, the angle itself is another."""
    own = frequencies(PRESETS["north-mini-code"], torch.device("cpu")).numpy().astype(np.float64)
    assert turn_error(host, 499_999, 499_999 * own) > 100 * TURN_BOUND
