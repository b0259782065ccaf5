// A launch of the whole kernel.
#include "alignment.h"
#include "cuda.h"

#include "decode.h"

#include <cstdlib>

static const Params* params;
static std::vector<uint8_t*> blocks;  // each SM's shared memory

uint8_t* shared_begin() { return blocks[current->sm]; }
size_t shared_size() { return sizeof(Shared); }

// Null, or what went wrong. `seed` is for the order of threads and copies; threads [first, end) of SM `sm` are late.
extern "C" __attribute__((visibility("default"))) const char* run(const Params* given, uint32_t seed, int32_t sm, int32_t first, int32_t end) {
  params = given;
  under_way.clear();
  blocks.clear();
  for (int sm = 0; sm < sizes::SMS; sm++) {
    constexpr size_t BYTES = (sizeof(Shared) + 127) / 128 * 128;
    blocks.push_back(static_cast<uint8_t*>(std::aligned_alloc(128, BYTES)));
    std::memset(blocks.back(), 0xee, BYTES);
  }
  const char* failure = run_threads(sizes::SMS, THREADS, seed, COPIES, [](int, int) { decode(*params); }, {sm, first, end});
  for (uint8_t* block : blocks) std::free(block);
  return failure;
}
