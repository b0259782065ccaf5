// What an SM keeps in shared memory, what a launch is given, and who owns which part.
//
// Threads: eight consumer warps in two groups of four, then one warp each for what runs beside them.
//
//   loader     fills the task slots, and orders pages
//   copier     one thread, which fills the ring with what is ordered, and hands over the tasks
//   consumers  multiply, and write what they made into messages
//   publisher  one thread, which sends messages to global memory and signals counters
//   helper     chooses the experts as soon as the router's logits are there, and puts attention's partial results together
//              while the consumers are at the experts
#pragma once

#include "isa.h"
#include "ptx.h"
#include "sizes.h"
#include "variant.h"

constexpr int ROWS = sizes::ROWS;
constexpr int RING = sizes::RING_PAGES;
constexpr int CONSUMER_WARPS = 8;
constexpr int CONSUMERS = CONSUMER_WARPS * isa::WARP;
constexpr int LOADER_WARP = CONSUMER_WARPS, COPIER_WARP = LOADER_WARP + 1, PUBLISHER_WARP = LOADER_WARP + 2,
              HELPER_WARP = LOADER_WARP + 3;
constexpr int THREADS = CONSUMERS + isa::GROUP_THREADS;
static_assert(CONSUMERS == isa::CONSUMER_GROUPS * isa::GROUP_THREADS);

constexpr bool WIDE = ROWS > 8;                // the rows fill the tensor core's sixteen
constexpr int TILE_WARPS = ROWS >= 8 ? 8 : 4;  // warps that share a tile, each taking part of K
constexpr int TILE_GROUPS = CONSUMER_WARPS / TILE_WARPS;
constexpr int GROUP = sizes::HEADS / sizes::KV_HEADS;
constexpr int HEAD_DIM = sizes::HEAD_DIM;
constexpr int HEAD_TILES = HEAD_DIM / isa::TILE_ROWS;
constexpr int QKV_TILES = (GROUP + 2) * HEAD_TILES;  // of one KV head
constexpr int PARTIAL_BYTES = sizes::PARTIAL_FLOATS * 4;
constexpr int EXPERTS = sizes::EXPERTS > 0 ? sizes::EXPERTS : 1;
constexpr int CHOICES = sizes::TOP_K > 0 ? sizes::TOP_K : 1;  // experts of a row
constexpr int MAX_ACTIVE = sizes::TOP_K > 0 ? (EXPERTS < ROWS * sizes::TOP_K ? EXPERTS : ROWS * sizes::TOP_K) : 1;

constexpr int SUM_ROWS = ROWS < 2 ? 2 : ROWS < 8 ? ROWS : 8;  // of activations, in a partial sum

constexpr int INPUT_BYTES = ROWS == 1 ? 12288 : ROWS <= 4 ? 16384 : 16;  // where inputs have a place in shared memory
constexpr bool INPUT_STAYS = sizes::HIDDEN * ROWS * 2 <= INPUT_BYTES;  // norm(X) does
constexpr int MESSAGES = 16;
constexpr int ORDERS = 16;
constexpr int PAYLOAD = ROWS * isa::TILE_ROWS * 2;  // bytes of a tile of bfloat16
constexpr int CANDIDATE_BYTES = sizeof(isa::Candidate);
constexpr int BINS_BYTES = isa::DIGIT_BINS * 8;
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
// Chunks of a row whose outputs ATTENTION_MERGE has at a time. Models with narrow heads are small: they can wait.
constexpr int MERGE_CHUNKS = HEAD_DIM >= 64 ? isa::MAX_CHUNKS : 16;
constexpr int MERGE_BYTES = MERGE_CHUNKS * isa::MERGED_TILES * isa::TILE_ROWS * 4;
constexpr int LOGIT_BYTES = (EXPERTS + isa::TILE_ROWS - 1) / isa::TILE_ROWS * isa::TILE_ROWS * ROWS * 4;
constexpr int RECORD_BYTES = larger(larger(MERGE_BYTES, LOGIT_BYTES), larger(ROWS * CANDIDATE_BYTES, BINS_BYTES));
constexpr int PAGE_ARRIVALS = 8;                    // that free a ring slot, whoever shares the page

// Named barriers; 0 belongs to __syncthreads.
// FIRST_GROUP and the next are the groups of four warps; STORED tells that all consumers have stored a task's results.
constexpr int ALL_CONSUMERS = 1, FIRST_GROUP = 2, STORED = 4;

static_assert(GROUP <= 8 && HEAD_DIM % 32 == 0, "attention takes up to 8 query heads a KV head");
static_assert(isa::TASK_SLOTS <= 16 && (MESSAGES & (MESSAGES - 1)) == 0);

// A task as the loader leaves it there. EXPERT_UP: the range of its items.
struct TaskSlot {
  isa::Descriptor task;
  int32_t first, last;
  int32_t number;  // its place in the list, for the watchdog
  int32_t pad;
};

// Pages that follow one another in memory, for the copier.
struct alignas(16) Order {
  const uint8_t* from;
  uint16_t pages;
  uint16_t bytes;  // of a page
  uint16_t task;   // its number in the list
  uint8_t most;    // pages of this size that may be under way
  uint8_t flags;   // of order_flag
};
static_assert(sizeof(Order) == 16 && isa::PAGE_BYTES_MAX < 1 << 16 && isa::ORDER_PAGES < 1 << 16);

// What the publisher is to do: send `bytes` from shared memory to `to`, then add to a counter. Both may be absent.
struct Message {
  uint8_t* to;
  uint32_t* counter;
  uint32_t from;
  uint32_t bytes;
  uint32_t amount;
  uint32_t pad;
};

// ROW_STATE. Written by the consumers in SAMPLE_COMMIT; the loader reads it only after that step's commit counter, the
// helper after rows_moved.
struct RowState {
  int32_t active[ROWS], slot[ROWS], token[ROWS], position[ROWS], made[ROWS];
  int32_t first_new[ROWS];  // the lowest position that this step writes in the row's slot
  int32_t flags[ROWS];      // of RowFlag: how the row is sampled
};

// How each row's attention is cut in this step, for layers without and with a window: see items.h. Written with
// RowState, and read under the same rule.
struct RowChunks {
  int32_t first, last, size;  // blocks
  int32_t count;              // chunks; 0 for an inactive row
  int32_t begin;              // of the row on the line of all rows' items
};
struct ChunkTable {
  RowChunks rows[ROWS];
  int32_t total;
};

// The experts of the layer at hand, made by the helper and read by the loader and the consumers up to EXPERT_DOWN. The
// next layer's are made after the router's counter of that layer, which follows everything that reads these.
struct Route {
  int32_t count;
  int32_t expert[MAX_ACTIVE];
  uint32_t users[MAX_ACTIVE];      // bit r: row r is routed to it
  alignas(16) float weight[MAX_ACTIVE][ROWS];  // 0: the row is not routed to it
  int16_t choice[ROWS][CHOICES];   // each row's experts, on the way to the above
  int16_t place[EXPERTS];          // in `expert`
};

// The search for the border of top_k or top_p of one row, and its outcome: what is above `key` stays, and of the tokens
// at it those up to `last_equal`.
struct Border {
  uint64_t needed, above;
  uint32_t key;  // the digits found so far, in the low bits
  int32_t last_equal;
};

// What a warp waits for at present.
struct Note {
  static constexpr int INDEX_BITS = 24;
  uint32_t waited;  // 0: nothing; else one more than the Waited, above the bits of its index
  uint32_t want;
};

// Lines under way, and how many signals the publisher has recorded: see trace.h.
template <bool TRACE>
struct TraceState {};
template <>
struct TraceState<true> {
  variant::TraceLine line[variant::TRACE_LANES];
  uint32_t signals;
};

struct Shared {
  alignas(128) uint8_t ring[RING][isa::PAGE_BYTES_MAX];
  alignas(16) uint8_t payload[MESSAGES][PAYLOAD];
  // The helper's: the router's logits, then a row's partial results. In SAMPLE_SELECT a histogram, in SAMPLE_PICK the
  // candidates of all rows: the consumers come to these only after the last merge's signal.
  alignas(16) uint8_t record[RECORD_BYTES];
  float2 chunk_weights[isa::MAX_CHUNKS];  // ATTENTION_MERGE: weights, and weighted sums, of a row's chunks
  union {
    // Partial sums across the warps of a tile: [buffer][warp][at most twice two][eight outputs by up to eight rows].
    alignas(16) float sums[2][CONSUMER_WARPS][WIDE ? 4 : 2][isa::TILE_ROWS * SUM_ROWS];
    uint4 attention_weights[2][2][isa::WARP];  // of a round: [group][half block][lane]
  };
  alignas(16) uint8_t input[INPUT_BYTES];  // norm(X), or the input of a down projection: as staged_at says
  float2 scales[ROWS];  // where it has none: the rows' means, and what their elements are multiplied by
  int32_t input_norm;   // which norm that is of, in which step
  uint32_t input_epoch;
  alignas(16) float residual[variant::RESIDUAL_TILES][ROWS][isa::TILE_ROWS];  // owned tiles, for the whole step
  union {
    struct {
      alignas(16) float attention_max[2][8][4], attention_sum[2][8][4];  // of a group's warps in a round, by row
    };
    float2 spreads[8][ROWS];  // mean, and squares around it, of a row's eighths: see spread.h
  };
  alignas(16) TaskSlot tasks[isa::TASK_SLOTS];
  Message messages[MESSAGES];
  Order orders[ORDERS];
  uint32_t orders_made, orders_taken;  // over the launch; written by the loader and by the copier
  union {  // no layer routes while rows are sampled
    Route route;
    struct {
      Border borders[2][ROWS];  // of top_k, of top_p; only of rows that have one
      float best_score[ROWS];   // the largest adjusted logit; only of rows that are drawn
      alignas(16) isa::Stat stats[ROWS];  // what SAMPLE_STATS has found among this SM's logits
    };
  };
  RowState rows;
  uint64_t kv_pages[sizes::LAYERS];  // Params::kv_pages
  float frequencies[HEAD_DIM / 2];   // Params::frequencies
  int32_t new_block[ROWS];           // QKV_PROJ: where each row's key and value go
  ChunkTable chunks[2];  // full attention, sliding window
  double pick_value[CONSUMER_WARPS];
  float pick_score[CONSUMER_WARPS];
  int32_t pick_token[CONSUMER_WARPS];
  int32_t next_token[ROWS];
  uint64_t page_full[RING], page_empty[RING];
  uint64_t task_full[isa::TASK_SLOTS], task_empty[isa::TASK_SLOTS];
  uint64_t message_full[MESSAGES], message_empty[MESSAGES];
  uint64_t sums_full[TILE_GROUPS][2], sums_empty[TILE_GROUPS][2];
  uint64_t route_full;
  uint64_t rows_moved;    // a phase a step: SAMPLE_COMMIT has moved this SM's rows on
  uint32_t issued;        // pages of the ring, over the launch; written by the copier
  int32_t ended;          // the launch is over; written in SAMPLE_COMMIT
  int32_t aborted;        // the watchdog has struck, here or on another SM; written by the publisher
  Note notes[THREADS / isa::WARP];
  int32_t doing[4];       // each Agent's task: its number in the list
  int32_t quit[2];        // consumers: `aborted` as their leader saw it at the start of a task, taking turns
  int32_t stop_seen;
  int32_t experts_read;   // in this launch, over all layers: the loader adds them up, SAMPLE_COMMIT tells the host
  uint32_t epoch;         // of the consumers' step, counted from 1
  uint32_t searches;      // the same, if only steps of launches that search are counted
  int32_t searching;      // this launch does
  TraceState<variant::TRACE> trace;
};
static_assert(sizeof(Shared) <= isa::SHARED_BYTES, "shared memory of an SM is exceeded");

// One launch. All pointers are to global memory; `host` and `tokens` to pinned memory of the host.
struct Params {
  const int32_t* descriptors;   // [SMS][TASKS][WORDS]
  const uint8_t* weights;
  const float* norms;           // [NORMS][HIDDEN]
  const float* frequencies;     // [HEAD_DIM / 2]
  uint8_t* buffers;             // the arena of sizes.h
  uint32_t* counters;           // [COUNTERS + PACE_PLACES], each in 128 bytes of its own
  const uint64_t* kv_pages;     // [LAYERS] addresses: [blocks][KV_HEADS][2][page]
  const int32_t* tables;        // [ROWS][2][table_blocks]: the full group's blocks, then the sliding group's
  const variant::RowInput* rows;  // [ROWS]
  const int32_t* stop_tokens;
  uint32_t* abort_flag;
  variant::HostLink* host;
  int32_t* tokens;              // [steps][ROWS]
  variant::LogprobRecord* logprobs;  // [steps][ROWS], pinned as `tokens` are
  const variant::Bias* biases;
  const uint32_t* masks;        // [ROWS][MASK_WORDS]: bits of allowed tokens
  int32_t* history;             // [ROWS][VOCABULARY]: twice the count in the output, plus one if in the prompt
  float* adjusted;              // as LOGITS: after penalties, bias and mask, of rows that have any
  uint8_t* trace;               // anchors, then lines; only in a variant that records them
  int32_t table_blocks;
  int32_t steps;
  uint32_t epoch;               // steps since the counters were zeroed, before this launch
  uint32_t timeout;             // nanoseconds that one wait may take
  uint32_t searched;            // of `epoch` those of launches that searched: only these signal SAMPLE_SELECT's counters
  uint32_t zero;
};
static_assert(sizeof(Params) == variant::PARAMS_BYTES);

constexpr int COUNTER_WORDS = 32;

__device__ __forceinline__ uint32_t* counter_at(const Params& p, int counter) {
  return p.counters + static_cast<size_t>(counter) * COUNTER_WORDS;
}

__device__ __forceinline__ uint8_t* buffer_at(const Params& p, int32_t buffer) {
  return p.buffers + variant::OFFSETS[buffer];
}
