// In the place of the kernel's ptx.h: what sampling uses of it. One host thread needs no fence.
#pragma once

#include "cuda.h"

namespace ptx {

inline void shared_before_bulk() {}
inline void global_before_bulk() {}
inline void fence_device() {}
inline void fence_system() {}

template <typename T>
const T& aligned(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) std::puts("a load is not aligned"), std::abort();
  return *static_cast<const T*>(from);
}

inline uint32_t load_relaxed(const uint32_t* from) { return *from; }
inline uint4 load_shared_data(const void* from) { return aligned<uint4>(from); }
inline uint64_t load_shared_word(const uint64_t* from) { return aligned<uint64_t>(from); }
inline int32_t load_from_host(const int32_t* from) { return *from; }
inline void store_to_host(int32_t* to, int32_t value) { *to = value; }
inline uint64_t add_wide(uint64_t* to, uint64_t amount) { return atomicAdd(to, amount); }
inline uint32_t exchange(uint32_t* to, uint32_t value) {
  const uint32_t before = *to;
  *to = value;
  return before;
}
inline void forget(uint32_t&) {}
inline float infinity() { return __builtin_inff(); }

}  // namespace ptx
