// What device code takes from CUDA, for one host thread: every thread of the GPU is a fiber, and a fiber that waits
// for its warp or its block lets the others run. Who waits in vain is seen.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __device__
#define __forceinline__ inline

constexpr int WARP_LANES = 32;

struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };
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

// ---- fibers ----

struct Fiber {
  ucontext_t context;
  int sm, thread;
  bool done;
};
extern Fiber* current;
extern bool progress;  // somebody's wait has ended in this round

void let_others_run();
// Give a word to the warp and get those of all lanes, once all are there.
const uint64_t* exchange_in_warp(uint64_t word);
void meet_in_block(int sm);

template <typename T>
uint64_t word_of(T value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(value));
  return word;
}
template <typename T>
T value_of(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

inline int own_lane() { return current->thread % WARP_LANES; }
inline void __syncwarp() { exchange_in_warp(0); }
inline uint32_t __ballot_sync(uint32_t, bool vote) {
  const uint64_t* votes = exchange_in_warp(vote);
  uint32_t all = 0;
  for (int lane = 0; lane < WARP_LANES; lane++) all |= static_cast<uint32_t>(votes[lane]) << lane;
  return all;
}
template <typename T>
T __shfl_sync(uint32_t, T value, int lane) {
  return value_of<T>(exchange_in_warp(word_of(value))[lane]);
}
template <typename T>
T __shfl_xor_sync(uint32_t, T value, int mask) {
  return value_of<T>(exchange_in_warp(word_of(value))[own_lane() ^ mask]);
}
template <typename T>
T __shfl_up_sync(uint32_t, T value, int by) {
  const uint64_t* words = exchange_in_warp(word_of(value));
  return value_of<T>(words[own_lane() >= by ? own_lane() - by : own_lane()]);
}
template <typename T>
T __reduce_add_sync(uint32_t, T value) {
  const uint64_t* words = exchange_in_warp(word_of(value));
  T sum = 0;
  for (int lane = 0; lane < WARP_LANES; lane++) sum += value_of<T>(words[lane]);
  return sum;
}
