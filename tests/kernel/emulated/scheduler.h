// Threads of a launch, each a fiber of one host thread. One runs until it waits; who is next is drawn at random, and so
// is when copies that are under way land. Who waits in vain is seen: all others are waiting, too.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <unordered_map>
#include <vector>

constexpr int LANES = 32, MAX_WARPS = 16, NAMED_BARRIERS = 16;
constexpr size_t STACK_BYTES = 1 << 17;
constexpr int IDLE_ROUNDS = 4000;                // of all who wait, in which nothing comes of it
constexpr uint64_t IDLE_NANOSECONDS = 1'000'000;  // that such a round takes: else the clock nearly stands still

struct Fiber {
  ucontext_t context;
  int sm, thread;
  bool late;           // it goes on only where nobody else can
  const void* polled;  // the word that was read last, and what was there
  uint64_t seen;
};
struct Words {
  uint64_t at[3];
};
struct Warp {
  int there = 0;
  Words words[LANES], last[LANES];
  std::vector<Fiber*> waiting;
};
struct NamedBarrier {
  int there = 0, count = 0;
  std::vector<Fiber*> waiting;
};

// What is under way beside the threads: complete() does a step of one of them.
struct Copies {
  bool (*any)();
  void (*step)(uint32_t drawn);
};

struct Scheduler {
  std::mt19937 random;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready, held;  // held are those that are late
  std::unordered_map<const void*, std::vector<Fiber*>> parked;  // by the word that they wait for
  std::vector<Warp> warps;
  std::vector<NamedBarrier> barriers;
  std::vector<uint32_t> rank;  // of a warp: the higher goes first
  Copies copies{};
  int candidates = 1;     // the best ranked of so many goes on
  uint32_t eager = 0;     // of 64: how often a copy goes on though threads could
  size_t running = 0;
  bool progress = false;  // something has changed for others
  int idle = 0;
  uint64_t clock = 1;
  char failure[256] = "";
  ucontext_t caller;
  void (*entry)(int sm, int thread) = nullptr;
};
inline Scheduler machine;
inline Fiber* current;

// End the launch here and now.
[[noreturn]] inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  std::vsnprintf(machine.failure, sizeof(machine.failure), format, values);
  va_end(values);
  setcontext(&machine.caller);
  __builtin_unreachable();
}

inline uint32_t warp_of(const Fiber& fiber) { return fiber.sm * MAX_WARPS + fiber.thread / LANES; }

inline void make_ready(Fiber* fiber) { (fiber->late ? machine.held : machine.ready).push_back(fiber); }

inline Fiber* draw() {
  auto& ready = machine.ready;
  size_t best = machine.random() % ready.size();
  for (int n = 1; n < machine.candidates; n++) {
    const size_t other = machine.random() % ready.size();
    if (machine.rank[warp_of(*ready[other])] > machine.rank[warp_of(*ready[best])]) best = other;
  }
  Fiber* next = ready[best];
  ready[best] = ready.back();
  ready.pop_back();
  return next;
}

inline void wake(std::vector<Fiber*>& waiting) {
  for (Fiber* fiber : waiting) make_ready(fiber);
  waiting.clear();
  machine.progress = true;
}

inline void wake(const void* word) {
  machine.progress = true;
  if (const auto found = machine.parked.find(word); found != machine.parked.end()) wake(found->second);
}

// Nobody can go on: let all look anew at what they wait for.
inline void idle_round() {
  machine.idle = machine.progress ? 0 : machine.idle + 1;
  if (machine.idle > 1) machine.clock += IDLE_NANOSECONDS;
  if (machine.idle > IDLE_ROUNDS) fail("threads wait for others that never come");
  for (auto& [word, waiting] : machine.parked) wake(waiting);
  // In an order that does not hang on where memory lies.
  std::sort(machine.ready.begin(), machine.ready.end());
  std::sort(machine.held.begin(), machine.held.end());
  machine.progress = false;
  if (machine.ready.empty() && machine.held.empty()) fail("threads wait for others that never come");
}

// One of those that are late.
inline void release_one() {
  Fiber*& drawn = machine.held[machine.random() % machine.held.size()];
  machine.ready.push_back(drawn);
  drawn = machine.held.back();
  machine.held.pop_back();
}

// Run somebody else. Whoever is to come back is in some list.
inline void leave() {
  if (!machine.running) setcontext(&machine.caller);
  if (machine.copies.any() && machine.random() % 64 < machine.eager) machine.copies.step(machine.random());
  while (machine.ready.empty()) {
    if (machine.copies.any())
      machine.copies.step(machine.random());
    else if (!machine.held.empty() && !machine.progress)  // for nobody else something has changed
      release_one();
    else
      idle_round();
  }
  Fiber* before = current;
  current = draw();
  if (current != before) swapcontext(&before->context, &current->context);
}

inline void park(const void* word) {
  machine.parked[word].push_back(current);
  leave();
}

// Let others run, now and then.
inline void falter() {
  if (machine.random() % 8) return;
  make_ready(current);
  leave();
}

// Before a word that others change is read: who reads the same again waits for it.
template <typename T>
T polled(const T* word) {
  uint64_t now = 0;
  std::memcpy(&now, word, sizeof(T));
  if (current->polled == word && current->seen == now) park(word);
  current->polled = word;
  current->seen = 0;
  std::memcpy(&current->seen, word, sizeof(T));
  return *word;
}

// Give words to the warp and get those of all lanes, once all are there.
inline const Words* exchange_in_warp(const Words& words) {
  Warp& warp = machine.warps[warp_of(*current)];
  warp.words[current->thread % LANES] = words;
  if (++warp.there < LANES) {
    warp.waiting.push_back(current);
    leave();
  } else {
    std::memcpy(warp.last, warp.words, sizeof(warp.last));
    warp.there = 0;
    wake(warp.waiting);
    falter();
  }
  return warp.last;  // until all lanes are at the next exchange
}

// Come to a barrier of the block; only who waits must meet all `count`.
inline void meet_in_block(int barrier, int count, bool waits) {
  NamedBarrier& place = machine.barriers[current->sm * NAMED_BARRIERS + barrier];
  if (place.there && place.count != count) fail("barrier %d is for %d threads and for %d", barrier, place.count, count);
  place.count = count;
  if (++place.there == count) {
    place.there = 0;
    wake(place.waiting);
    falter();
  } else if (waits) {
    place.waiting.push_back(current);
    leave();
  }
}

inline void run_fiber() {
  machine.entry(current->sm, current->thread);
  machine.progress = true;
  machine.running--;
  leave();
}

// Threads of an SM that are late: [first, end).
struct Late {
  int sm = 0, first = 0, end = 0;
};

// Run all threads to their end. Null, or what went wrong.
inline const char* run_threads(int sms, int threads, uint32_t seed, Copies copies, void (*entry)(int, int), Late late = {}) {
  machine = {};
  machine.random.seed(seed);
  machine.copies = copies;
  machine.entry = entry;
  machine.candidates = 1 + seed % 4;
  machine.eager = seed % 3 * 12;
  machine.fibers.resize(static_cast<size_t>(sms) * threads);
  machine.warps.resize(sms * MAX_WARPS);
  machine.barriers.resize(sms * NAMED_BARRIERS);
  for (int n = 0; n < sms * MAX_WARPS; n++) machine.rank.push_back(machine.random());
  const size_t bytes = machine.fibers.size() * STACK_BYTES;
  auto* stacks = static_cast<uint8_t*>(
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (stacks == MAP_FAILED) return "there is no memory for the threads' stacks";
  for (size_t n = 0; n < machine.fibers.size(); n++) {
    Fiber& fiber = machine.fibers[n];
    fiber.sm = n / threads;
    fiber.thread = n % threads;
    fiber.late = fiber.sm == late.sm && fiber.thread >= late.first && fiber.thread < late.end;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + n * STACK_BYTES;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, run_fiber, 0);
    make_ready(&fiber);
  }
  machine.running = machine.fibers.size();
  volatile bool begun = false;
  getcontext(&machine.caller);
  if (!begun) {
    begun = true;
    current = draw();
    setcontext(&current->context);
  }
  munmap(stacks, bytes);
  if (!machine.failure[0] && machine.copies.any()) return "a copy lands after its block has ended";
  return machine.failure[0] ? machine.failure : nullptr;
}
