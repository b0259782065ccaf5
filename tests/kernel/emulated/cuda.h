// What device code takes from CUDA, for one host thread: every thread of the GPU is a fiber.
#pragma once

#include "scheduler.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __forceinline__ inline

struct Index { uint32_t x; };
#define threadIdx (Index{static_cast<uint32_t>(current->thread)})
#define blockIdx (Index{static_cast<uint32_t>(current->sm)})

struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- numbers; the compiler is told not to contract ----

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

inline uint32_t __float_as_uint(float x) { return bits_as<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return bits_as<float>(x); }
inline double __longlong_as_double(int64_t x) { return bits_as<double>(x); }
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(static_cast<uint64_t>(static_cast<uint32_t>(high)) << 32 | static_cast<uint32_t>(low));
}
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint64_t>(a) * b >> 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) { return static_cast<unsigned __int128>(a) * b >> 64; }
// Toward zero: a double holds what a float must not round up.
inline float toward_zero(double x) { return static_cast<float>(bits_as<double>(bits_as<uint64_t>(x) & ~0x1fffffffull)); }
inline float __uint2float_rz(uint32_t x) { return toward_zero(x); }
inline float __fadd_rz(float a, float b) { return toward_zero(static_cast<double>(a) + b); }
inline int __ffs(uint32_t x) { return __builtin_ffs(x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T atomicAdd(T* to, T amount) {
  const T before = *to;
  *to += amount;
  return before;
}

inline int atomicCAS(int* at, int expected, int value) {
  const int before = *at;
  if (before == expected) *at = value;
  return before;
}
inline uint32_t atomicCAS(uint32_t* at, uint32_t expected, uint32_t value) {
  const uint32_t before = *at;
  if (before == expected) *at = value;
  return before;
}
inline void __threadfence_block() {}

// ---- a warp ----

template <typename T>
Words words_of(T value) {
  static_assert(sizeof(T) <= 8);
  Words words{};
  std::memcpy(words.at, &value, sizeof(value));
  return words;
}
template <typename T>
T value_of(const Words& words) {
  T value;
  std::memcpy(&value, words.at, sizeof(value));
  return value;
}

inline int own_lane() { return current->thread % LANES; }
inline void __syncwarp() { exchange_in_warp({}); }
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const Words* votes = exchange_in_warp(words_of(vote));
  uint32_t all = 0;
  for (int lane = 0; lane < LANES; lane++) all |= static_cast<uint32_t>(value_of<bool>(votes[lane])) << lane;
  return all;
}
template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
  return value_of<T>(exchange_in_warp(words_of(value))[lane]);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return value_of<T>(exchange_in_warp(words_of(value))[own_lane() ^ mask]);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int by, int width = LANES) {
  const Words* words = exchange_in_warp(words_of(value));
  return value_of<T>(words[own_lane() % width >= by ? own_lane() - by : own_lane()]);
}
template <typename T, typename Put>
T reduced(T value, Put put) {
  const Words* words = exchange_in_warp(words_of(value));
  T all = value_of<T>(words[0]);
  for (int lane = 1; lane < LANES; lane++) all = put(all, value_of<T>(words[lane]));
  return all;
}
template <typename T>
T __reduce_add_sync(uint32_t, T value) {
  return reduced(value, [](T a, T b) { return a + b; });
}
inline uint32_t __reduce_or_sync(uint32_t, uint32_t value) {
  return reduced(value, [](uint32_t a, uint32_t b) { return a | b; });
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  return reduced(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t __reduce_min_sync(uint32_t, uint32_t value) {
  return reduced(value, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}
#define __syncthreads() meet_in_block(0, THREADS, true)
