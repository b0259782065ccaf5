// Noise for sampling that depends only on seed, position and token: headrace/model/philox.py says how and why.
#pragma once

#include <cstdint>

namespace philox {

constexpr int ROUNDS = 10;
constexpr uint32_t MULTIPLIER_0 = 0xD2511F53u, MULTIPLIER_1 = 0xCD9E8D57u;
constexpr uint32_t KEY_STEP_0 = 0x9E3779B9u, KEY_STEP_1 = 0xBB67AE85u;

struct Words {
  uint32_t x, y, z, w;
};

// The four words of one counter under one key.
__device__ __forceinline__ Words words_of(Words counter, uint32_t key_0, uint32_t key_1) {
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const uint32_t high_0 = __umulhi(MULTIPLIER_0, counter.x), low_0 = MULTIPLIER_0 * counter.x;
    const uint32_t high_1 = __umulhi(MULTIPLIER_1, counter.z), low_1 = MULTIPLIER_1 * counter.z;
    counter = {high_1 ^ counter.y ^ key_0, low_1, high_0 ^ counter.w ^ key_1, low_0};
    key_0 += KEY_STEP_0;
    key_1 += KEY_STEP_1;
  }
  return counter;
}

// The words of tokens 4 * block .. 4 * block + 3.
__device__ __forceinline__ Words words_of_tokens(uint64_t seed, uint32_t position, uint32_t block) {
  return words_of({block, position, 0, 0}, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
}

__device__ __forceinline__ float uniform(uint32_t word) {
  return __fmul_rn(__fadd_rz(__uint2float_rz(word), 0.5f), 0x1p-32f);
}

// Gumbel noise, right to within 1e-5.
__device__ __forceinline__ float noise(float uniform) { return -logf(-log1pf(-uniform)); }

__device__ __forceinline__ double exact_noise(float uniform) { return -log(-log1p(-static_cast<double>(uniform))); }

}  // namespace philox
