// All inline assembly of the kernel: one small function for one instruction, named after what it is for.
// Unless a comment says otherwise every function is for any thread, and pointers are generic.
#pragma once

#include <cstdint>

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same, once and for all: kept in a register, not worked out at every use.
__device__ __forceinline__ uint32_t kept_address(const void* pointer) {
  uint32_t address;
  asm volatile("{\n.reg .u64 a;\ncvta.to.shared.u64 a, %1;\ncvt.u32.u64 %0, a;\n}" : "=r"(address) : "l"(pointer));
  return address;
}

// ---- mbarriers: words of shared memory that count arrivals and bytes, phase after phase ----

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_inits_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

// Arrive once, and make the phase wait for this many bytes of bulk copies besides.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is over. Sleeps for a moment, which the hardware chooses, before it says no.
__device__ __forceinline__ bool barrier_passed(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

__device__ __forceinline__ bool barrier_passed(uint64_t* barrier, uint32_t parity) {
  return barrier_passed(shared_address(barrier), parity);
}

// A word by which threads of the block tell each other that what they wrote to shared memory before may be read.
__device__ __forceinline__ uint32_t load_shared_acquire(uint32_t from_shared) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(from_shared) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_release(uint32_t to_shared, uint32_t value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(to_shared), "r"(value) : "memory");
}

// ---- bulk copies: contiguous, 16-byte aligned, by the copy engine (the asynchronous proxy) ----

__device__ __forceinline__ uint64_t read_once_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void bulk_load(uint32_t to_shared, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to_shared),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, uint32_t from_shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from_shared), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// This thread's bulk stores have read their source.
__device__ __forceinline__ void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// This thread's bulk stores are complete: their writes can be seen.
__device__ __forceinline__ void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- fences ----

// This thread's ordinary writes to shared memory come before later bulk copies that touch it.
__device__ __forceinline__ void shared_before_bulk() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Ordinary accesses to global memory come before later bulk copies, and the other way round.
__device__ __forceinline__ void global_before_bulk() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- words that SMs and the host share ----
// What is called shared data here, or a shared word, is global memory. Addresses in an SM's own shared memory are
// to_shared and from_shared.

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* from) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

// Into the L1, if it has room: for data that nobody writes.
__device__ __forceinline__ void fetch(const void* from) { asm volatile("prefetch.global.L1 [%0];" ::"l"(from)); }

// 16 bytes that another SM wrote in this step: past the L1, which may hold older ones.
__device__ __forceinline__ uint4 load_shared_data(const void* from) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

// The same into shared memory, or zeros if it is not `there`: under way until this thread calls copies_done.
__device__ __forceinline__ void copy_shared_data(uint32_t to_shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to_shared), "l"(from), "r"(there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float load_shared_float(const float* from) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ uint64_t load_shared_word(const uint64_t* from) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void add_relaxed(uint32_t* to, uint32_t amount) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(amount) : "memory");
}

__device__ __forceinline__ void add_release(uint32_t* to, uint32_t amount) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(amount) : "memory");
}

// The three below give what was there: who has it knows that the change is made.
__device__ __forceinline__ uint64_t add_wide(uint64_t* to, uint64_t amount) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(to), "l"(amount) : "memory");
  return before;
}

// Add 1; what was `most` becomes 0.
__device__ __forceinline__ uint32_t count_around(uint32_t* to, uint32_t most) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(most) : "memory");
  return before;
}

__device__ __forceinline__ uint32_t exchange(uint32_t* to, uint32_t value) {
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(before) : "l"(to), "r"(value) : "memory");
  return before;
}

// Two words at once, at an address that is a multiple of 8. Gives the bits of both old words, mixed: they are only waited for.
__device__ __forceinline__ uint32_t exchange(uint32_t* to, uint32_t low, uint32_t high) {
  uint64_t before;
  asm volatile("{\n.reg .b64 both;\nmov.b64 both, {%2, %3};\natom.relaxed.gpu.global.exch.b64 %0, [%1], both;\n}"
               : "=l"(before)
               : "l"(to), "r"(low), "r"(high)
               : "memory");
  return static_cast<uint32_t>(before | before >> 32);
}

// `amount`, known only when `came_back` is: what is done with it is not done before.
__device__ __constant__ uint32_t no_bits = 0;
__device__ __forceinline__ uint32_t after(uint32_t came_back, uint32_t amount) { return amount + (came_back & no_bits); }

__device__ __forceinline__ int32_t load_from_host(const int32_t* from) {
  int32_t value;
  asm volatile("ld.relaxed.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ void store_to_host(int32_t* to, int32_t value) {
  asm volatile("st.release.sys.global.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// ---- tensor cores ----

// d += a b for 16 rows: lane 4g + c holds rows g (a.x, a.z; d0, d1) and g + 8 (a.y, a.w; d2, d3).
__device__ __forceinline__ void multiply_add(float (&d)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// ---- threads ----

__device__ __forceinline__ void store_shared(uint32_t to_shared, uint32_t value) {
  asm volatile("st.relaxed.cta.shared::cta.u32 [%0], %1;" ::"r"(to_shared), "r"(value) : "memory");
}

// Keep the compiler from working out ahead of a loop all that depends on this value.
__device__ __forceinline__ void forget(uint32_t& value) { asm volatile("" : "+r"(value)); }

// A copy in a register of its own, which the assembler does not take for the one it came from.
__device__ __constant__ uint32_t all_bytes = 0x3210;
__device__ __forceinline__ uint32_t settled(uint32_t word) { return __byte_perm(word, 0, all_bytes); }

// Meet the other threads (`count` in all) that name this barrier.
__device__ __forceinline__ void meet(int barrier, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Be counted as one who has come to a barrier, and go on.
__device__ __forceinline__ void meet_no_wait(int barrier, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

// For a moment, between looks at a word that no barrier tells of.
__device__ __forceinline__ void pause() { __nanosleep(32); }

template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Of the SM's own clock, modulo 2^32.
__device__ __forceinline__ uint32_t cycles() {
  uint32_t value;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(value));
  return value;
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
}

// ---- numbers ----

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// exp(x - base), within some 2^-21 of it where |base| is below 100.
__device__ __forceinline__ float exp(float x, float base) {
  constexpr float LOG2_E = 1.44269504f;
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(x, LOG2_E, -base * LOG2_E)));
  return result;
}

// Two floats, rounded to the nearest bfloat16 (ties to even); `low` at the lower address.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

}  // namespace ptx
