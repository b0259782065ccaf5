// Rotary embedding of one pair. Positions reach a million radians: to take whole quarters off such an angle float32 would
// need the slow path of the library, and local memory with it, so that is done in float64. The rest is float32's.
#pragma once

#include <cstdint>

namespace rope {

__device__ __forceinline__ float2 turned(float2 pair, float position, float frequency) {
  const double angle = static_cast<double>(position * frequency);  // the product is rounded to float32, as the model's
  const double quarters = rint(angle * 0.63661977236758134308);
  // pi / 2 in two parts: what is left of the angle is exact to float64's last bits.
  double rest = fma(-quarters, 1.57079632679489655800, angle);
  rest = fma(-quarters, 6.12323399573676603587e-17, rest);
  const float r = static_cast<float>(rest), z = r * r;
  // Taylor series; the first terms left out are below 2e-9 for |r| <= pi / 4.
  float sine = fmaf(z, 2.7557319223985891e-6f, -1.9841269841269841e-4f);
  sine = fmaf(z, sine, 8.3333333333333333e-3f);
  sine = fmaf(z, sine, -1.6666666666666667e-1f);
  sine = fmaf(z * r, sine, r);
  float cosine = fmaf(z, -2.7557319223985891e-7f, 2.4801587301587302e-5f);
  cosine = fmaf(z, cosine, -1.3888888888888889e-3f);
  cosine = fmaf(z, cosine, 4.1666666666666667e-2f);
  cosine = fmaf(z, cosine, -0.5f);
  cosine = fmaf(z, cosine, 1.0f);
  const int quadrant = static_cast<int>(quarters) & 3;
  float c = quadrant & 1 ? sine : cosine, s = quadrant & 1 ? cosine : sine;
  if (quadrant == 1 || quadrant == 2) c = -c;
  if (quadrant >= 2) s = -s;
  // Each operation rounded by itself, as in PyTorch.
  return make_float2(__fsub_rn(__fmul_rn(pair.x, c), __fmul_rn(pair.y, s)),
                     __fadd_rn(__fmul_rn(pair.y, c), __fmul_rn(pair.x, s)));
}

}  // namespace rope
