// exp in float64 by a fixed sequence of roundings, so that headrace/step/oracle/exponential.py has the same bits.
// No operation may be contracted into another: hence the functions with the rounding in their names.
#pragma once

#include <cstdint>

// exp(x) for x from LEAST_EXPONENT to 0, within 1 unit of the last place; 0 for anything below, or not a number.
__device__ __forceinline__ double exponential(double x) {
  constexpr double LEAST_EXPONENT = -700.0;
  if (!(x >= LEAST_EXPONENT)) return 0.0;
  constexpr double TO_INTEGER = 0x1.8p52;  // added and subtracted, rounds to the nearest integer
  const double n = __dsub_rn(__dadd_rn(__dmul_rn(x, 0x1.71547652b82fep0), TO_INTEGER), TO_INTEGER);
  // ln 2 in two parts, of which the first has zeros at its end: its product is exact.
  const double r = __dsub_rn(__dsub_rn(x, __dmul_rn(n, 0x1.62e42feep-1)), __dmul_rn(n, 0x1.a39ef35793c76p-33));
  double sum = 1.0 / 6227020800.0;
  const auto next = [&](double coefficient) { sum = __dadd_rn(__dmul_rn(sum, r), coefficient); };
  next(1.0 / 479001600.0);
  next(1.0 / 39916800.0);
  next(1.0 / 3628800.0);
  next(1.0 / 362880.0);
  next(1.0 / 40320.0);
  next(1.0 / 5040.0);
  next(1.0 / 720.0);
  next(1.0 / 120.0);
  next(1.0 / 24.0);
  next(1.0 / 6.0);
  next(0.5);
  sum = __dadd_rn(1.0, __dadd_rn(r, __dmul_rn(sum, __dmul_rn(r, r))));
  const int64_t exponent = 1023 + static_cast<int64_t>(n);
  return __dmul_rn(sum, __longlong_as_double(exponent << 52));
}

// A token's weight for top_p: floor(2^44 exp(score)).
__device__ __forceinline__ uint64_t weight_of(float score) {
  return static_cast<uint64_t>(__dmul_rn(exponential(static_cast<double>(score)), 0x1p44));
}
