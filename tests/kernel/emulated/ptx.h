// In the place of the kernel's ptx.h: what each instruction does, for fibers of one host thread, where memory changes for
// all at once. So fences do nothing; copies take their time all the same.
#pragma once

#include "copies.h"
#include "cuda.h"

// Of the block that runs; see whoever includes the kernel.
uint8_t* shared_begin();
size_t shared_size();

namespace ptx {

inline uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<size_t>(static_cast<const uint8_t*>(pointer) - shared_begin());
  if (offset >= shared_size()) fail("not an address of the block's own shared memory");
  return static_cast<uint32_t>(offset);
}

inline uint32_t kept_address(const void* pointer) { return shared_address(pointer); }
template <typename T>
T* at_address(uint32_t shared) {
  return reinterpret_cast<T*>(shared_begin() + shared);
}

inline void barrier_init(uint64_t* barrier, int arrivals) {
  barrier_at(barrier) = {0, static_cast<uint64_t>(arrivals), static_cast<uint64_t>(arrivals), 0};
}
inline void barrier_inits_done() {}
inline void barrier_arrive(uint64_t* barrier, int count) {
  change_barrier(barrier, count, 0);
  falter();
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) { change_barrier(at_address<uint64_t>(barrier), 1, bytes); }
inline bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  if (barrier_at(barrier).parity == parity) park(barrier);
  return barrier_at(barrier).parity != parity;
}
inline bool barrier_passed(uint32_t barrier, uint32_t parity) { return barrier_passed(at_address<uint64_t>(barrier), parity); }

inline uint64_t read_once_policy() { return 0; }
inline void bulk_load(uint32_t to_shared, const void* from, uint32_t bytes, uint32_t barrier, uint64_t) {
  begin_copy(at_address<uint8_t>(to_shared), from, bytes, at_address<uint64_t>(barrier));
}
inline void bulk_store(void* to, uint32_t from_shared, uint32_t bytes) {
  begin_copy(to, shared_begin() + from_shared, bytes, nullptr);
}
inline void bulk_stores_read() { stores_read(); }
inline void bulk_stores_done() { stores_done(); }

inline void shared_before_bulk() {}
inline void global_before_bulk() {}
inline void fence_device() {}
inline void fence_system() {}

template <typename T>
const T& aligned(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) fail("a load of %zu bytes is not aligned", sizeof(T));
  return *static_cast<const T*>(from);
}

inline uint32_t load_relaxed(const uint32_t* from) { return polled(from); }
inline uint32_t load_acquire(const uint32_t* from) { return polled(from); }
inline void fetch(const void*) {}
inline uint4 load_shared_data(const void* from) { return aligned<uint4>(from); }
inline void copy_shared_data(uint32_t to_shared, const void* from, bool there) {
  std::memset(at_address<uint8_t>(to_shared), there ? 0xff : 0, 16);  // nobody may rely on what was there
  if (there) begin_copy(at_address<uint8_t>(to_shared), from, 16, nullptr);
}
inline void copies_done() { stores_done(); }
inline float load_shared_float(const float* from) { return aligned<float>(from); }
inline uint64_t load_shared_word(const uint64_t* from) { return aligned<uint64_t>(from); }
inline void add_relaxed(uint32_t* to, uint32_t amount) {
  *to += amount;
  wake(to);
  falter();
}
inline void add_release(uint32_t* to, uint32_t amount) { add_relaxed(to, amount); }
inline uint64_t add_wide(uint64_t* to, uint64_t amount) { return atomicAdd(to, amount); }
inline uint32_t count_around(uint32_t* to, uint32_t most) {
  const uint32_t before = *to;
  *to = before >= most ? 0 : before + 1;
  return before;
}
inline uint32_t exchange(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to = value;
  return before;
}
inline uint32_t exchange(uint32_t* to, uint32_t low, uint32_t high) { return exchange(to, low) | exchange(to + 1, high); }
inline uint32_t after(uint32_t, uint32_t amount) { return amount; }
inline int32_t load_from_host(const int32_t* from) { return *from; }
inline void store_to_host(int32_t* to, int32_t value) { *to = value; }

inline float low_half(uint32_t word) { return __uint_as_float(word << 16); }
inline float high_half(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// Sum k of 16 products in order, each rounded to float32: a tensor core rounds otherwise, within the same bounds.
inline void multiply_add(float (&d)[4], const uint4& own, uint32_t b0, uint32_t b1) {
  const auto both = [](uint32_t low, uint32_t high) { return static_cast<uint64_t>(high) << 32 | low; };
  const Words* all = exchange_in_warp({{both(own.x, own.z), both(own.y, own.w), both(b0, b1)}});
  const int row = own_lane() / 4, column = own_lane() % 4 * 2;
  for (int n = 0; n < 4; n++) {
    const Words *a = all + row * 4, *b = all + (column + n % 2) * 4;
    for (int half = 0; half < 64; half += 32)
      for (int c = 0; c < 4; c++) {
        const auto x = static_cast<uint32_t>(a[c].at[n / 2] >> half), y = static_cast<uint32_t>(b[c].at[2] >> half);
        d[n] += low_half(x) * low_half(y);
        d[n] += high_half(x) * high_half(y);
      }
  }
}

inline uint32_t load_shared_acquire(uint32_t from_shared) { return polled(at_address<uint32_t>(from_shared)); }
inline void store_shared_release(uint32_t to_shared, uint32_t value) {
  *at_address<uint32_t>(to_shared) = value;
  wake(at_address<uint32_t>(to_shared));
  falter();
}
inline void store_shared(uint32_t to_shared, uint32_t value) { *at_address<uint32_t>(to_shared) = value; }
inline void forget(uint32_t&) {}
inline uint32_t settled(uint32_t word) { return word; }
inline void meet(int barrier, int count) { meet_in_block(barrier, count, true); }
inline void meet_no_wait(int barrier, int count) { meet_in_block(barrier, count, false); }
template <int REGISTERS>
inline void take_registers() {}
template <int REGISTERS>
inline void give_registers() {}
// Who looks at the clock has waited for a while, for a word that may be read without any instruction of its own.
inline uint64_t nanoseconds() {
  park(&machine.clock);
  return machine.clock++;
}
inline void pause() { park(&machine.clock); }
inline uint32_t cycles() { return static_cast<uint32_t>(machine.clock++); }

inline float exp(float x, float base) { return expf(x - base); }
inline float infinity() { return __builtin_inff(); }
inline uint32_t rounded(float x) {
  const uint32_t bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack(float low, float high) { return rounded(high) << 16 | rounded(low); }

}  // namespace ptx
