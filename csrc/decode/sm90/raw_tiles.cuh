// What the kernels of 8, 16 and 32 heads a block share: tiles of 64 keys that stay in shared memory as the cache has
// them. Turns, the copying warps, a head of the query in a warp's registers, codes of values.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "decode/query.cuh"
#include "decode/sm90/dequant.cuh"
#include "decode/sm90/gather.cuh"
#include "decode/sm90/work.cuh"

namespace sgl_dsv4::sm90 {

// What a block's attending warps have come to: it has no keys; results are in shared memory; they are written.
enum class Done { kEmpty, kStaged, kWritten };

__device__ __forceinline__ int my_warp() {
  return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
}
__device__ __forceinline__ bool copies(int warp) {
  return warp >= kAttendWarps && warp < kAttendWarps + kCopyWarps;
}
__device__ __forceinline__ bool weighs(int warp) {
  return warp >= kAttendWarps + kCopyWarps;
}

inline constexpr int kHandOvers = 2;  // arrivals of a copying thread, a tile

template <typename Shared>
__device__ __forceinline__ void init_raw_barriers(Shared& shared) {
  const auto init = [](uint64_t& barrier, int threads) {
    ptx::mbarrier_init(ptx::shared_address(&barrier), static_cast<uint32_t>(threads));
  };
  for (uint64_t& barrier : shared.full) init(barrier, kHandOvers * kCopyWarps * 32);
  for (uint64_t& barrier : shared.weights_full) init(barrier, kWeighWarps * 32);
}

// A tile's number in its block, and what follows from it.
struct Turn {
  int tile = 0, stage = 0;
  uint32_t stage_parity = 0;

  __device__ __forceinline__ void advance() {
    ++tile;
    skip_stage();
  }
  __device__ __forceinline__ void skip_stage() {
    stage = stage == kRawStages - 1 ? 0 : stage + 1;
    stage_parity ^= stage == 0;
  }
  __device__ __forceinline__ int buffer() const { return tile & 1; }
  __device__ __forceinline__ uint32_t buffer_parity() const { return static_cast<uint32_t>(tile >> 1 & 1); }
  // Where its stage is, from the first one on.
  template <typename Shared>
  __device__ __forceinline__ uint32_t tile_at(const Shared& /* its type */) const {
    return static_cast<uint32_t>(stage * sizeof(Shared::tiles[0]));
  }
};

// ---- copying ----

__device__ __forceinline__ int copy_warp() {
  return static_cast<int>(threadIdx.x) / 32 - kAttendWarps;
}
// Two lanes of a copying warp have the same key.
__device__ __forceinline__ int copy_key() {
  return copy_warp() * kCopyKeys + static_cast<int>(threadIdx.x) % kCopyKeys;
}

// Starts the copies of the scales of a warp's 16 rows, each lane `row` of its key. Returns which rows are attended.
__device__ __forceinline__ uint32_t copy_scales(const Row& row, RawTile& tile, int lane) {
  if (lane < kCopyKeys) ptx::cp_async_8_if(row.attended, ptx::shared_address(tile.scales[copy_key()]), row.scales);
  const uint32_t attended = __ballot_sync(kAllLanes, row.attended);
  if (lane == 0) tile.attended[copy_warp()] = static_cast<uint16_t>(attended);
  return attended;
}

// Starts the copies of the rows: an instruction takes 64 bytes of eight rows.
__device__ __forceinline__ void copy_rows(const Row& row, RawTile& tile, int lane) {
  const uint32_t attended = copy_scales(row, tile, lane);
  const uint64_t data = reinterpret_cast<uint64_t>(row.data);
  const int g = lane / 4, part = lane % 4;
#pragma unroll
  for (int i = 0; i < kCopyKeys; i += 8) {
    const uint64_t from = __shfl_sync(kAllLanes, data, g + i) + part * 16;
    const bool wanted = attended >> (g + i) & 1;
    const uint32_t to = ptx::shared_address(tile.rows) + raw_offset(copy_warp() * kCopyKeys + g + i, part);
#pragma unroll
    for (int c = 0; c < V4Layout::kDataBytes; c += kChunkBytes)
      ptx::cp_async_16_if(wanted, to + c, reinterpret_cast<const void*>(from + c));
  }
}

// The same: an instruction takes a line of 128 bytes of four rows, 8 lanes a row. 20 copies instead of 18, with
// addresses and predicates three times as many instructions, but fewer accesses to shared memory and to tags. Where
// rows start at multiples of 64 bytes, as in SGLang's caches, a row has five lines, half of the first or of the last.
inline constexpr int kLine = 128, kHalfLine = kLine / 2, kLineLanes = kLine / 16;
inline constexpr int kLines = (V4Layout::kDataBytes + kHalfLine) / kLine, kCopyRows = 32 / kLineLanes;
static_assert(V4Layout::kDataBytes % kLine == kHalfLine && kCopyKeys % kCopyRows == 0);
static_assert(kAttendWarps % kCopyWarps == 0);

__device__ __forceinline__ void copy_lines(const Row& row, RawTile& tile) {
  // Read anew, so that what is made of it here takes no registers from one tile to the next.
  const int thread = ptx::thread_of_block(), lane = thread % 32, first_key = thread / 32 % kCopyWarps * kCopyKeys;
  const uint32_t attended = copy_scales(row, tile, lane);
  const uint64_t data = reinterpret_cast<uint64_t>(row.data);
  const int chunk = lane % kLineLanes;
  const bool upper = chunk >= kLineLanes / 2;
#pragma unroll
  for (int i = 0; i < kCopyKeys; i += kCopyRows) {
    const int owner = i + lane / kLineLanes;
    const uint64_t start = __shfl_sync(kAllLanes, data, owner);
    const bool wanted = attended >> owner & 1;
    // A row that starts in the upper half of a line: all that lies half a line before.
    const uint32_t half = static_cast<uint32_t>(start) & kHalfLine;
    const uint64_t from = start - half + chunk * 16;
    const uint32_t to = ptx::shared_address(tile.rows) + raw_offset(first_key + owner, chunk) - half;
#pragma unroll
    for (int l = 0; l < kLines; ++l) {
      const bool here = l == 0 ? upper || half == 0 : l == kLines - 1 ? !upper || half != 0 : true;
      ptx::cp_async_16_if(here, wanted, to + l * kLine, reinterpret_cast<const void*>(from + l * kLine));
    }
  }
}

// Arrives once for the thread's copies, when they have landed, and once for what it has stored. To hand a tile over
// only behind the issue of the next one's copies, or by one lane a warp, is no faster.
__device__ __forceinline__ void hand_over(uint64_t& full) {
  ptx::cp_async_mbarrier_arrive(ptx::shared_address(&full));
  ptx::mbarrier_arrive(ptx::shared_address(&full));
}

// The role. Returns whether the block has keys.
template <typename Shared>
__device__ __forceinline__ bool copy_tiles(const DecodeParams& p, const Part& part, const Lengths& lengths_at,
                                           const Guess& guess, Shared& shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, key = copy_key();
  const FirstLoads first = load_first(guess, lengths_at);

  // The first rows: as guessed, then as the lengths say.
  copy_rows(locate(p.source[guess.keys[0].extra], first.slots[0]), shared.tiles[0], lane);
  const Work w = my_work(p, part, lengths_at, first.lengths);
  if (w.range.empty()) {
    ptx::cp_async_wait();
    return false;
  }
  const FirstRow actual = check_first(p, w, guess, first, key);
  if (actual.other) {
    ptx::cp_async_wait();
    copy_rows(locate(p.source[actual.extra], actual.slot), shared.tiles[0], lane);
  }
  hand_over(shared.full[0]);
  int next_slot = first_slot(p, w, guess, 1, first.slots[1], key);
  int later_slot = load_slot(p, w, w.range.begin + 2, key);

  Turn turn;
  const int tiles = w.range.end - w.range.begin;
#pragma unroll 1
  for (turn.advance(); turn.tile < tiles; turn.advance()) {
    const int tile = w.range.begin + turn.tile;
    const Row row = locate(p.source[tile >= w.row.main_blocks], next_slot);
    next_slot = later_slot;
    later_slot = load_slot(p, w, tile + 2, key);
    if (turn.tile >= kRawStages) ptx::bar_sync(kEmpty + turn.stage, kRawThreads);
    if (tiles <= kRawStages) {  // the time to the first rows counts
      copy_rows(row, shared.tiles[turn.stage], lane);
    } else {
      copy_lines(row, shared.tiles[turn.stage]);
    }
    hand_over(shared.full[turn.stage]);
  }
  ptx::cp_async_wait();
  return true;
}

// ---- weighing ----

inline constexpr int kWeighKeys = kTileKeys / kWeighWarps;  // whose scales a warp reads

__device__ __forceinline__ int weigh_warp() {
  return static_cast<int>(threadIdx.x) / 32 - kAttendWarps - kCopyWarps;
}

// Over kLanes neighbouring lanes.
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, bit));
  return x;
}
template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int bit = kLanes / 2; bit > 0; bit /= 2) x += __shfl_xor_sync(kAllLanes, x, bit);
  return x;
}

// ---- the query ----

// Where a lane's first vector of head `head` of the block lies; nullptr past the last head.
__device__ __forceinline__ const __nv_bfloat16* find_head(const DecodeParams& p, const Part& part, int head, int lane) {
  if (head >= part.heads) return nullptr;
  const auto* at = static_cast<const __nv_bfloat16*>(p.q) + part.token * p.stride_q_token +
                   (part.first_head + head) * p.stride_q_head + lane * query::kVec;
  ptx::keep(at);
  return at;
}

// A head in the registers of a warp; zeros past the last one.
__device__ __forceinline__ query::Values load_head(const DecodeParams& p, const __nv_bfloat16* at) {
  constexpr int kVectorStep = 32 * query::kVec;
  query::Values values = {};
  if (p.q_is_aligned) {
#pragma unroll
    for (int i = 0; i < query::kVectors; ++i) {
      const uint4 v = ptx::ld_global_v4_if(at != nullptr, at + i * kVectorStep);
      values.vector[i] = {{v.x, v.y, v.z, v.w}};
    }
  } else if (at != nullptr) {
#pragma unroll
    for (int i = 0; i < query::kVectors; ++i) values.vector[i] = query::load_vector<false>(at + i * kVectorStep);
  }
  return values;
}

// Of the head's largest value: e of 2^e, -127 of zero and subnormals, 128 of infinity and NaN.
__device__ __forceinline__ int largest_exponent(const query::Values& head) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < query::kVectors * query::kPairs; ++i)
    most = __vmaxu2(most, head.vector[i / query::kPairs].word[i % query::kPairs] & 0x7fff7fffu);
  most = __reduce_max_sync(kAllLanes, max(most & 0xffffu, most >> 16));
  return static_cast<int>(most >> 7) - 127;
}

__device__ __forceinline__ float power_of_two(int e) {
  return __int_as_float((127 + e) << 23);
}

// ---- values ----

// Two codes, of neighbouring keys, of the even or of the odd channel, times 2^-120.
__device__ __forceinline__ uint32_t even_channel(uint32_t codes) {
  return ptx::prmt<0xa280>(codes) * 16 & kPlacedPair;
}
__device__ __forceinline__ uint32_t odd_channel(uint32_t codes) {
  return ptx::prmt<0xb391>(codes) * 16 & kPlacedPair;
}

}  // namespace sgl_dsv4::sm90
