// The arithmetic of the borders of top_k and top_p: headrace/step/oracle/selection.py.
#pragma once

#include <cstdint>

// Of which unsigned order is the order of scores; -0, which a tiny difference may underflow to, is 0.
__device__ __forceinline__ uint32_t key_of(float score) {
  uint32_t bits = __float_as_uint(score);
  if (bits == 0x80000000u) bits = 0;
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float score_of(uint32_t key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}

// total * numerator / 2^shift, rounded up. The product has up to 128 bits, the result fits in 64.
__device__ __forceinline__ uint64_t part_of(uint64_t total, uint64_t numerator, int shift) {
  const uint64_t low = total * numerator, high = __umul64hi(total, numerator);
  uint64_t whole, rest;
  if (shift == 0) {
    whole = low, rest = 0;
  } else if (shift < 64) {
    whole = high << (64 - shift) | low >> shift;
    rest = low << (64 - shift);
  } else if (shift == 64) {
    whole = high, rest = low;
  } else if (shift < 128) {
    whole = high >> (shift - 64);
    rest = low | high << (128 - shift);
  } else {
    whole = 0, rest = low | high;
  }
  return whole + (rest != 0);
}

// How many of equal tokens stay: the weight of the first ones reaches what is missing.
__device__ __forceinline__ uint64_t equals_that_stay(uint64_t missing, uint64_t weight) {
  return weight ? (missing + weight - 1) / weight : 0;
}
