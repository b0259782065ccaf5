// Rotary embedding of one pair. Positions reach a million radians, so the angle is reduced in float64: float32
// arithmetic would need the slow path of the library, and local memory with it.
#pragma once

#include <cstdint>

namespace rope {

__device__ __forceinline__ float2 turned(float2 pair, float position, float frequency) {
  const double angle = static_cast<double>(position * frequency);  // the product is rounded to float32, as the model's
  const double quarters = rint(angle * 0.63661977236758134308);
  // pi / 2 in two parts: what is left of the angle is exact to float64's last bits.
  double r = fma(-quarters, 1.57079632679489655800, angle);
  r = fma(-quarters, 6.12323399573676603587e-17, r);
  const double z = r * r;
  // Taylor series; the first terms left out are below 1e-17 for |r| <= pi / 4.
  double sine = fma(z, -7.6471637318198164759e-13, 1.6059043836821614599e-10);
  sine = fma(z, sine, -2.5052108385441718775e-8);
  sine = fma(z, sine, 2.7557319223985890653e-6);
  sine = fma(z, sine, -1.9841269841269841270e-4);
  sine = fma(z, sine, 8.3333333333333333333e-3);
  sine = fma(z, sine, -1.6666666666666666667e-1);
  sine = fma(z * r, sine, r);
  double cosine = fma(z, -1.1470745597729724714e-11, 2.0876756987868098979e-9);
  cosine = fma(z, cosine, -2.7557319223985890653e-7);
  cosine = fma(z, cosine, 2.4801587301587301587e-5);
  cosine = fma(z, cosine, -1.3888888888888888889e-3);
  cosine = fma(z, cosine, 4.1666666666666666667e-2);
  cosine = fma(z, cosine, -0.5);
  cosine = fma(z, cosine, 1.0);
  const int quadrant = static_cast<int>(quarters) & 3;
  float c = static_cast<float>(quadrant & 1 ? sine : cosine), s = static_cast<float>(quadrant & 1 ? cosine : sine);
  if (quadrant == 1 || quadrant == 2) c = -c;
  if (quadrant >= 2) s = -s;
  // Each operation rounded by itself, as in PyTorch.
  return make_float2(__fsub_rn(__fmul_rn(pair.x, c), __fmul_rn(pair.y, s)),
                     __fadd_rn(__fmul_rn(pair.y, c), __fmul_rn(pair.x, s)));
}

}  // namespace rope
